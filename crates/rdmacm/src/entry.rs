//! The one way into the library: every exported function is made by the macro `rdma!`.
//!
//! A body returns `Call`; the wrapper turns a `Refusal` into -1 or NULL with `errno`, and stops panics and `pthread_cancel`.

use std::any::Any;
use std::borrow::Cow;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::verbs;

/// What a function's body gives.
pub(crate) type Call<T> = Result<T, Refusal>;

/// Why something was not done.
#[derive(Debug)]
pub(crate) struct Refusal {
    errno: c_int,
    /// None: libibverbs has told it already, or it is no news.
    sentence: Option<Cow<'static, str>>,
}

impl Refusal {
    /// A refusal with its `errno` and a sentence that names the argument at fault and, where there is one, the remedy.
    pub(crate) fn new(errno: c_int, sentence: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { errno, sentence: Some(sentence.into()) }
    }

    /// `EINVAL`.
    pub(crate) fn invalid(sentence: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal::new(libc::EINVAL, sentence)
    }

    /// Without words.
    pub(crate) fn told(errno: c_int) -> Refusal {
        Refusal { errno, sentence: None }
    }

    /// What the last call of the C library, or of verbs that return a pointer, left in `errno`.
    pub(crate) fn last() -> Refusal {
        Refusal::told(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    pub(crate) fn errno(&self) -> c_int {
        self.errno
    }
}

/// The result of a function that gives 0 or an error number and has told the reason.
pub(crate) fn check(errno: c_int) -> Call<()> {
    if errno == 0 { Ok(()) } else { Err(Refusal::told(errno)) }
}

/// What a function gives when it refuses.
pub(crate) trait Refused {
    fn refused() -> Self;
}

impl Refused for c_int {
    fn refused() -> c_int {
        -1
    }
}

impl Refused for isize {
    fn refused() -> isize {
        -1
    }
}

impl Refused for i64 {
    fn refused() -> i64 {
        -1
    }
}

impl Refused for usize {
    // Functions of rsockets give -1 in a `size_t`.
    fn refused() -> usize {
        usize::MAX
    }
}

impl Refused for u16 {
    fn refused() -> u16 {
        0
    }
}

impl Refused for () {
    fn refused() {}
}

impl<T> Refused for *mut T {
    fn refused() -> *mut T {
        ptr::null_mut()
    }
}

impl Refused for *const c_char {
    fn refused() -> *const c_char {
        ptr::null()
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// Runs a body behind the boundary. The name ends with a NUL.
pub(crate) fn enter<T: Refused>(function: &'static str, body: impl FnOnce() -> Call<T>) -> T {
    const DISABLE: c_int = 1;
    let mut before = 0;
    // SAFETY: changes the calling thread's own state only; the place is ours.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    // SAFETY: `__errno_location` gives the calling thread's own, always valid `errno`.
    let errno = unsafe { *libc::__errno_location() };
    let refusal = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(good)) => Ok(good),
        Ok(Err(refusal)) => Err(refusal),
        Err(panic) => Err(broken(panic)),
    };
    // What went on inside is no news to a program that prints `errno` after something else.
    let (result, errno) = match refusal {
        Ok(good) => (good, errno),
        Err(refusal) => {
            tell(function, &refusal);
            (T::refused(), refusal.errno)
        }
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    // SAFETY: as above, and NULL is allowed.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

/// A panic is our own broken invariant: the program gets an error instead of an unwinding through C frames.
#[cold]
fn broken(panic: Box<dyn Any + Send>) -> Refusal {
    let said = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Refusal::new(libc::EIO, format!("internal error: {}; please report it", said.unwrap_or("(no message)")))
}

/// Tells of something that is not the result of the call.
pub(crate) fn note(function: &'static str, errno: c_int, sentence: String) {
    tell(function, &Refusal::new(errno, sentence));
}

/// To the log and the recorder of refusals, which are libibverbs's.
pub(crate) fn tell(function: &'static str, refusal: &Refusal) {
    let Some(sentence) = &refusal.sentence else { return };
    let Ok(sentence) = CString::new(sentence.as_bytes()) else { return };
    // SAFETY: the first lives for good and ends with a NUL (the macro adds it), the second during the call.
    unsafe { verbs::ferroce_cm_tell(function.as_ptr().cast(), refusal.errno, sentence.as_ptr()) };
}

/// What a pointer of the program points to; `EINVAL` for NULL.
///
/// # Safety
///
/// NULL, or an object that lives, and is not changed, as long as the reference.
pub(crate) unsafe fn given<'a, T>(pointer: *const T, what: &'static str) -> Call<&'a T> {
    // SAFETY: by the contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| Refusal::invalid(format!("{what} is NULL")))
}

/// Stores a result for the program; `EINVAL` for NULL.
///
/// # Safety
///
/// NULL, or room for a `T`.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Call<()> {
    if place.is_null() {
        return Err(Refusal::invalid("no place for the result"));
    }
    // SAFETY: not NULL, so by the contract it is room for a `T`.
    unsafe { place.write(value) };
    Ok(())
}

/// Memory of the C library, zeroed; for what programs or `free` shall see.
pub(crate) fn calloc<T>(count: usize) -> Call<*mut T> {
    // SAFETY: asks for memory only.
    let memory = unsafe { libc::calloc(count.max(1), size_of::<T>()) };
    if memory.is_null() { Err(Refusal::new(libc::ENOMEM, "out of memory")) } else { Ok(memory.cast()) }
}

/// Gives memory of [`calloc`] back.
pub(crate) fn free<T>(memory: *mut T) {
    // SAFETY: NULL or from `calloc`; the caller gives it up.
    unsafe { libc::free(memory.cast::<c_void>()) };
}

/// An exported function: `rdma! { /// docs  fn name(args) -> type { body } }`. The body is a [`Call`].
macro_rules! rdma {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// The contract of the C function: pointers are NULL or point to live objects of their type.
            // SAFETY: the name is the C library's own, and is defined once: symbols.in lists it, the link would report a second.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                $crate::entry::enter::<$result>(concat!(stringify!($name), "\0"), || $body)
            }
        )*
    };
}

pub(crate) use rdma;
