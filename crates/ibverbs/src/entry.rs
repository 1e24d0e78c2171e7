//! The one way into the library: every exported function and every slot of a dispatch table is made by the macros `verb!` or
//! `slot!`.
//!
//! A body returns [`Verb`]; the wrapper turns a [`Refusal`] into what that function's callers expect (the conventions of verbs are
//! mixed), sets `errno`, tells the log and the recorder, and stops panics and `pthread_cancel` at the boundary.

use std::any::Any;
use std::borrow::Cow;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::{cancel, refusal};

/// What a verb's body gives.
pub type Verb<T> = Result<T, Refusal>;

/// Why a verb was not done.
#[derive(Debug)]
pub struct Refusal {
    errno: c_int,
    why: Why,
    routine: bool,
}

#[derive(Debug)]
enum Why {
    Said(Cow<'static, str>),
    Ferroce(ferroce::Error),
}

impl Refusal {
    /// A refusal with its `errno` and a sentence that names the argument at fault and, where there is one, the remedy.
    pub fn new(errno: c_int, sentence: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { errno, why: Why::Said(sentence.into()), routine: false }
    }

    /// `EINVAL`.
    pub fn invalid(sentence: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal::new(libc::EINVAL, sentence)
    }

    /// `EOPNOTSUPP`.
    pub fn unsupported(sentence: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal::new(libc::EOPNOTSUPP, sentence)
    }

    /// An answer that programs expect in normal operation (no event yet, queue full): neither logged nor recorded.
    pub fn routine(errno: c_int, sentence: &'static str) -> Refusal {
        Refusal { errno, why: Why::Said(Cow::Borrowed(sentence)), routine: true }
    }

    /// The same refusal, treated as [`Refusal::routine`].
    pub fn into_routine(self) -> Refusal {
        Refusal { routine: true, ..self }
    }

    /// Number for `errno` or the return value; positive.
    pub fn errno(&self) -> c_int {
        self.errno
    }

    /// Whether it is worth telling.
    pub fn is_routine(&self) -> bool {
        self.routine
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.why {
            Why::Said(sentence) => f.write_str(sentence),
            Why::Ferroce(error) => error.fmt(f),
        }
    }
}

impl From<ferroce::Error> for Refusal {
    fn from(error: ferroce::Error) -> Refusal {
        // Zero would read as success.
        let errno = if error.errno() > 0 { error.errno() } else { libc::EIO };
        Refusal { errno, why: Why::Ferroce(error), routine: matches!(errno, libc::EAGAIN | libc::EINTR) }
    }
}

/// How a function tells its result.
pub trait Convention {
    /// What the body gives.
    type Good;
    /// What C sees.
    type Return;
    /// Success.
    fn good(good: Self::Good) -> Self::Return;
    /// Refusal; `errno` is already set.
    fn bad(errno: c_int) -> Self::Return;
}

/// 0, or the error number: most `int` verbs.
pub struct Status;

impl Convention for Status {
    type Good = ();
    type Return = c_int;
    fn good((): ()) -> c_int {
        0
    }
    fn bad(errno: c_int) -> c_int {
        errno
    }
}

/// A pointer, or NULL and `errno`.
pub struct Pointer<T>(std::marker::PhantomData<T>);

impl<T> Convention for Pointer<T> {
    type Good = *mut T;
    type Return = *mut T;
    fn good(good: *mut T) -> *mut T {
        good
    }
    fn bad(_errno: c_int) -> *mut T {
        ptr::null_mut()
    }
}

/// A number that is not negative, or -1 and `errno`.
pub struct MinusOne;

impl Convention for MinusOne {
    type Good = c_int;
    type Return = c_int;
    fn good(good: c_int) -> c_int {
        good
    }
    fn bad(_errno: c_int) -> c_int {
        -1
    }
}

/// A count, or the negated error number.
pub struct NegativeErrno;

impl Convention for NegativeErrno {
    type Good = usize;
    type Return = libc::ssize_t;
    fn good(good: usize) -> libc::ssize_t {
        good as libc::ssize_t
    }
    fn bad(errno: c_int) -> libc::ssize_t {
        -(errno as libc::ssize_t)
    }
}

/// Nothing.
pub struct Void;

impl Convention for Void {
    type Good = ();
    type Return = ();
    fn good((): ()) {}
    fn bad(_errno: c_int) {}
}

/// A plain value; zero (or the equivalent) on refusal.
pub struct Plain<T>(std::marker::PhantomData<T>);

impl<T: Default> Convention for Plain<T> {
    type Good = T;
    type Return = T;
    fn good(good: T) -> T {
        good
    }
    fn bad(_errno: c_int) -> T {
        T::default()
    }
}

/// Runs a body behind the boundary. `verb` is the C name.
pub fn enter<C: Convention>(verb: &'static str, body: impl FnOnce() -> Verb<C::Good>) -> C::Return {
    let before = errno();
    cancel::disabled(|| {
        let refusal = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(good)) => {
                // What went on inside is no news to a program that prints `errno` after something else.
                set_errno(before);
                return C::good(good);
            }
            Ok(Err(refusal)) => refusal,
            Err(panic) => broken(panic),
        };
        refusal::tell(verb, &refusal);
        set_errno(refusal.errno);
        C::bad(refusal.errno)
    })
}

