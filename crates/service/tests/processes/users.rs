//! Programs and services of several users.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ferroce_service::client::{Client, Relayed, StartOptions};
use ferroce_service::cm::client::EventChannel;
use ferroce_wire::NetHeader;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType};

use super::{
    Helper, MINUTE, Scene, Traffic, eventually, kill, lanes, packet, say, signal, wait_for, wait_for_end_of_input,
};

const NOBODY: u32 = 65_534;

/// Says what comes of asking for a lane.
pub(super) fn role_lease(options: &StartOptions) {
    let answer = Client::connect(options).and_then(|client| client.lease_lane());
    say(answer.map_or_else(|error| format!("{} {error}", error.errno()), |_| "leased".into()));
}

/// Says what comes of using the service or starting it: whose it is, or the error number.
pub(super) fn role_begin(options: &StartOptions) {
    let answer = Client::connect_or_start(options).and_then(|client| client.status());
    say(answer.map_or_else(|error| format!("error {}", error.errno()), |status| format!("service of {}", status.uid)));
}

/// Says its lane and how many sockets it has, then the tags of two packets that the relay brings; then hands in one for another lane,
/// as if from the network, and does to all its descriptors what it should not.
pub(super) fn role_relayed(options: &StartOptions) {
    let client = Client::connect(options).unwrap();
    let mut lease = client.lease_lane().unwrap();
    say(format_args!("{} {}", lease.lane(), lease.take_rx().len()));
    let mut buffer = Vec::new();
    for _ in 0..2 {
        assert_eq!(poll(&mut [PollFd::new(&lease.relay_fd(), PollFlags::IN)], Some(&MINUTE)), Ok(1));
        let relayed = lease.relay_recv(&mut buffer).unwrap().and_then(Relayed::packet).unwrap();
        let tag = relayed.bytes.last_chunk().copied().map(u32::from_be_bytes);
        assert_eq!(relayed.bytes, packet(lease.lane(), tag.unwrap()));
        say(tag.unwrap());
    }
    let others = packet(if lease.lane() == 1 { 2 } else { lease.lane() - 1 }, 9);
    assert!(lease.relay_send("10.0.0.1:1".parse().unwrap(), "10.0.0.2".parse().unwrap(), &others).unwrap());
    for descriptor in lease.not_for_children() {
        try_to_disturb(descriptor);
    }
    let bound = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).and_then(|socket| {
        rustix::net::sockopt::set_socket_reuseport(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddr::from(([0, 0, 0, 0], options.port)))
    });
    assert_eq!(bound, Err(rustix::io::Errno::ADDRINUSE), "the port is the service's");
    say("disturbed");
    wait_for_end_of_input();
}

/// What with a socket of the port would take or stop everybody's packets.
fn try_to_disturb(descriptor: RawFd) {
    let (one, size) = (1, size_of::<i32>() as libc::socklen_t);
    let loopback =
        libc::sockaddr { sa_family: libc::AF_INET as u16, sa_data: [0, 9, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0] };
    let option = |name| {
        // SAFETY: the value is an int that lives through the call.
        unsafe { libc::setsockopt(descriptor, libc::SOL_SOCKET, name, (&raw const one).cast(), size) }
    };
    assert_eq!([libc::SO_ATTACH_REUSEPORT_CBPF, libc::SO_DETACH_REUSEPORT_BPF].map(option), [-1, -1]);
    // SAFETY: an address of the size that is told, which lives through the call.
    let connected = unsafe { libc::connect(descriptor, &raw const loopback, size_of::<libc::sockaddr>() as u32) };
    assert_eq!(connected, -1);
}

/// Says how much it sees of others: programs, ids of the connection manager, and lanes whose lease it is told.
pub(super) fn role_look(options: &StartOptions) {
    let client = Client::connect(options).unwrap();
    let (programs, ids) = (client.status().unwrap().clients.len(), client.cm_ids().unwrap().len());
    let leases = (1..=1023).filter(|lane| client.lease_of(*lane).unwrap().is_some()).count();
    say(format_args!("{programs} {ids} {leases}"));
    wait_for_end_of_input();
}

