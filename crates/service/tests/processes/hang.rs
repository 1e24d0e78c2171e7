//! Services that do not answer.

use std::net::UdpSocket;
use std::process::Command;

use ferroce_service::client::{Client, StartOptions};
use rustix::process::Signal;

use super::{Scene, Traffic, kill, lanes, say, signal};

/// Whoever stopped it held up everybody, as long as he liked. The first keeper is the worker's parent, the next one its child.
pub(super) fn a_service_that_is_stopped_is_replaced(scene: &Scene) {
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let mut all: Vec<Traffic> = (0..2).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    let first = client.status().unwrap();
    for round in 1..=2 {
        let before = client.status().unwrap();
        signal(before.pid, Signal::STOP);
        let after = client.status().unwrap();
        assert_ne!(after.pid, before.pid);
        assert_eq!((after.restarts, lanes(&after)), (before.restarts + 1, all.len()), "round {round}");
        all.push(Traffic::new(client.lease_lane().unwrap()));
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);
        if round == 1 {
            kill(first.keeper);
            super::wait_for(&client, "another keeper", |status| ![0, first.keeper].contains(&status.keeper));
        }
    }
}

/// It said that the address is in use.
pub(super) fn a_second_service_by_hand_is_told_of_the_first(scene: &Scene) {
    let client = scene.connect_or_start();
    let status = client.status().unwrap();
    let mut second = Command::new(&scene.options.candidates[0]);
    second.args(["--name", &scene.options.name, "--port", &scene.options.port.to_string()]);
    let output = second.output().unwrap();
    assert!(!output.status.success());
    let told = String::from_utf8_lossy(&output.stderr);
    for part in [format!("uid {}", status.uid), format!("(pid {})", status.keeper), "ferroce status".into()] {
        assert!(told.contains(&part), "{told}");
    }
}

/// Says what the library logs while it waits for a service that answers late.
pub(super) fn role_wait(options: &StartOptions) {
    struct Lines;
    impl log::Log for Lines {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                say(record.args());
            }
        }
        fn flush(&self) {}
    }
    log::set_logger(&Lines).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    say(Client::connect(options).map_or_else(|error| error.to_string(), |_| "connected".into()));
}

/// It took half a minute without a word.
pub(super) fn who_waits_for_a_silent_service_says_so(scene: &Scene) {
    let service = scene.connect_or_start().status().unwrap().pid;
    signal(service, Signal::STOP);
    let mut helper = scene.helper("wait");
    let told = helper.line();
    assert!(
        told.contains("for the Ferroce service, which does not answer") && told.contains("is stopped, state T"),
        "{told}"
    );
    assert!(told.contains(&format!("`kill -CONT {service}`")), "{told}");
    signal(service, Signal::CONT);
    assert_eq!(helper.line(), "connected");
    helper.end();
}
