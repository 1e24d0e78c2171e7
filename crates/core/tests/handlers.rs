//! How our signal handler lives with those of programs. Each scene runs in a process of its own, since it changes handlers or dies:
//! the test starts this program again, with the scene's name.

#![allow(unsafe_code)]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::os::unix::thread::JoinHandleExt;
use std::process::{Command, ExitStatus};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use common::{Map, PAGE};
use ferroce_core::CompChannel;
use ferroce_core::mem::{self, Fault};

const SCENE: &str = "FERROCE_TEST_SCENE";

/// Runs `scene` in a child: there, `test` is called again and finds the variable set.
fn in_child(test: &str, scene: fn()) -> ExitStatus {
    if std::env::var_os(SCENE).is_some() {
        // No core files, no harness around a crash.
        // SAFETY: plain data.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
        scene();
        // SAFETY: ends the process without the harness.
        unsafe { libc::_exit(0) };
    }
    let program = std::env::current_exe().expect("the test program has a path");
    let child = Command::new(program).args(["--exact", test, "--nocapture"]).env(SCENE, test).output().unwrap();
    if !child.status.success() && child.status.signal().is_none() {
        eprintln!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    }
    child.status
}

fn survives(test: &str, scene: fn()) {
    let status = in_child(test, scene);
    assert!(status.success(), "{status}");
}

fn dies_of(signal: i32, test: &str, scene: fn()) {
    assert_eq!(in_child(test, scene).signal(), Some(signal));
}

/// Calls of the test's own handlers, and the address of the last fault.
static CALLS: AtomicU32 = AtomicU32::new(0);
static FAULT_ADDR: AtomicUsize = AtomicUsize::new(0);

