//! No doorbell is ever left unanswered: every interleaving of posters and holders, by loom.

#[path = "../src/gate.rs"]
mod gate;

mod sync {
    pub(crate) use loom::sync::MutexGuard;
    pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering, fence};

    /// loom's lock with the manners of `parking_lot`.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread panics")
        }
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}

use gate::Gate;
use loom::sync::Arc;

/// What a lane does in a turn, in short.
fn turn(gate: &Gate<Vec<u16>>) {
    gate.run_if_free(|mut answered| answered.extend(gate.take_bells()));
}

fn check(posters: u16) {
    let mut model = loom::model::Builder::new();
    // Every interleaving of up to three preemptions; more than that takes hours with three threads.
    model.preemption_bound = Some(3);
    model.max_branches = 10_000;
    model.check(move || {
        let gate = Arc::new(Gate::new(Vec::new()));
        let threads: Vec<_> = (0..posters)
            .map(|slot| {
                let gate = Arc::clone(&gate);
                loom::thread::spawn(move || {
                    gate.ring(slot);
                    turn(&gate);
                })
            })
            .collect();
        // A holder on the control path, and a polling thread.
        drop(gate.lock());
        turn(&gate);
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        let mut answered = gate.lock().clone();
        answered.sort_unstable();
        assert_eq!(answered, (0..posters).collect::<Vec<_>>());
    });
}

#[test]
fn one_poster() {
    check(1);
}

#[test]
fn two_posters() {
    check(2);
}
