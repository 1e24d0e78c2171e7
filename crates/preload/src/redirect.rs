//! Which paths lead elsewhere, and where.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Longest path with its end, as in `limits.h`.
pub(crate) const PATH_MAX: usize = 4096;

/// Folders whose contents are ours.
const PREFIXES: [&[u8]; 3] = [b"/sys/class/infiniband", b"/sys/class/infiniband_verbs", b"/dev/infiniband"];

/// The folder that has them, from `FERROCE_SYSFS`; not set: nothing leads elsewhere.
static ROOT: OnceLock<Box<[u8]>> = OnceLock::new();

/// Called when the library is loaded, before anything of the program runs.
extern "C" fn load() {
    crate::real::look_up_all();
    let root = std::env::var_os("FERROCE_SYSFS").map(|root| root.into_encoded_bytes());
    if let Some(root) = root.filter(|root| root.first() == Some(&b'/')) {
        // It is set once: loaded once.
        let _ = ROOT.set(root.into_boxed_slice());
    }
}

// SAFETY: the loader calls the functions of this section with arguments that `load` need not take, once.
#[unsafe(link_section = ".init_array")]
#[used]
static LOAD: extern "C" fn() = load;

/// A path as it is used.
pub(crate) struct Redirected {
    /// Not filled where nothing is changed, which is nearly always.
    buffer: [MaybeUninit<u8>; PATH_MAX],
    changed: bool,
    original: *const c_char,
}

impl Redirected {
    /// The path to use instead of `path`.
    ///
    /// # Safety
    /// `path` is NULL or a string with its end.
    pub(crate) unsafe fn of(path: *const c_char) -> Redirected {
        let mut redirected = Redirected { buffer: [MaybeUninit::uninit(); PATH_MAX], changed: false, original: path };
        if let Some(root) = ROOT.get()
            && !path.is_null()
        {
            // SAFETY: by this function's contract.
            let path = unsafe { CStr::from_ptr(path) }.to_bytes();
            redirected.changed = redirect(root, path, &mut redirected.buffer);
        }
        redirected
    }

    /// As C takes it; good as long as this lives.
    pub(crate) fn as_ptr(&self) -> *const c_char {
        if self.changed { self.buffer.as_ptr().cast() } else { self.original }
    }
}

/// Writes where `path` leads into `buffer`, with its end. False: nowhere else, or there is no room for it.
fn redirect(root: &[u8], path: &[u8], buffer: &mut [MaybeUninit<u8>]) -> bool {
    // Filled where it is needed: nearly all paths are none of ours.
    let mut resolved;
    let (root, path) = match below(path) {
        None => return false,
        Some(rest) if stays_below(rest) => (root, path),
        // Linux's folder need not be there, and what is beside it is found without.
        Some(_) => {
            resolved = [0; PATH_MAX];
            match without_dots(path, &mut resolved) {
                None => return false,
                Some(path) if is_ours(path) => (root, path),
                Some(path) => (&[][..], path),
            }
        }
    };
    if root.len() + path.len() >= buffer.len() {
        return false;
    }
    let bytes = root.iter().chain(path).chain(&[0]);
    buffer.iter_mut().zip(bytes).for_each(|(to, from)| {
        to.write(*from);
    });
    true
}

fn is_ours(path: &[u8]) -> bool {
    below(path).is_some_and(stays_below)
}

/// What follows the folder in a path that begins with one of ours.
fn below(path: &[u8]) -> Option<&[u8]> {
    // Most paths are decided here.
    if !path.starts_with(b"/sys/c") && !path.starts_with(b"/dev/i") {
        return None;
    }
    let rest = |prefix: &&[u8]| path.strip_prefix(*prefix).filter(|rest| rest.first().is_none_or(|&next| next == b'/'));
    PREFIXES.iter().find_map(rest)
}

/// A path from the root without `.` and `..`, as if no folder on it were a link. None: it is too long.
fn without_dots<'a>(path: &[u8], resolved: &'a mut [u8; PATH_MAX]) -> Option<&'a [u8]> {
    let mut len = 0;
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => len = resolved[..len].iter().rposition(|&byte| byte == b'/').unwrap_or(0),
            name => {
                let end = len + 1 + name.len();
                let place = resolved.get_mut(len..end)?;
                place[0] = b'/';
                place[1..].copy_from_slice(name);
                len = end;
            }
        }
    }
    Some(if len == 0 { b"/" } else { &resolved[..len] })
}

/// No `..` leads out of the folder again.
fn stays_below(rest: &[u8]) -> bool {
    let mut depth = 0u32;
    rest.split(|&byte| byte == b'/').all(|name| match name {
        b"" | b"." => true,
        b".." => match depth.checked_sub(1) {
            Some(less) => {
                depth = less;
                true
            }
            None => false,
        },
        _ => {
            depth += 1;
            true
        }
    })
}

/// What the program calls a path of the folder: without the folder. Shortens the string in place.
///
/// # Safety
/// `path` is NULL or a string with its end that nobody else uses.
pub(crate) unsafe fn hide(path: *mut c_char) {
    let Some(root) = ROOT.get().filter(|_| !path.is_null()) else { return };
    // SAFETY: by this function's contract.
    let shown = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let Some(rest) = shown.strip_prefix(&**root).filter(|rest| is_ours(&rest[..rest.len() - 1])) else { return };
    let (len, from) = (rest.len(), rest.as_ptr());
    // SAFETY: source and destination lie in the same string, the destination before; `copy` allows that they overlap.
    unsafe { std::ptr::copy(from, path.cast(), len) };
}