/// A panic is our own broken invariant: the program gets an error instead of an unwinding through C frames.
#[cold]
fn broken(panic: Box<dyn Any + Send>) -> Refusal {
    let said = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Refusal::new(libc::EIO, format!("internal error: {}; please report it", said.unwrap_or("(no message)")))
}

/// The calling thread's `errno`.
fn errno() -> c_int {
    // SAFETY: as in `set_errno`.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: `__errno_location` returns the calling thread's own, always valid `errno`.
    unsafe { *libc::__errno_location() = errno }
}

/// An exported function: `verb! { /// docs  fn name(args) -> Convention { body } }`. The body is a [`Verb`].
macro_rules! verb {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $convention:ty $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// The contract of the C function: pointers are NULL or point to live objects of their type.
            // SAFETY: the name is the C library's own, and is defined once: symbols.in lists it, the link would report a second.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> <$convention as $crate::entry::Convention>::Return {
                $crate::entry::enter::<$convention>(stringify!($name), || $body)
            }
        )*
    };
}

/// A function for a dispatch table, not exported; the string is the verb that programs know it by.
macro_rules! slot {
    ($($(#[$meta:meta])* fn $name:ident as $verb:literal ($($arg:ident: $type:ty),* $(,)?) -> $convention:ty $body:block)*) => {
        $(
            $(#[$meta])*
            pub(crate) unsafe extern "C" fn $name(
                $($arg: $type),*
            ) -> <$convention as $crate::entry::Convention>::Return {
                $crate::entry::enter::<$convention>($verb, || $body)
            }
        )*
    };
}

pub(crate) use {slot, verb};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_tells_refusal_its_own_way() {
        assert_eq!(enter::<Status>("t", || Err(Refusal::invalid("x"))), libc::EINVAL);
        assert_eq!(errno(), libc::EINVAL);
        assert!(enter::<Pointer<u8>>("t", || Err(Refusal::unsupported("x"))).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        assert_eq!(enter::<MinusOne>("t", || Err(Refusal::new(libc::ENODATA, "x"))), -1);
        assert_eq!(errno(), libc::ENODATA);
        assert_eq!(enter::<NegativeErrno>("t", || Err(Refusal::invalid("x"))), -(libc::EINVAL as isize));
        assert_eq!(enter::<Plain<u64>>("t", || Err(Refusal::invalid("x"))), 0);
    }

    #[test]
    fn success_leaves_errno_as_it_was() {
        set_errno(libc::ENOTTY);
        let good = || {
            set_errno(libc::EPERM);
            Ok(())
        };
        assert_eq!((enter::<Status>("t", good), errno()), (0, libc::ENOTTY));
    }

    #[test]
    fn success_passes_through() {
        assert_eq!(enter::<Status>("t", || Ok(())), 0);
        assert_eq!(enter::<NegativeErrno>("t", || Ok(3)), 3);
        assert_eq!(enter::<MinusOne>("t", || Ok(7)), 7);
    }

    #[test]
    fn a_panic_becomes_eio() {
        assert_eq!(enter::<Status>("t", || panic!("broken on purpose")), libc::EIO);
        assert_eq!(errno(), libc::EIO);
    }
}