/// Takes all ids and event channels that it gets, with as many connections as it gets; says how many of each, and with what errors the
/// last ones were refused.
pub(super) fn role_greedy(options: &StartOptions) {
    ferroce_service::server::raise_descriptor_limit();
    let (mut clients, mut channels, mut ids) = (Vec::new(), Vec::new(), 0);
    let all = |count: &mut usize, mut next: Box<dyn FnMut() -> Result<(), ferroce_service::ServiceError> + '_>| loop {
        match next() {
            Ok(()) => *count += 1,
            Err(error) => return error.errno(),
        }
    };
    let refused = loop {
        let client = match Client::connect(options) {
            Ok(client) => client,
            Err(error) => break error.errno(),
        };
        let (mut opened, mut own) = (0, Vec::new());
        let no_channel = all(&mut opened, Box::new(|| EventChannel::open(&client).map(|channel| own.push(channel))));
        assert_eq!(no_channel, libc::EMFILE);
        if let Some(channel) = own.first() {
            let no_id = all(&mut ids, Box::new(|| client.cm_create_id(channel, 0x0106, false).map(drop)));
            assert_eq!(no_id, libc::ENOMEM);
        }
        channels.extend(own);
        clients.push(client);
    };
    say(format_args!("{} {} {ids} {refused}", clients.len(), channels.len()));
    wait_for_end_of_input();
}

/// Needs root to be two users; without it, only the own user's case is there, which the other tests are.
fn there_are_two_users() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("(not root: there is no other user to be)");
    }
    is_root
}

/// Root's service, nobody's program: before and after a crash of the service.
pub(super) fn another_users_program_is_served_by_the_relay(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    let client = scene.connect_or_start();
    let mut own = Traffic::new(client.lease_lane().unwrap());
    let reachable = Reachable::new(scene);
    let mut helper = reachable.nobodys(scene, "relayed");
    let line = helper.line();
    let (lane, sockets) = line.split_once(' ').expect("two numbers");
    assert_eq!(sockets, "0", "a socket is power over the whole port");
    let lane = lane.parse().unwrap();

    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = scene.options.port;
    let send =
        |tag| from.send_to(&sealed(&packet(lane, tag), from.local_addr().unwrap()), ("127.0.0.1", port)).unwrap();
    send(1);
    assert_eq!(helper.line(), "1");
    own.send(&from, port);
    own.check();
    kill(client.status().unwrap().pid);
    assert_eq!(client.status().unwrap().restarts, 1);
    send(2);
    assert_eq!(helper.line(), "2");

    let refused = |status: &ferroce_service::protocol::Status| status.counters.drop_loop == 1;
    let status = wait_for(&client, "what it hands in is dropped", refused);
    assert_eq!((status.counters.astray, status.counters.relay_out), (0, 1), "since the crash: {:?}", status.counters);
    assert_eq!(lanes(&status), 2);
    assert_eq!(helper.line(), "disturbed");
    own.send(&from, port);
    own.check();
    helper.end();
    wait_for(&client, "its lane is free", |status| lanes(status) == 1);
    own.send(&from, port);
    own.check();
    own.release();
}

/// The packet with its ICRC, as a socket that sets Don't Fragment sends it to 127.0.0.1.
fn sealed(packet: &[u8], src: SocketAddr) -> Vec<u8> {
    let dst: IpAddr = [127, 0, 0, 1].into();
    let udp_len = (packet.len() + 4) as u16;
    let net = NetHeader { src: src.ip(), dst, src_port: src.port(), tclass: 0, hop_limit: 64, udp_len, ifindex: 0 };
    [packet, &ferroce_wire::icrc::icrc_over(&net, 0, packet).to_le_bytes()].concat()
}

