//! The keeper in a program of its own: it starts processes, which for a moment have copies of all descriptors. Tests that look at what
//! becomes of a closed socket must not be beside it.

use std::cell::Cell;
use std::process::Command;

use ferroce_testkit::free_name;

#[test]
fn a_service_that_talks_nonsense_and_waits_is_replaced() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        let mut command = Command::new("sh");
        // The socket to the keeper is standard input.
        command.args(["-c", if started.get() == 1 { "printf nonsense >&0; exec sleep 60" } else { "" }]);
        command
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the second one ends in order");
    assert_eq!(started.get(), 2, "the first one was left to wait");
}
