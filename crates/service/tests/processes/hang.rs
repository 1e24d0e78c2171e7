//! Services that do not answer, or end otherwise than in order.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use ferroce_service::client::{Client, StartOptions};
use ferroce_service::protocol::Status;
use ferroce_testkit::SharedFolder;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::Signal;

use super::{Helper, Scene, Traffic, connections_outlive, kill, lanes, say, signal, wait_for, wait_for_end_of_input};

/// It shut the connections down as it unwound, in the keeper's copies too, and the listener for good.
pub(super) fn connections_outlive_a_panic_of_the_service(scene: &Scene) {
    let folder = SharedFolder::new();
    let config = folder.path().join("ferroce.toml");
    fs::write(&config, "[fault]\npanic_at_program = 4\n").unwrap();
    let mut command = scene.helper_command("hold");
    command.env("FERROCE_CONFIG", config);
    let mut first = Helper::spawn(command);
    first.line();
    let restarts = connections_outlive(scene, |before| {
        let fourth = scene.connect_or_start();
        let after = fourth.status().unwrap();
        assert_ne!(after.pid, before.pid, "it did not panic");
        assert_eq!((after.keeper, lanes(&after)), (before.keeper, 5));
        fourth.lease_lane().unwrap().release().unwrap();
    });
    assert_eq!(restarts, 1);
    first.end();
}

/// A service whose keeper was started by it, and which closes the socket to that and goes on.
pub(super) fn role_leave(options: &StartOptions) {
    /// What is kept, as the protocol numbers it: the listener and two memory files.
    const KINDS: [u8; 3] = [0, 1, 2];
    const PUT: u8 = 3;
    const DONE: u8 = 5;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut command = Command::new(&options.candidates[0]);
    command.args(["--keeper", "--name", &options.name, "--port", &options.port.to_string()]);
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
    let mut keeper = command.spawn().unwrap();
    drop(command);
    let memory = || memfd_create("state", MemfdFlags::CLOEXEC).unwrap();
    for (kind, descriptor) in KINDS.into_iter().zip([listener(&options.name), memory(), memory()]) {
        put(&ours, &[PUT, 0, 0, 0, 0, 0, 0, 0, kind], &descriptor);
        let mut answer = [0; 16];
        rustix::net::recv(&ours, &mut answer[..], RecvFlags::empty()).unwrap();
        assert_eq!(answer[0], DONE);
    }
    drop(ours);
    say("left");
    wait_for_end_of_input();
    keeper.kill().and_then(|()| keeper.wait()).unwrap();
}

fn listener(name: &str) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    rustix::net::listen(&listener, 16).unwrap();
    listener
}

fn put(to: &OwnedFd, message: &[u8], descriptor: &OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    rustix::net::sendmsg(to, &[std::io::IoSlice::new(message)], &mut control, SendFlags::empty()).unwrap();
}

/// Another one was started beside it, over the same sockets.
pub(super) fn a_service_that_left_its_keeper_is_ended(scene: &Scene) {
    let mut left = scene.helper("leave");
    assert_eq!(left.line(), "left");
    let client = Client::connect(&scene.options).unwrap();
    let ended = left.child.try_wait().unwrap().expect("it lives beside the next one");
    assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()));
    assert_ne!(client.status().unwrap().pid, left.child.id());
    client.lease_lane().unwrap().release().unwrap();
}

/// Whoever stopped it held up everybody, as long as he liked. The first keeper is the worker's parent, the next one its child.
pub(super) fn a_service_that_is_stopped_is_replaced(scene: &Scene) {
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let mut all: Vec<Traffic> = (0..2).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
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
            replace_keeper(&client);
        }
    }
}

/// It said that the address is in use.
pub(super) fn a_second_service_by_hand_is_told_of_the_first(scene: &Scene) {
    let client = scene.connect_or_start();
    let first = client.status().unwrap();
    let told = || {
        let mut second = Command::new(&scene.options.candidates[0]);
        second.args(["--name", &scene.options.name, "--port", &scene.options.port.to_string()]);
        let output = second.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let before = told();
    for part in [format!("uid {}", first.uid), format!("(pid {})", first.keeper), "ferroce status".into()] {
        assert!(before.contains(&part), "{before}");
    }
    let next = replace_keeper(&client);
    let after = told();
    assert!([next.pid, next.keeper].iter().any(|pid| after.contains(&format!("(pid {pid})"))), "{after}");
}

/// Kills the keeper; gives the status with the next one.
fn replace_keeper(client: &Client) -> Status {
    let before = client.status().unwrap();
    kill(before.keeper);
    wait_for(client, "another keeper", |status| ![0, before.keeper].contains(&status.keeper))
}

/// Says what comes of a service that answers late.
pub(super) fn role_wait(options: &StartOptions) {
    say("waits");
    say(Client::connect(options).map_or_else(|error| error.to_string(), |_| "connected".into()));
}

/// Like a daemon that closes standard error, whose file of data has its number then. Says also what is in the file at the end.
pub(super) fn role_wait_with_data(options: &StartOptions) {
    ferroce_service::standing::know_stderr();
    let data = memfd_create("data", MemfdFlags::CLOEXEC).unwrap();
    rustix::stdio::dup2_stderr(&data).unwrap();
    role_wait(options);
    say(rustix::fs::fstat(&data).unwrap().st_size);
}

/// It took half a minute without a word. The first keeper, which listened at the name, is dead.
pub(super) fn who_waits_for_a_silent_service_says_so(scene: &Scene) {
    let service = replace_keeper(&scene.connect_or_start()).pid;
    signal(service, Signal::STOP);
    let mut command = scene.helper_command("wait");
    command.env("FERROCE_LOG", "error").stderr(Stdio::piped());
    let mut silent = Helper::spawn(command);
    let mut with_data = scene.helper("wait-with-data");
    // They wait for longer than the next one.
    assert_eq!([silent.line(), with_data.line()], ["waits", "waits"]);
    let mut command = scene.helper_command("wait");
    command.stderr(Stdio::piped());
    let mut helper = Helper::spawn(command);
    assert_eq!(helper.line(), "waits");
    let mut stderr = BufReader::new(helper.child.stderr.take().unwrap());
    let mut told = String::new();
    stderr.read_line(&mut told).unwrap();
    assert!(
        told.contains("for the Ferroce service, which does not answer") && told.contains("is stopped, state T"),
        "{told}"
    );
    assert!(told.contains(&format!("`kill -CONT {service}`")), "{told}");
    signal(service, Signal::CONT);
    assert_eq!(helper.line(), "connected");
    helper.end();
    assert_eq!(silent.line(), "connected");
    let mut told = String::new();
    silent.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(told, "", "FERROCE_LOG says that only errors are told");
    silent.end();
    assert_eq!([with_data.line(), with_data.line()], ["connected", "0"]);
    with_data.end();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "once is enough");
}