/// Nobody's service, root's program.
pub(super) fn users_serve_and_trust_each_other_only_if_told_to(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    let reachable = Reachable::new(scene);
    let silent = reachable.config("silent", "");
    let trusting = reachable.config("trusting", "trust = [65534]\n");
    let lease = |config: &Path| {
        let mut command = scene.helper_command("lease");
        command.env("FERROCE_CONFIG", config);
        let mut helper = Helper::spawn(command);
        let answer = helper.line();
        helper.end();
        answer
    };

    let service = reachable.service(scene, &silent);
    let answer = lease(&silent);
    assert!(answer.starts_with(&libc::EACCES.to_string()), "{answer}");
    assert!(answer.contains("belongs to uid 65534, this program to uid 0, which does not trust it"), "{answer}");
    assert!(answer.contains("`trust = [65534]`") && answer.contains("`serve = \"namespace\"`"), "{answer}");
    let answer = lease(&trusting);
    assert!(answer.starts_with(&libc::EACCES.to_string()), "{answer}");
    assert!(answer.contains("it serves its own user only") && answer.contains("`serve = \"namespace\"`"), "{answer}");
    reachable.end(scene, service);

    let service = reachable.service(scene, &reachable.config("serving", "serve = \"namespace\"\n"));
    assert_eq!(lease(&trusting), "leased");
    reachable.end(scene, service);
}

/// Root's service. What root's programs have, root sees; another user's program sees itself.
pub(super) fn a_user_sees_its_own_programs_only(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    let client = scene.connect_or_start();
    let _leases = [client.lease_lane().unwrap(), client.lease_lane().unwrap()];
    let channel = ferroce_service::cm::client::EventChannel::open(&client).unwrap();
    client.cm_create_id(&channel, 0x0106, false).unwrap();
    let mut own = scene.helper("look");
    assert_eq!(own.line(), "2 1 2");
    own.end();

    let reachable = Reachable::new(scene);
    let mut nobodys = reachable.nobodys(scene, "look");
    assert_eq!(nobodys.line(), "1 0 0");
    assert_eq!(client.status().unwrap().clients.len(), 2, "root sees it");
    nobodys.end();
}

/// It took all ids of the connection manager, and all descriptors of the service, which then could accept nobody.
pub(super) fn one_user_leaves_ids_and_descriptors_to_others(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    let reachable = Reachable::new(scene);
    // Few enough to be had quickly: 541 for programs, of which others have 405.
    let mut command = Command::new("prlimit");
    command.arg("--nofile=1082:1082").arg(&scene.options.candidates[0]);
    command.args(["--ready", "--name", &scene.options.name, "--port", &scene.options.port.to_string()]);
    let config = reachable.config("config", "[limits.process]\nids = 49152\n");
    command.env("FERROCE_CONFIG", config).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut service = Helper::spawn(command);
    assert_eq!(service.line(), "ready");

    let mut greedy = reachable.nobodys(scene, "greedy");
    let line = greedy.line();
    let said: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
    let [clients, channels, ids, refused] = said[..] else { panic!("{line}") };
    assert_eq!(2 * clients + channels, 202, "half of what others may have: {line}");
    assert_eq!((ids, refused), (18_432, libc::EMFILE as usize), "{line}");

    // Another one finds as much as the first one left, and the service's own user the rest.
    let mut next = reachable.as_user(scene, "greedy", NOBODY - 1);
    let line = next.line();
    let said: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
    assert!(said[0] > 0 && said[1] > 0 && said[2] > 1000, "{line}");
    let client = scene.connect_or_start();
    client.lease_lane().unwrap();
    let channel = EventChannel::open(&client).unwrap();
    for _ in 0..1000 {
        client.cm_create_id(&channel, 0x0106, false).unwrap();
    }
    let status = client.status().unwrap();
    greedy.end();
    next.end();
    wait_for(&client, "nothing of the greedy", |status| status.clients.len() == 1);
    drop(client);
    scene.kill_service(&status);
    service.child.wait().unwrap();
}

