//! Connections with descriptors whose closing waits, on kernels where sockets cannot refuse them. In a program of its own: it counts
//! its descriptors, among which are the service's.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ferroce_service::client::{Client, StartOptions};
use ferroce_service::server::{ServerOptions, Service};
use ferroce_testkit::{free_name, free_port};
use rustix::net::sockopt;

use self::lingering::Lingering;

mod lingering;

/// More than the service keeps for one user until they are closed.
const CONNECTIONS: usize = 200;

/// The service kept each of them as long as its sender liked, until it had no descriptors left and could accept nobody.
#[test]
fn connections_that_are_refused_do_not_use_descriptors_up() {
    let mut options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
    options.fault.old_kernel = true;
    // The first one is let in; others are refused, with their messages unread.
    options.limits.user.programs = Some(1);
    let client = StartOptions { name: options.name.clone(), port: options.port, ..StartOptions::default() };
    let _service = Service::spawn_in_process(options).unwrap();
    let first = Client::connect(&client).unwrap();
    first.lease_lane().unwrap();
    let before = descriptors();
    let other_ends: Vec<TcpStream> = (0..CONNECTIONS).map(|_| send_lingering(&client)).collect();
    let give_up = Instant::now() + Duration::from_secs(60);
    // Of theirs there are the other ends, which do not read, and what the service has not got round to yet.
    while descriptors() > before + CONNECTIONS + CONNECTIONS / 2 {
        first.status().expect("the service goes on");
        assert!(Instant::now() < give_up, "{} descriptors, {before} before", descriptors());
        std::thread::sleep(Duration::from_millis(20));
    }
    first.lease_lane().unwrap();
    drop(other_ends);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Sends a connection's last copy whose closing waits for the other end. Gives that.
fn send_lingering(options: &StartOptions) -> TcpStream {
    let Lingering { socket, other_end } = Lingering::new();
    if lingering::send(lingering::connect(&options.name), b"garbage", &[socket.as_fd()]).is_err() {
        sockopt::set_socket_linger(&socket, None).unwrap();
    }
    // The service may have closed its copy already: then this is the last one.
    std::thread::spawn(move || drop(socket));
    other_end
}
