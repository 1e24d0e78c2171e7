//! The chained handler of SIGSEGV and SIGBUS.
//!
//! It is installed on first use and stays. Faults of [`super::direct`] are its own; everything else is handed on as if it were not
//! there: to the handler that was installed before, or to the default action with the signal raised again.
//!
//! A program may install a handler over ours. Whether it calls ours for what it does not know cannot be known, so direct access is
//! given up until ours is back; [`ready`] looks once in a while and [`check`] at once. The same holds for a thread that blocks the
//! two signals: the kernel kills on a blocked fault.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::sync::Mutex;

use super::FAULT_SIGNALS;

/// Calls of [`ready`] between two looks. Bounds how long a handler that was put over ours stays unnoticed; at 4 system calls of
/// some 100 ns a look, one costs about half a nanosecond a call.
const CALLS_PER_LOOK: u32 = 1_000;

/// Every signal of [`FAULT_SIGNALS`] comes to our handler.
static IN_PLACE: AtomicBool = AtomicBool::new(false);

/// What was installed before ours, by index in [`FAULT_SIGNALS`]. Leaked when replaced: a handler may be reading it.
static PREVIOUS: [AtomicPtr<Previous>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// One look at a time. The value tells whether the first one is done.
static LOOKING: Mutex<bool> = Mutex::new(false);

/// The part of a `struct sigaction` that chaining needs; its mask is in force whenever ours is.
struct Previous {
    handler: usize,
    flags: libc::c_int,
}

/// What is known of the calling thread.
#[derive(Clone, Copy)]
struct Thread {
    calls_left: u32,
    blocks_signals: bool,
}

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread { calls_left: 0, blocks_signals: false }) };
}

/// Whether a fault in this thread would come to our handler. Looks at every 1,000th call of a thread, from its first.
#[inline]
pub(super) fn ready() -> bool {
    let mut thread = THREAD.get();
    if thread.calls_left == 0 {
        check();
        thread.blocks_signals = thread_blocks_signals();
        thread.calls_left = CALLS_PER_LOOK;
    }
    thread.calls_left -= 1;
    THREAD.set(thread);
    !thread.blocks_signals && IN_PLACE.load(Ordering::Relaxed)
}

/// Installs the handler if that was not done yet, and looks whether it still is what the kernel would call. The calling thread looks
/// at its signal mask at its next access.
pub(super) fn check() {
    // Somebody else is looking; or this is the child of a fork that happened meanwhile, and nobody ever will. Both leave the
    // last answer in force.
    let Some(mut done) = LOOKING.try_lock() else { return };
    let mut in_place = true;
    for (index, &signal) in FAULT_SIGNALS.iter().enumerate() {
        match take_signal(index, signal, !*done) {
            Ok(ours) => in_place &= ours,
            Err(error) => {
                log::warn!("sigaction of signal {signal} failed, memory is accessed by system calls: {error}");
                in_place = false;
            }
        }
    }
    if *done && IN_PLACE.load(Ordering::Relaxed) != in_place {
        log::debug!(
            "SIGSEGV and SIGBUS handler {}",
            if in_place { "is back in place" } else { "was replaced by the program" }
        );
    }
    *done = true;
    IN_PLACE.store(in_place, Ordering::Relaxed);
    THREAD.set(Thread { calls_left: 0, blocks_signals: false });
}

/// Makes our handler the signal's, unless the program put one over it. Tells whether ours is in place.
fn take_signal(index: usize, signal: libc::c_int, first: bool) -> io::Result<bool> {
    let present = present_action(signal)?;
    if present.sa_sigaction == handler_address() {
        return Ok(true);
    }
    let idle = present.sa_sigaction == libc::SIG_DFL || present.sa_sigaction == libc::SIG_IGN;
    if !first && !idle {
        // It may call ours for faults that it does not know; calling it from ours could then go round for ever.
        return Ok(false);
    }
    remember(index, &present);
    let replaced = install(signal, &present)?;
    if replaced.sa_sigaction != present.sa_sigaction {
        remember(index, &replaced);
    }
    Ok(true)
}

fn remember(index: usize, action: &libc::sigaction) {
    let previous = Previous { handler: action.sa_sigaction, flags: action.sa_flags };
    PREVIOUS[index].store(Box::into_raw(Box::new(previous)), Ordering::Release);
}

fn handler_address() -> usize {
    on_fault as *const () as usize
}