/// Sends descriptors that nobody reads, more than a service may have open whose limit is [`FEW`].
pub(super) fn role_send_unread() {
    let mut pairs = Vec::new();
    for n in 0..FEW + FEW / 2 {
        // Not more than a socket has room for.
        if n % 100 == 0 {
            pairs.push(UnixStream::pair().unwrap());
        }
        let from = &pairs.last().unwrap().0;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [from.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        rustix::net::sendmsg(from, &[std::io::IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    }
    say("sent");
    wait_for_end_of_input();
}

/// Has a lane, and says then with each line of its input what comes of connecting and asking for another one, and the keeper of its
/// service, how often that has crashed, and its process.
pub(super) fn role_ask_again(options: &StartOptions) {
    let client = Client::connect(options).unwrap();
    let _lease = client.lease_lane().unwrap();
    let tell = |answer: &str| {
        let status = client.status().unwrap();
        say(format_args!("{answer} {} {} {}", status.keeper, status.restarts, status.pid));
    };
    tell("leased");
    for _line in std::io::stdin().lines() {
        match Client::connect(options).and_then(|client| client.lease_lane()) {
            Ok(_) => tell("leased"),
            Err(error) => tell(&error.errno().to_string()),
        }
    }
}

/// RLIMIT_NOFILE of a service.
const FEW: usize = 600;

/// The kernel lets a user without CAP_SYS_RESOURCE have so many descriptors on their way as it may have open. When others of its programs had
/// them all, the service took its keeper for dead and could not hand over to a next one.
pub(super) fn a_service_that_can_send_no_descriptors_waits(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    // The numbers are a user's; of this one there is nothing else.
    const USER: u32 = 64_713;
    let reachable = Reachable::new(scene);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={FEW}:{FEW}")).arg(reachable.copy(&scene.options.candidates[0]));
    command.args(["--ready", "--name", &scene.options.name, "--port", &scene.options.port.to_string()]);
    let mut service = Helper::spawn(with_pipes({
        command.uid(USER).gid(NOBODY);
        command
    }));
    assert_eq!(service.line(), "ready");
    let mut asks = reachable.as_user(scene, "ask_again", USER);
    let before = asks.line();
    let served = before.strip_prefix("leased ").expect("it has a lane").to_owned();
    let mut sender = reachable.as_user(scene, "send_unread", USER);
    assert_eq!(sender.line(), "sent");
    let mut ask = || {
        writeln!(asks.child.stdin.as_mut().unwrap()).unwrap();
        asks.line()
    };
    assert_eq!(ask(), format!("{} {served}", libc::EAGAIN), "the service goes on");
    sender.end();
    assert_eq!(ask(), format!("leased {served}"));

    // Nor can its keeper give the next one anything.
    let [keeper, _, worker] = served.split(' ').collect::<Vec<_>>()[..] else { panic!("{served}") };
    let mut sender = reachable.as_user(scene, "send_unread", USER);
    assert_eq!(sender.line(), "sent");
    kill(worker.parse().unwrap());
    let mut next = None;
    eventually("the next service", || {
        next = child_of(keeper).filter(|child| child != worker);
        next.is_some()
    });
    let next = next.expect("it is there");
    sender.end();
    assert_eq!(ask(), format!("leased {keeper} 1 {next}"), "one more was started");
    asks.end();
    let worker = next.parse().unwrap();
    signal(worker, rustix::process::Signal::STOP);
    service.kill();
    kill(worker);
}

/// The process that a process has started, if there is one.
fn child_of(pid: &str) -> Option<String> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_ascii_whitespace().next().map(str::to_owned)
}

/// Whoever starts a program with more rights than his own wrote its environment: with its rights it would execute what he likes, and
/// write where he likes.
pub(super) fn a_set_user_id_program_obeys_no_variable(scene: &Scene) {
    if !there_are_two_users() {
        return;
    }
    let reachable = Reachable::new(scene);
    let folder = reachable.folder_of_everybody();
    let (executed, log) = (folder.join("executed"), folder.join("log"));
    let bait = folder.join("ferroced");
    fs::write(&bait, format!("#!/bin/sh\n: > {}\n", executed.display())).unwrap();
    fs::set_permissions(&bait, fs::Permissions::from_mode(0o755)).unwrap();
    let config = reachable.config("config", &format!("[log]\nfile = {:?}\n", log.to_str().unwrap()));
    let begin = |program: &Path, candidate: &Path, variables: &[(&str, &Path)]| {
        let mut command = Command::new(program);
        let (name, port) = (&scene.options.name, scene.options.port.to_string());
        command.args(["role", "begin", name, &port]).arg(candidate).envs(variables.iter().copied());
        let mut helper = Helper::spawn(nobodys(command));
        let answer = helper.line();
        helper.end();
        (answer, fs::remove_file(&executed).is_ok())
    };
    let (nowhere, service) = (Path::new("/nonexistent/ferroced"), reachable.copy(&scene.options.candidates[0]));
    let by_variable = [("FERROCE_SERVICE", bait.as_path()), ("FERROCE_CONFIG", &config)];
    let by_path = [("PATH", folder.as_path())];
    let (refused, not_found) = (format!("error {}", libc::ECONNREFUSED), format!("error {}", libc::ENOENT));

    let plain = reachable.copy(&std::env::current_exe().unwrap());
    for variables in [by_variable.as_slice(), &by_path] {
        assert_eq!(begin(&plain, nowhere, variables), (refused.clone(), true), "{variables:?}");
    }
    let Some(set_user_id) = reachable.set_user_id_copy(&plain) else {
        return println!("(the file system has no set-user-ID programs)");
    };
    for variables in [by_variable.as_slice(), &by_path] {
        assert_eq!(begin(&set_user_id, nowhere, variables), (not_found.clone(), false), "{variables:?}");
    }
    assert_eq!(begin(&set_user_id, &service, &by_variable), ("service of 0".into(), false));
    assert!(!log.exists());
}

/// A directory that every user can enter.
struct Reachable(PathBuf);

impl Reachable {
    fn new(scene: &Scene) -> Reachable {
        let path = PathBuf::from(format!("/tmp/{}", scene.options.name));
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Reachable(path)
    }

    fn copy(&self, program: &Path) -> PathBuf {
        let copy = self.0.join(program.file_name().unwrap());
        if !copy.exists() {
            fs::copy(program, &copy).unwrap();
        }
        copy
    }

    fn folder_of_everybody(&self) -> PathBuf {
        let path = self.0.join("everybody");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        path
    }

    /// None: the kernel would not heed the bit here.
    fn set_user_id_copy(&self, program: &Path) -> Option<PathBuf> {
        let heeded = !rustix::fs::statvfs(&self.0).unwrap().f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID);
        let copy = self.0.join("set-user-id");
        fs::copy(program, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
        heeded.then_some(copy)
    }

    fn config(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A helper of user nobody.
    fn nobodys(&self, scene: &Scene, role: &str) -> Helper {
        self.as_user(scene, role, NOBODY)
    }

    fn as_user(&self, scene: &Scene, role: &str, uid: u32) -> Helper {
        let mut command = Command::new(self.copy(&std::env::current_exe().unwrap()));
        command.args(scene.helper_command(role).get_args()).uid(uid).gid(NOBODY);
        Helper::spawn(with_pipes(command))
    }

    /// A service of user nobody that listens.
    fn service(&self, scene: &Scene, config: &Path) -> Helper {
        let mut command = Command::new(self.copy(&scene.options.candidates[0]));
        command.args(["--ready", "--name", &scene.options.name, "--port", &scene.options.port.to_string()]);
        command.env("FERROCE_CONFIG", config);
        let mut service = Helper::spawn(nobodys(command));
        assert_eq!(service.line(), "ready");
        service
    }

    /// Ends it. It is nobody's to ask for the service's process; its keeper is our child.
    fn end(&self, scene: &Scene, mut service: Helper) {
        let mut helper = self.nobodys(scene, "ask");
        let worker = helper.line().parse().unwrap();
        signal(worker, rustix::process::Signal::STOP);
        service.kill();
        kill(worker);
        helper.end();
    }
}

impl Drop for Reachable {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn nobodys(mut command: Command) -> Command {
    command.uid(NOBODY).gid(NOBODY);
    with_pipes(command)
}

fn with_pipes(mut command: Command) -> Command {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}
