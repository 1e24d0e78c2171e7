//! What is done once in a process: handlers of fork and exit, and a look at standard error, when the library is loaded; the log and what is kept for good at the first
//! use.
//!
//! A thread may fork at any moment while others use the library. What belongs to an object is refused in the child; what belongs to the
//! process (lists of devices, of objects, the card's place) must be consistent and open there. So the thread that forks takes the
//! process's locks before, and lets go of them after. None of them is held while something slow happens, and nothing else in the library
//! may be a lock or a lazily made value of the process.

use std::cell::RefCell;

use ferroce::sync::Mutex;

use crate::{context, device, dm, logging, mr, pd, refusal};

/// A lock that is held while a thread forks.
pub(crate) type Held = Box<dyn Lock>;

/// Something that lets go when it is dropped.
pub(crate) trait Lock {}

impl<T> Lock for T {}

/// Is [`start`] done? Held while it runs: a fork waits for its end.
static STARTED: Mutex<bool> = Mutex::new(false);

/// What must be done before anything is told or made. Cheap after the first time.
pub(crate) fn start() {
    let mut started = STARTED.lock();
    if !*started {
        logging::start();
        refusal::start();
        ferroce::prepare();
        *started = true;
    }
}

thread_local! {
    /// What this thread holds while it forks.
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

extern "C" fn before_fork() {
    let held = vec![
        Box::new(STARTED.lock()) as Held,
        device::hold(),
        context::CONTEXTS.hold(),
        pd::DOMAINS.hold(),
        mr::REGIONS.hold(),
        dm::PIECES.hold(),
    ];
    // In a thread that is ending there is no place left to remember: then its fork is as it was without us.
    let _ = HELD.try_with(|place| place.replace(held));
    ferroce::before_fork();
}

extern "C" fn after_fork_in_parent() {
    ferroce::after_fork_in_parent();
    let _ = HELD.try_with(RefCell::take);
}

extern "C" fn after_fork_in_child() {
    ferroce::after_fork_in_child();
    let _ = HELD.try_with(RefCell::take);
}

extern "C" fn at_exit() {
    // A panic may not leave a C function, and the process is ending anyway.
    let _ = std::panic::catch_unwind(ferroce::settle_before_exit);
}

/// Runs when the library is loaded, when no thread of the program can know it yet.
extern "C" fn on_load() {
    // SAFETY: the handlers wait for nothing but short critical sections of this library, in which nobody forks; in the child they let go
    // of what this thread took. They cannot go away: the library is never unloaded (-z nodelete). Both calls fail only without memory;
    // then forked children find their parent's objects, or the last message's ACK is missing at the peer.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child));
        libc::atexit(at_exit);
    }
    ferroce::know_stderr();
}

#[used]
// SAFETY: the section holds pointers to functions that the dynamic loader calls with arguments that this one does not look at.
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;