fn present_action(signal: libc::c_int) -> io::Result<libc::sigaction> {
    let mut present = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `present` is valid for writes; a null new action changes nothing.
    if unsafe { libc::sigaction(signal, ptr::null(), present.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded and filled it in.
    Ok(unsafe { present.assume_init() })
}

/// Installs our handler with the mask and the manners of `previous`; gives what it replaced.
fn install(signal: libc::c_int, previous: &libc::sigaction) -> io::Result<libc::sigaction> {
    let mut ours = *previous;
    ours.sa_sigaction = handler_address();
    // SA_ONSTACK: the program's threads may have tiny stacks (and stack overflows need it). SA_RESETHAND is done by hand.
    let kept = previous.sa_flags & (libc::SA_NODEFER | libc::SA_RESTART);
    ours.sa_flags = kept | libc::SA_SIGINFO | libc::SA_ONSTACK;
    let mut replaced = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures are valid; `on_fault` has the signature that SA_SIGINFO asks for and is async-signal-safe.
    if unsafe { libc::sigaction(signal, &ours, replaced.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded and filled it in.
    Ok(unsafe { replaced.assume_init() })
}

/// The signal handler. Async-signal-safe: reads registers and atomics, calls `sigaction` and `rt_tgsigqueueinfo`.
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO valid pointers to these structures, for as long as it runs.
    let (details, registers) = unsafe { (&*info, &mut *context.cast::<libc::ucontext_t>()) };
    let by_kernel = details.si_code > 0;
    if by_kernel {
        // SAFETY: `si_addr` is set for SIGSEGV and SIGBUS raised by the kernel.
        let addr = unsafe { details.si_addr() } as usize;
        // For an address that no page can have (a region of all the address space has such) the CPU tells none.
        let fault_addr = (details.si_code != SI_KERNEL).then_some(addr);
        if super::direct::fix_up(registers, fault_addr) {
            return;
        }
    }
    let index = usize::from(signal != FAULT_SIGNALS[0]);
    // SAFETY: set before the handler was installed; never freed.
    let previous = unsafe { &*PREVIOUS[index].load(Ordering::Acquire) };
    // Memory that broke elsewhere is told once, not by an instruction that would fault again.
    let repeats = by_kernel && !(signal == libc::SIGBUS && details.si_code == BUS_MCEERR_AO);
    hand_on(previous, signal, info, context, repeats);
}

/// `si_code` of a general protection fault: an address that is not canonical.
const SI_KERNEL: libc::c_int = 0x80;
/// `si_code` of a SIGBUS for broken memory that the thread has not touched yet.
const BUS_MCEERR_AO: libc::c_int = 5;

/// Does what would have happened without us. `repeats`: the interrupted instruction will raise the signal again.
fn hand_on(
    previous: &Previous,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
    repeats: bool,
) {
    match previous.handler {
        // Somebody sent it, and it was ignored. A fault cannot be ignored: the kernel kills as by default.
        libc::SIG_IGN if !repeats => {}
        libc::SIG_DFL | libc::SIG_IGN => die_by_default(signal, info, repeats),
        handler => {
            if previous.flags & libc::SA_RESETHAND != 0 {
                reset(signal);
            }
            if previous.flags & libc::SA_SIGINFO != 0 {
                type WithInfo = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                // SAFETY: it was installed with SA_SIGINFO, which promises this signature.
                let handler = unsafe { std::mem::transmute::<usize, WithInfo>(handler) };
                handler(signal, info, context);
            } else {
                // SAFETY: it was installed without SA_SIGINFO, which promises this signature.
                let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
                handler(signal);
            }
        }
    }
}

fn reset(signal: libc::c_int) {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: zeroes are an action without flags and mask; SIG_DFL makes it the default one. sigaction is async-signal-safe.
    unsafe {
        (*action.as_mut_ptr()).sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, action.as_ptr(), ptr::null_mut());
    }
}

/// Sets the default action. A fault repeats when the handler returns; a signal that was sent is sent again, with the same details,
/// and comes when the handler returns.
fn die_by_default(signal: libc::c_int, info: *mut libc::siginfo_t, repeats: bool) {
    reset(signal);
    if repeats {
        return;
    }
    // SAFETY: `info` is what the kernel gave us; a thread may queue any code to itself. Falls back on a plain signal.
    unsafe {
        let (process, thread) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
        if libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) != 0 {
            libc::syscall(libc::SYS_tgkill, process, thread, signal);
        }
    }
}

fn thread_blocks_signals() -> bool {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `mask` is valid for writes; a null new set changes nothing. The set is filled in when the call succeeds, and zeroes
    // are an empty set when not.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), mask.as_mut_ptr());
        FAULT_SIGNALS.iter().any(|&signal| libc::sigismember(mask.as_ptr(), signal) == 1)
    }
}