/// Mends the page and lets the instruction run again.
extern "C" fn mend(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: given by the kernel, or handed on by ours.
    let addr = unsafe { (*info).si_addr() } as usize;
    CALLS.fetch_add(1, Ordering::Relaxed);
    FAULT_ADDR.store(addr, Ordering::Relaxed);
    let page = addr & !(PAGE - 1);
    // SAFETY: a page that this test protected.
    unsafe { libc::mprotect(page as *mut libc::c_void, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
}

extern "C" fn count(_signal: i32) {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn leave(_signal: i32) {
    // SAFETY: async-signal-safe.
    unsafe { libc::_exit(i32::from(CALLS.load(Ordering::Relaxed) != 0)) };
}

fn set_handler(signal: i32, handler: usize, flags: i32) {
    // SAFETY: zeroes are a valid action; the handlers have the signatures that their flags ask for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &action, ptr::null_mut()), 0);
    }
}

fn handler_of(signal: i32) -> usize {
    // SAFETY: only asks.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, ptr::null(), &mut action), 0);
        action.sa_sigaction
    }
}

/// An access of the program itself that faults.
fn touch(addr: u64) {
    // SAFETY: not sound, and meant so: it faults, and a handler of this test deals with it or the process dies.
    unsafe { ptr::write_volatile(addr as *mut u8, 1) };
}

fn protected_page() -> Map {
    let map = Map::anonymous(1);
    map.protect(0..1, libc::PROT_NONE);
    map
}

/// All accesses answer a fault for a protected page and work on a good one.
fn library_works() {
    let (good, gone) = (Map::anonymous(3), protected_page());
    let data: Vec<u8> = (0..2 * PAGE + 5).map(|i| i as u8).collect();
    let mut buffer = vec![0; data.len()];
    for last in [false, true] {
        assert_eq!(mem::store(good.addr() + 3, &data, last), Ok(()));
        assert_eq!(mem::load(good.addr() + 3, &mut buffer), Ok(()));
        assert_eq!(buffer, data);
        assert_eq!(mem::store(gone.addr(), &data[..9], last), Err(Fault));
    }
    assert_eq!(mem::load_crc(good.addr() + 3, &mut buffer, 0), mem::crc(good.addr() + 3, data.len(), 0));
    assert_eq!(mem::load(gone.addr(), &mut buffer[..9]), Err(Fault));
    let word = good.addr() + 8;
    good.write(8, &3u64.to_ne_bytes());
    assert_eq!(mem::fetch_add(word, 4), Ok(3));
    assert_eq!(mem::compare_swap(word, 7, 1), Ok(7));
    assert_eq!(mem::compare_swap(word, 7, 2), Ok(1));
    assert_eq!(mem::fetch_add(gone.addr(), 1), Err(Fault));
    assert_eq!(mem::compare_swap(gone.addr(), 0, 1), Err(Fault));
}

#[test]
fn an_earlier_handler_gets_its_own_faults() {
    survives("an_earlier_handler_gets_its_own_faults", || {
        set_handler(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO);
        library_works();
        assert_eq!(CALLS.load(Ordering::Relaxed), 0, "our faults are not its business");
        let map = protected_page();
        touch(map.addr() + 77);
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        assert_eq!(FAULT_ADDR.load(Ordering::Relaxed), map.addr() as usize + 77);
        library_works();
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn an_earlier_handler_of_the_old_kind_is_called() {
    survives("an_earlier_handler_of_the_old_kind_is_called", || {
        set_handler(libc::SIGSEGV, leave as *const () as usize, 0);
        library_works();
        touch(protected_page().addr());
        unreachable!("the handler leaves");
    });
}

#[test]
fn an_earlier_one_shot_handler_is_called_once() {
    dies_of(libc::SIGSEGV, "an_earlier_one_shot_handler_is_called_once", || {
        set_handler(libc::SIGSEGV, count as *const () as usize, libc::SA_RESETHAND);
        library_works();
        touch(protected_page().addr());
    });
}

#[test]
fn faults_of_the_program_kill_by_default() {
    dies_of(libc::SIGSEGV, "faults_of_the_program_kill_by_default", || {
        set_handler(libc::SIGSEGV, libc::SIG_DFL, 0);
        library_works();
        touch(protected_page().addr());
    });
}

#[test]
fn bus_errors_of_the_program_kill_by_default() {
    dies_of(libc::SIGBUS, "bus_errors_of_the_program_kill_by_default", || {
        set_handler(libc::SIGBUS, libc::SIG_DFL, 0);
        library_works();
        let map = Map::file(1);
        map.truncate(0);
        assert_eq!(mem::load(map.addr(), &mut [0; 8]), Err(Fault));
        touch(map.addr());
    });
}

#[test]
fn sent_signals_kill_by_default() {
    dies_of(libc::SIGSEGV, "sent_signals_kill_by_default", || {
        set_handler(libc::SIGSEGV, libc::SIG_DFL, 0);
        library_works();
        // SAFETY: no preconditions.
        unsafe { libc::raise(libc::SIGSEGV) };
    });
}

#[test]
fn ignored_signals_stay_ignored_when_sent() {
    survives("ignored_signals_stay_ignored_when_sent", || {
        set_handler(libc::SIGSEGV, libc::SIG_IGN, 0);
        library_works();
        // SAFETY: no preconditions.
        unsafe { libc::raise(libc::SIGSEGV) };
        library_works();
    });
}

#[test]
fn ignored_signals_kill_when_they_are_faults() {
    dies_of(libc::SIGSEGV, "ignored_signals_kill_when_they_are_faults", || {
        set_handler(libc::SIGSEGV, libc::SIG_IGN, 0);
        library_works();
        touch(protected_page().addr());
    });
}

#[test]
fn a_later_handler_is_left_alone() {
    survives("a_later_handler_is_left_alone", || {
        library_works();
        set_handler(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO);
        mem::check_handler();
        library_works();
        assert_eq!(CALLS.load(Ordering::Relaxed), 0, "our faults are not its business");
        assert_eq!(handler_of(libc::SIGSEGV), mend as *const () as usize, "it stays");
        touch(protected_page().addr());
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_later_handler_is_noticed_without_a_check() {
    survives("a_later_handler_is_noticed_without_a_check", || {
        library_works();
        set_handler(libc::SIGBUS, mend as *const () as usize, libc::SA_SIGINFO);
        let good = Map::anonymous(1);
        for _ in 0..1_000 {
            mem::store(good.addr(), &[1], true).unwrap();
        }
        let map = Map::file(1);
        map.truncate(0);
        assert_eq!(mem::load(map.addr(), &mut [0; 8]), Err(Fault));
        assert_eq!(CALLS.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn our_handler_comes_back() {
    survives("our_handler_comes_back", || {
        library_works();
        let ours = handler_of(libc::SIGSEGV);
        for idle in [libc::SIG_DFL, libc::SIG_IGN] {
            set_handler(libc::SIGSEGV, idle, 0);
            mem::check_handler();
            assert_eq!(handler_of(libc::SIGSEGV), ours, "nobody minds");
            library_works();
        }
    });
}

#[test]
fn a_thread_that_blocks_the_signals_is_served() {
    survives("a_thread_that_blocks_the_signals_is_served", || {
        library_works();
        let thread = std::thread::spawn(|| {
            // SAFETY: the set is filled in before it is used.
            unsafe {
                let mut all: libc::sigset_t = std::mem::zeroed();
                libc::sigfillset(&mut all);
                libc::pthread_sigmask(libc::SIG_BLOCK, &all, ptr::null_mut());
            }
            library_works();
        });
        assert!(thread.join().is_ok());
    });
}

/// Makes the kernel refuse process_vm_readv and process_vm_writev, as old seccomp profiles of containers do.
fn forbid_process_vm() {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut program = [
        // The number of the system call.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(equal, 2, 0, libc::SYS_process_vm_readv as u32),
        instruction(equal, 1, 0, libc::SYS_process_vm_writev as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a valid program; it binds only this process, which ends with the scene.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

#[test]
fn a_sandbox_with_a_later_handler_still_works() {
    survives("a_sandbox_with_a_later_handler_still_works", || {
        forbid_process_vm();
        library_works();
        set_handler(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO);
        mem::check_handler();
        let (good, gone) = (Map::anonymous(2), protected_page());
        let mut buffer = [0; 300];
        assert_eq!(mem::store(good.addr() + 5, &[7; 300], true), Ok(()));
        assert_eq!(mem::load(good.addr() + 5, &mut buffer), Ok(()));
        assert_eq!(buffer, [7; 300]);
        assert_eq!(CALLS.load(Ordering::Relaxed), 0);
        assert_eq!(mem::store(gone.addr(), &[7; 9], true), Ok(()), "the program's handler mends it");
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_forked_child_is_served() {
    survives("a_forked_child_is_served", || {
        library_works();
        // SAFETY: the child runs only what is tested and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            library_works();
            return;
        }
        let mut status = 0;
        // SAFETY: our child, and a place for its status.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
    });
}

#[test]
fn holes_made_by_munmap_are_faults() {
    survives("holes_made_by_munmap_are_faults", || {
        let map = Map::anonymous(3);
        map.unmap(1..2);
        let page = PAGE as u64;
        assert!(!mem::is_mapped(map.addr(), 3 * page));
        assert!(!mem::is_mapped(map.addr() + page - 1, 2));
        assert!(mem::is_mapped(map.addr(), page));
        assert!(mem::is_mapped(map.addr() + 2 * page, page));
        assert_eq!(mem::store(map.addr(), &[0; 2 * PAGE], true), Err(Fault));
        assert_eq!(mem::crc(map.addr() + page, 1, 0), Err(Fault));
        assert_eq!(mem::fetch_add(map.addr() + page, 1), Err(Fault));
    });
}

#[test]
fn a_sleeper_on_a_channel_is_interrupted() {
    survives("a_sleeper_on_a_channel_is_interrupted", || {
        set_handler(libc::SIGUSR1, count as *const () as usize, 0);
        let sleeper = std::thread::spawn(|| CompChannel::new().unwrap().next_event().unwrap_err().raw_os_error());
        // Again and again: the first may come before it sleeps.
        while !sleeper.is_finished() {
            // SAFETY: the thread is not joined yet.
            unsafe { libc::pthread_kill(sleeper.as_pthread_t(), libc::SIGUSR1) };
            std::thread::yield_now();
        }
        assert_eq!(sleeper.join().unwrap(), Some(libc::EINTR));
    });
}
