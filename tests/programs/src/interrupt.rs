//! SIGINT, SIGTERM and SIGHUP end the run in good order: programs are ended and namespaces removed by their guards.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::Failure;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on these signals are noted instead of ending the process.
pub fn install() -> io::Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        // A second signal ends the process at once: someone insists.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(flag))?;
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// True once such a signal has come.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// An error once such a signal has come.
pub fn check() -> Result<(), Failure> {
    if interrupted() { Err(Failure::new("interrupted by a signal")) } else { Ok(()) }
}
