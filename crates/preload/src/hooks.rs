//! The functions that take a path: all names under which programs of the last decades know them.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::real::{Real, set_enosys};
use crate::redirect::{Redirected, hide};

/// A stream, a folder, a buffer, a function: passed on and not looked at.
type Opaque = *mut c_void;

/// Defines functions that pass on to their namesakes of the C library, each with its path in the place of the argument `path`.
/// `mode` of `open` is one of the variable arguments; the calling conventions of Linux's 64-bit architectures put it where they put
/// an ordinary one, and it is passed on whether the caller gave it or not.
macro_rules! hooks {
    ($(fn $name:ident($($before:ident: $before_type:ty,)* [path] $(, $after:ident: $after_type:ty)*) -> $ret:ty = $failed:expr;)*) => {
        /// The C library's functions.
        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        mod reals {
            use super::Real;
            $(pub(super) static $name: Real = {
                // A name in the source has no NUL inside.
                match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => Real::new(name),
                    Err(_) => panic!("a name with its end"),
                }
            };)*
        }

        /// All of them.
        pub(crate) static ALL: &[&Real] = &[
            &reals_of_resolving::realpath,
            &reals_of_resolving::__realpath_chk,
            &reals_of_resolving::canonicalize_file_name,
            $(&reals::$name,)*
        ];

        $(
            /// As the C library's function of this name.
            ///
            /// # Safety
            /// As for that function.
            // SAFETY: the name is the C library's own, and is defined once in this library.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($before: $before_type,)* path: *const c_char $(, $after: $after_type)*) -> $ret {
                let address = reals::$name.address();
                if address.is_null() {
                    set_enosys();
                    return $failed;
                }
                type Function = unsafe extern "C" fn($($before_type,)* *const c_char $(, $after_type)*) -> $ret;
                // SAFETY: what the C library calls by this name has this type; the caller's arguments are as it wants them.
                unsafe {
                    let function = std::mem::transmute::<*mut c_void, Function>(address);
                    let redirected = Redirected::of(path);
                    function($($before,)* redirected.as_ptr() $(, $after)*)
                }
            }
        )*
    };
}

hooks! {
    fn open([path], flags: c_int, mode: c_uint) -> c_int = -1;
    fn open64([path], flags: c_int, mode: c_uint) -> c_int = -1;
    fn __open_2([path], flags: c_int) -> c_int = -1;
    fn __open64_2([path], flags: c_int) -> c_int = -1;
    fn openat(dir: c_int, [path], flags: c_int, mode: c_uint) -> c_int = -1;
    fn openat64(dir: c_int, [path], flags: c_int, mode: c_uint) -> c_int = -1;
    fn __openat_2(dir: c_int, [path], flags: c_int) -> c_int = -1;
    fn __openat64_2(dir: c_int, [path], flags: c_int) -> c_int = -1;
    fn fopen([path], mode: *const c_char) -> Opaque = null_mut();
    fn fopen64([path], mode: *const c_char) -> Opaque = null_mut();
    fn freopen([path], mode: *const c_char, stream: Opaque) -> Opaque = null_mut();
    fn freopen64([path], mode: *const c_char, stream: Opaque) -> Opaque = null_mut();
    fn opendir([path]) -> Opaque = null_mut();
    fn scandir([path], names: Opaque, filter: Opaque, compare: Opaque) -> c_int = -1;
    fn scandir64([path], names: Opaque, filter: Opaque, compare: Opaque) -> c_int = -1;
    fn stat([path], buffer: Opaque) -> c_int = -1;
    fn stat64([path], buffer: Opaque) -> c_int = -1;
    fn lstat([path], buffer: Opaque) -> c_int = -1;
    fn lstat64([path], buffer: Opaque) -> c_int = -1;
    fn fstatat(dir: c_int, [path], buffer: Opaque, flags: c_int) -> c_int = -1;
    fn fstatat64(dir: c_int, [path], buffer: Opaque, flags: c_int) -> c_int = -1;
    fn statx(dir: c_int, [path], flags: c_int, mask: c_uint, buffer: Opaque) -> c_int = -1;
    fn __xstat(version: c_int, [path], buffer: Opaque) -> c_int = -1;
    fn __xstat64(version: c_int, [path], buffer: Opaque) -> c_int = -1;
    fn __lxstat(version: c_int, [path], buffer: Opaque) -> c_int = -1;
    fn __lxstat64(version: c_int, [path], buffer: Opaque) -> c_int = -1;
    fn __fxstatat(version: c_int, dir: c_int, [path], buffer: Opaque, flags: c_int) -> c_int = -1;
    fn __fxstatat64(version: c_int, dir: c_int, [path], buffer: Opaque, flags: c_int) -> c_int = -1;
    fn access([path], mode: c_int) -> c_int = -1;
    fn eaccess([path], mode: c_int) -> c_int = -1;
    fn euidaccess([path], mode: c_int) -> c_int = -1;
    fn faccessat(dir: c_int, [path], mode: c_int, flags: c_int) -> c_int = -1;
    fn readlink([path], buffer: *mut c_char, size: usize) -> isize = -1;
    fn __readlink_chk([path], buffer: *mut c_char, size: usize, room: usize) -> isize = -1;
    fn readlinkat(dir: c_int, [path], buffer: *mut c_char, size: usize) -> isize = -1;
    fn __readlinkat_chk(dir: c_int, [path], buffer: *mut c_char, size: usize, room: usize) -> isize = -1;
    fn statfs([path], buffer: Opaque) -> c_int = -1;
    fn statfs64([path], buffer: Opaque) -> c_int = -1;
    fn chdir([path]) -> c_int = -1;
    fn getxattr([path], name: *const c_char, value: Opaque, size: usize) -> isize = -1;
    fn lgetxattr([path], name: *const c_char, value: Opaque, size: usize) -> isize = -1;
    fn listxattr([path], list: *mut c_char, size: usize) -> isize = -1;
    fn llistxattr([path], list: *mut c_char, size: usize) -> isize = -1;
}

/// Defines functions that give the true path behind another: the program is to see the name that it knows.
macro_rules! resolving {
    ($(fn $name:ident($($after:ident: $after_type:ty),*);)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As for that function.
        // SAFETY: the name is the C library's own, and is defined once in this library.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char $(, $after: $after_type)*) -> *mut c_char {
            let address = reals_of_resolving::$name.address();
            if address.is_null() {
                set_enosys();
                return null_mut();
            }
            type Function = unsafe extern "C" fn(*const c_char $(, $after_type)*) -> *mut c_char;
            // SAFETY: what the C library calls by this name has this type; the caller's arguments are as it wants them. What it
            // gives is NULL or a string of the caller's that nobody else knows yet.
            unsafe {
                let function = std::mem::transmute::<*mut c_void, Function>(address);
                let result = function(Redirected::of(path).as_ptr() $(, $after)*);
                hide(result);
                result
            }
        }
    )*};
}

#[allow(non_upper_case_globals, reason = "they have the names of the functions")]
mod reals_of_resolving {
    use super::Real;

    pub(super) static realpath: Real = Real::new(c"realpath");
    pub(super) static __realpath_chk: Real = Real::new(c"__realpath_chk");
    pub(super) static canonicalize_file_name: Real = Real::new(c"canonicalize_file_name");
}

resolving! {
    fn realpath(resolved: *mut c_char);
    fn __realpath_chk(resolved: *mut c_char, room: usize);
    fn canonicalize_file_name();
}
