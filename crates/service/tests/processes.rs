//! `ferroced` and its clients as processes of their own. A harness of its own: the helper processes are this program
//! with a role, and must have one thread only to fork.
#![allow(unsafe_code)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ferroce_service::client::{Client, LaneLease, Relayed, StartOptions};
use ferroce_service::devices::{self, ListOptions};
use ferroce_service::protocol::Status;
use ferroce_testkit::{SharedFolder, free_name, free_port};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[path = "processes/deaths.rs"]
mod deaths;
#[path = "processes/ends.rs"]
mod ends;
#[path = "processes/files.rs"]
mod files;
#[path = "processes/flood.rs"]
mod flood;
#[path = "processes/hang.rs"]
mod hang;
mod lingering;
#[path = "processes/users.rs"]
mod users;

type Test = fn(&Scene);

const TESTS: [(&str, Test); 32] = [
    ("connections_outlive_a_crash_of_the_service", connections_outlive_a_crash_of_the_service),
    ("connections_outlive_a_panic_of_the_service", hang::connections_outlive_a_panic_of_the_service),
    ("connections_outlive_the_death_of_service_and_keeper", connections_outlive_the_death_of_service_and_keeper),
    ("lanes_outlive_the_death_of_service_and_keeper", lanes_outlive_the_death_of_service_and_keeper),
    ("a_keeper_that_dies_is_replaced", a_keeper_that_dies_is_replaced),
    ("a_keeper_that_is_stopped_is_replaced", a_keeper_that_is_stopped_is_replaced),
    ("a_service_that_left_its_keeper_is_ended", hang::a_service_that_left_its_keeper_is_ended),
    ("a_service_that_is_stopped_is_replaced", hang::a_service_that_is_stopped_is_replaced),
    ("files_whose_closing_hangs_hold_nobody_up", files::files_whose_closing_hangs_hold_nobody_up),
    ("a_second_service_by_hand_is_told_of_the_first", hang::a_second_service_by_hand_is_told_of_the_first),
    ("who_waits_for_a_silent_service_says_so", hang::who_waits_for_a_silent_service_says_so),
    ("a_stopped_service_is_not_waited_for_long_for_a_lease", a_stopped_service_is_not_waited_for_long_for_a_lease),
    ("a_crash_of_the_service_moves_no_packet", a_crash_of_the_service_moves_no_packet),
    ("crashes_in_the_midst_of_changes_lose_nothing", crashes_in_the_midst_of_changes_lose_nothing),
    ("programs_that_start_at_once_share_one_service", programs_that_start_at_once_share_one_service),
    (
        "the_service_is_detached_from_the_program_that_starts_it",
        the_service_is_detached_from_the_program_that_starts_it,
    ),
    ("kill_frees_the_lanes_of_a_program", kill_frees_the_lanes_of_a_program),
    ("a_forked_child_does_not_keep_the_lanes_of_the_dead", a_forked_child_does_not_keep_the_lanes_of_the_dead),
    ("a_forked_child_does_not_disturb_its_parent", a_forked_child_does_not_disturb_its_parent),
    ("two_thousand_rounds_leave_nothing_behind", two_thousand_rounds_leave_nothing_behind),
    ("programs_that_sleep_hold_nobody_up", programs_that_sleep_hold_nobody_up),
    ("an_idle_service_ends_and_is_started_again", an_idle_service_ends_and_is_started_again),
    ("what_cannot_be_started_is_explained", what_cannot_be_started_is_explained),
    ("another_users_program_is_served_by_the_relay", users::another_users_program_is_served_by_the_relay),
    ("users_serve_and_trust_each_other_only_if_told_to", users::users_serve_and_trust_each_other_only_if_told_to),
    ("a_user_sees_its_own_programs_only", users::a_user_sees_its_own_programs_only),
    ("a_set_user_id_program_obeys_no_variable", users::a_set_user_id_program_obeys_no_variable),
    ("one_user_leaves_ids_and_descriptors_to_others", users::one_user_leaves_ids_and_descriptors_to_others),
    ("a_service_that_can_send_no_descriptors_waits", users::a_service_that_can_send_no_descriptors_waits),
    (
        "whoever_is_killed_in_any_state_is_gone_and_its_peer_told",
        deaths::whoever_is_killed_in_any_state_is_gone_and_its_peer_told,
    ),
    ("a_hostile_host_keeps_nobody_from_connecting", flood::a_hostile_host_keeps_nobody_from_connecting),
    ("a_namespace_of_its_own_has_its_own_port", a_namespace_of_its_own_has_its_own_port),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("role") => {
            role(&arguments[1..]);
            ExitCode::SUCCESS
        }
        Some("--list") => {
            TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
            ExitCode::SUCCESS
        }
        _ => run_tests(arguments.iter().find(|argument| !argument.starts_with('-'))),
    }
}

fn run_tests(filter: Option<&String>) -> ExitCode {
    let mut failed = 0;
    for (name, test) in TESTS {
        if filter.is_some_and(|filter| !name.contains(filter.as_str())) {
            continue;
        }
        let scene = Scene::new();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&scene)));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        failed += u8::from(outcome.is_err());
    }
    ExitCode::from(failed)
}

/// A name and a port for one test. Its end is the end of the service.
struct Scene {
    options: StartOptions,
}

impl Scene {
    fn new() -> Scene {
        Scene {
            options: StartOptions {
                name: free_name(),
                port: free_port(),
                candidates: vec![PathBuf::from(env!("CARGO_BIN_EXE_ferroced"))],
                program: "observer".into(),
                // A busy machine is not a fault.
                patience: Duration::from_secs(60),
            },
        }
    }

    fn connect_or_start(&self) -> Client {
        Client::connect_or_start(&self.options).unwrap()
    }

    /// Ends both processes, and waits until others can have the name: what a process held goes a little after itself.
    fn kill_service(&self, status: &Status) {
        // It would start another keeper, which would start another service.
        signal(status.pid, rustix::process::Signal::STOP);
        kill(status.keeper);
        kill(status.pid);
        eventually("the name is free", || {
            Client::connect(&self.options).is_err_and(|error| error.errno() == libc::ECONNREFUSED)
        });
    }

    fn helper(&self, role: &str) -> Helper {
        Helper::spawn(self.helper_command(role))
    }

    fn helper_command(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["role", role, &self.options.name, &self.options.port.to_string()]);
        command.arg(&self.options.candidates[0]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Nobody listens: it has ended already. The client keeps it from ending by itself while it is killed.
        if let Ok(client) = Client::connect(&self.options)
            && let Ok(status) = client.status()
        {
            self.kill_service(&status);
        }
    }
}

/// A process with a role. It says lines, does its work, and ends with its standard input.
struct Helper {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Helper {
    fn spawn(mut command: Command) -> Helper {
        let mut child = command.spawn().unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        Helper { child, says }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.says.read_to_string(&mut rest).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {rest}");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn kill(pid: u32) {
    signal(pid, rustix::process::Signal::KILL);
    eventually("the killed process is gone", || fs::read_link(format!("/proc/{pid}/cwd")).is_err());
}

/// Waits for something that must happen; the limit is there to end a test that fails.
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn wait_for(client: &Client, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
    let mut last = Status::default();
    eventually(what, || {
        last = client.status().unwrap();
        wanted(&last)
    });
    last
}

fn lanes(status: &Status) -> usize {
    status.clients.iter().map(|client| client.lanes.len()).sum()
}

// The helpers' roles.

fn role(arguments: &[String]) {
    let [role, name, port, service] = arguments else { panic!("role NAME PORT SERVICE, not {arguments:?}") };
    let options = StartOptions {
        name: name.clone(),
        port: port.parse().unwrap(),
        candidates: vec![service.into()],
        program: role.clone(),
        patience: Duration::from_secs(60),
    };
    match role.as_str() {
        "hold" => role_hold(&options),
        "hold-in-child" => role_hold_in_child(&options),
        "fork" => role_fork(&options),
        "start" => role_start(&options),
        "begin" => users::role_begin(&options),
        "lease" => users::role_lease(&options),
        "relayed" => users::role_relayed(&options),
        "ask" => role_ask(&options),
        "wait" => hang::role_wait(&options),
        "wait-with-data" => hang::role_wait_with_data(&options),
        "leave" => hang::role_leave(&options),
        "look" => users::role_look(&options),
        "greedy" => users::role_greedy(&options),
        "send_unread" => users::role_send_unread(),
        "ask_again" => users::role_ask_again(&options),
        "end" => ends::role_end(&options),
        "hung-files" => files::role_hung_files(&options),
        "flooded" => flood::role_flooded(&options),
        "attack" => flood::role_attack(&options),
        "namespace" => role_namespace(),
        other => panic!("no role {other}"),
    }
}

fn say(line: impl std::fmt::Display) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_end_of_input() {
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Leases three lanes, says the service's pid, and holds them.
fn role_hold(options: &StartOptions) {
    let client = Client::connect_or_start(options).unwrap();
    let leases: Vec<_> = (0..3).map(|_| client.lease_lane().unwrap()).collect();
    say(client.status().unwrap().pid);
    wait_for_end_of_input();
    drop(leases);
}

/// Leases a lane; a child that outlives this process has copies of all descriptors.
fn role_hold_in_child(options: &StartOptions) {
    let client = Client::connect_or_start(options).unwrap();
    let lease = client.lease_lane().unwrap();
    // SAFETY: this process has one thread; the child only sleeps.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            std::thread::sleep(Duration::from_secs(1000));
        }
    }
    say(child);
    wait_for_end_of_input();
    drop(lease);
}

/// What a forked child does with the client's objects leaves the parent's as they are.
fn role_fork(options: &StartOptions) {
    let client = Client::connect_or_start(options).unwrap();
    let lease = client.lease_lane().unwrap();
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let stale = libc::ESTALE;
        let (src, dst) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.1".parse().unwrap());
        let fails = client.is_stale()
            && client.lease_lane().unwrap_err().errno() == stale
            && client.status().unwrap_err().errno() == stale
            && lease.relay_send(src, dst, &[0; 16]).unwrap_err().raw_os_error() == Some(stale)
            && lease.relay_recv(&mut Vec::new()).unwrap_err().raw_os_error() == Some(stale)
            && lease.release().unwrap_err().errno() == stale;
        drop(client);
        // It can have a connection of its own.
        let works = Client::connect(options).unwrap().lease_lane().is_ok();
        // SAFETY: ends the child without running what the parent registered for its own end.
        unsafe { libc::_exit(if fails && works { 0 } else { 1 }) }
    }
    let pid = rustix::process::Pid::from_raw(child).unwrap();
    let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap().unwrap();
    assert_eq!(status.exit_status(), Some(0));
    assert!(!client.is_stale());
    let own = |status: &Status| status.clients.iter().any(|client| client.lanes == [lease.lane()]);
    wait_for(&client, "the parent's lane, and nothing of the child", |status| own(status) && status.clients.len() == 1);
    let second = client.lease_lane().unwrap();
    lease.release().unwrap();
    second.release().unwrap();
}

/// Starts the service with everything open and blocked that it must not inherit.
fn role_start(options: &StartOptions) {
    let inherited = fs::File::open("/etc/passwd").unwrap();
    rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
    // SAFETY: plain signal calls on local sets, in a process with one thread.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        let client = Client::connect_or_start(options).unwrap();
        let mut pending: libc::sigset_t = std::mem::zeroed();
        libc::sigpending(&raw mut pending);
        assert_eq!(libc::sigismember(&raw const pending, libc::SIGCHLD), 0, "the program got a SIGCHLD");
        assert_eq!(libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL), -1, "the program has a child");
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ECHILD));
        say(client.status().unwrap().pid);
    }
}

/// Says the service's pid, and stays connected.
fn role_ask(options: &StartOptions) {
    let client = Client::connect(options).unwrap();
    say(client.status().unwrap().pid);
    wait_for_end_of_input();
}

/// In a new namespace: nothing is there until loopback is up; then there is a device, and port 4791 is free.
fn role_namespace() {
    let error = devices::list(ListOptions::default()).unwrap_err();
    assert_eq!(error.errno(), libc::ENODEV);
    say(error);
    let watch = devices::DeviceWatch::new().unwrap();
    assert!(!watch.drain());
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    assert!(watch.drain());
    let devices = devices::list(ListOptions::default()).unwrap();
    assert_eq!(devices.len(), 1);
    assert!(devices[0].loopback);
    let options = ferroce_service::server::ServerOptions { idle: None, ..Default::default() };
    let service = ferroce_service::server::Service::spawn_in_process(options).unwrap();
    let options = StartOptions { patience: Duration::from_secs(60), ..StartOptions::default() };
    Client::connect(&options).unwrap().lease_lane().unwrap();
    drop(service);
    say("done");
}

// The tests.

fn programs_that_start_at_once_share_one_service(scene: &Scene) {
    let mut helpers: Vec<Helper> = (0..8).map(|_| scene.helper("hold")).collect();
    let pids: Vec<String> = helpers.iter_mut().map(Helper::line).collect();
    assert!(!pids[0].is_empty());
    assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");
    let client = scene.connect_or_start();
    let status = client.status().unwrap();
    assert_eq!(status.pid.to_string(), pids[0]);
    assert_eq!((status.clients.len(), lanes(&status)), (9, 24));
    helpers.into_iter().for_each(Helper::end);
    let status = wait_for(&client, "everything is returned", |status| lanes(status) == 0 && status.lingering == 0);
    assert!(status.sockets <= 3, "{status:?}");
}

fn the_service_is_detached_from_the_program_that_starts_it(scene: &Scene) {
    let mut command = scene.helper_command("start");
    command.env("LD_BIND_NOW", "1").env("FERROCE_TEST_VARIABLE", "kept");
    let mut helper = Helper::spawn(command);
    let pid = helper.line();
    // It lives as long as it is looked at.
    let client = Client::connect(&scene.options).unwrap();
    // The output of the program ends with the program, although the service lives.
    helper.end();
    let proc = PathBuf::from(format!("/proc/{pid}"));
    assert_eq!(fs::read_link(proc.join("cwd")).unwrap(), Path::new("/"));
    let name = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    let keeper = client.status().unwrap().keeper.to_string();
    assert_eq!((name(&pid), name(&keeper)), ("ferroced-worker\n".into(), "ferroced\n".into()));
    // The service closes some of its own meanwhile: what is listed may be gone when it is read.
    let descriptors: Vec<PathBuf> =
        fs::read_dir(proc.join("fd")).unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok()).collect();
    let standard = [0, 1, 2].map(|number| fs::read_link(proc.join(format!("fd/{number}"))).unwrap());
    assert_eq!(standard, ["/dev/null"; 3].map(PathBuf::from));
    assert!(!descriptors.iter().any(|target| target == Path::new("/etc/passwd")), "{descriptors:?}");
    assert!(!descriptors.iter().any(|target| target.to_string_lossy().starts_with("pipe:")), "{descriptors:?}");
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("SigBlk:"), "0000000000000000");
    // Rust programs ignore SIGPIPE; whom posix_spawn starts ignores 32 and 33, which the C library keeps to itself.
    let ignored = u64::from_str_radix(&field("SigIgn:"), 16).unwrap();
    let bit = |signal: i32| 1u64 << (signal - 1);
    assert_eq!(ignored & !bit(32) & !bit(33), bit(libc::SIGPIPE));
    let stat = fs::read_to_string(proc.join("stat")).unwrap();
    // 0 for a session of another PID namespace, which getsid(2) of rustix does not expect.
    let session = |stat: &str| stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(3).unwrap().to_owned();
    assert_ne!(session(&stat), pid, "a session leader could get a terminal");
    assert_ne!(session(&stat), session(&fs::read_to_string("/proc/self/stat").unwrap()));
    let environment = fs::read_to_string(proc.join("environ")).unwrap();
    assert!(environment.contains("FERROCE_TEST_VARIABLE=kept"), "{environment}");
    assert!(!environment.contains("LD_BIND_NOW"), "{environment}");
}

fn kill_frees_the_lanes_of_a_program(scene: &Scene) {
    let client = scene.connect_or_start();
    let mut helper = scene.helper("hold");
    helper.line();
    let status = client.status().unwrap();
    assert_eq!((status.clients.len(), lanes(&status)), (2, 3));
    helper.kill();
    let status = wait_for(&client, "nothing of the dead", |status| {
        status.clients.len() == 1 && lanes(status) == 0 && status.lingering == 0
    });
    assert!(status.sockets <= 3, "{status:?}");
}

fn a_forked_child_does_not_keep_the_lanes_of_the_dead(scene: &Scene) {
    let client = scene.connect_or_start();
    let mut helper = scene.helper("hold-in-child");
    let child: u32 = helper.line().parse().unwrap();
    assert_eq!(lanes(&client.status().unwrap()), 1);
    helper.kill();
    // Its child holds the connection, the relay and the socket: only the pidfd tells.
    wait_for(&client, "the lane is free", |status| status.clients.len() == 1 && lanes(status) == 0);
    assert_eq!(client.status().unwrap().lingering, 1);
    let leases: Vec<_> = (0..4).map(|_| client.lease_lane().unwrap()).collect();
    kill(child);
    wait_for(&client, "the socket is closed", |status| status.lingering == 0);
    drop(leases);
    let status = wait_for(&client, "everything is returned", |status| lanes(status) == 0);
    assert_eq!(status.lingering, 0);
}

fn a_forked_child_does_not_disturb_its_parent(scene: &Scene) {
    scene.helper("fork").end();
}

fn two_thousand_rounds_leave_nothing_behind(scene: &Scene) {
    let client = scene.connect_or_start();
    let service = client.status().unwrap().pid;
    let count = |pid: &str| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let kept = client.lease_lane().unwrap();
    let settled = |status: &Status| lanes(status) == 1 && status.lingering == 0 && status.sockets <= 4;
    client.lease_lane().unwrap().release().unwrap();
    wait_for(&client, "settled", settled);
    let before = (count(&service.to_string()), count("self"));
    for round in 0..2000 {
        let lease = client.lease_lane().unwrap();
        if round % 2 == 0 {
            lease.release().unwrap();
        }
    }
    wait_for(&client, "settled", settled);
    // One spare socket more or less is no leak.
    assert!(count(&service.to_string()) <= before.0 + 1, "{before:?}");
    assert_eq!(count("self"), before.1);
    kept.release().unwrap();
}

/// Ten times: the lanes are those that they were, all packets arrive, and what comes new is served.
fn lanes_outlive_the_death_of_service_and_keeper(scene: &Scene) {
    let port = scene.options.port;
    let clients = [scene.connect_or_start(), scene.connect_or_start()];
    let mut all: Vec<Traffic> = (0..6).map(|at| Traffic::new(clients[at % 2].lease_lane().unwrap())).collect();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    for round in 0..10 {
        // A hole in the group, so that something moves when the service's own sockets go.
        all.remove(round % all.len()).release();
        let before = clients[0].status().unwrap();
        scene.kill_service(&before);
        // Whichever is first starts it, with a request or without.
        match round % 3 {
            0 => clients.iter().for_each(|client| client.recover().unwrap()),
            1 => all.push(Traffic::new(clients[1].lease_lane().unwrap())),
            _ => scene.helper("hold").end(),
        }
        clients.iter().for_each(|client| client.recover().unwrap());
        let after = wait_for(&clients[0], "all are there", |status| lanes(status) == all.len());
        assert_ne!(after.pid, before.pid);
        for Traffic { lease, .. } in &all {
            assert_eq!(clients[0].lease_of(lease.lane()).unwrap(), Some(lease.id()));
        }
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);

        let (src, dst) = ("10.0.0.1:50000".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let to = packet(all[1].lease.lane(), 7);
        assert!(all[0].lease.relay_send(src, dst, &to).unwrap());
        let came = poll(&mut [PollFd::new(&all[1].lease.relay_fd(), PollFlags::IN)], Some(&MINUTE));
        assert_eq!(came, Ok(1), "the relay brings nothing");
        let mut buffer = Vec::new();
        let relayed = all[1].lease.relay_recv(&mut buffer).unwrap().and_then(Relayed::packet).unwrap();
        assert_eq!(relayed.bytes, to);

        let mut helper = scene.helper("hold");
        helper.line();
        all.push(Traffic::new(clients[round % 2].lease_lane().unwrap()));
        helper.end();
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);
    }
    all.into_iter().for_each(Traffic::release);
    // Spares that stand before the service's own socket stay, for it must not move, and are the first to be lent.
    let status = wait_for(&clients[0], "everything is returned", |status| lanes(status) == 0 && status.lingering == 0);
    let lease = clients[0].lease_lane().unwrap();
    assert!(clients[0].status().unwrap().sockets <= status.sockets, "{status:?}");
    lease.release().unwrap();
}

/// Ten times the keeper dies; each time the service has another one, under which it can crash as before.
fn a_keeper_that_dies_is_replaced(scene: &Scene) {
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let mut all: Vec<Traffic> = (0..3).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    for round in 0..10 {
        let before = client.status().unwrap();
        kill(before.keeper);
        let after = wait_for(&client, "another keeper", |status| ![0, before.keeper].contains(&status.keeper));
        assert_eq!((after.pid, after.restarts), (before.pid, before.restarts));
        all.push(Traffic::new(client.lease_lane().unwrap()));
        all.remove(0).release();
        if round % 3 == 0 {
            kill(after.pid);
            let next = client.status().unwrap();
            assert_eq!((next.keeper, next.restarts), (after.keeper, after.restarts + 1));
            assert_eq!(lanes(&next), all.len());
        }
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);
    }
    // It ends with the service.
    let last = client.status().unwrap();
    all.into_iter().for_each(Traffic::release);
    drop(client);
    eventually("both end", || fs::read_link(format!("/proc/{}/exe", last.keeper)).is_err());
    assert!(fs::read_link(format!("/proc/{}/exe", last.pid)).is_err() || last.pid == 0, "its service is there");
}

/// The service waited for its answer without end, and everybody for the service.
fn a_keeper_that_is_stopped_is_replaced(scene: &Scene) {
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let mut all: Vec<Traffic> = (0..2).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    // The first one is the service's parent, the second one its child.
    for _ in 0..2 {
        let before = client.status().unwrap();
        signal(before.keeper, rustix::process::Signal::STOP);
        all.push(Traffic::new(client.lease_lane().unwrap()));
        let after = wait_for(&client, "another keeper", |status| ![0, before.keeper].contains(&status.keeper));
        assert_eq!((after.pid, after.restarts), (before.pid, before.restarts));
        eventually("the stopped one has ended", || fs::read_link(format!("/proc/{}/exe", before.keeper)).is_err());
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);
    }
    let before = client.status().unwrap();
    kill(before.pid);
    let after = client.status().unwrap();
    assert_eq!((after.keeper, after.restarts, lanes(&after)), (before.keeper, before.restarts + 1, all.len()));
    all.iter_mut().for_each(|traffic| traffic.send(&from, port));
    all.iter_mut().for_each(Traffic::check);
}

/// Connecting queue pairs asked for it, and went on without it after half a minute.
fn a_stopped_service_is_not_waited_for_long_for_a_lease(scene: &Scene) {
    const PATIENCE: Duration = Duration::from_millis(50);
    let client = scene.connect_or_start();
    let lease = client.lease_lane().unwrap();
    let service = client.status().unwrap().pid;
    signal(service, rustix::process::Signal::STOP);
    for _ in 0..3 {
        let error = client.lease_of_within(lease.lane(), PATIENCE).unwrap_err();
        assert_eq!(error.errno(), libc::ETIMEDOUT);
        assert!(error.to_string().contains("within 50ms"), "{error}");
    }
    // Others wait for it; that is no reason to wait with them.
    std::thread::scope(|scope| {
        let others = scope.spawn(|| client.status().unwrap());
        let refused = || client.lease_of_within(lease.lane(), PATIENCE).unwrap_err().errno();
        (0..3).for_each(|_| assert_eq!(refused(), libc::ETIMEDOUT));
        signal(service, rustix::process::Signal::CONT);
        assert_eq!(others.join().unwrap().pid, service);
    });
    // What it answers late is not taken for the answer to this.
    assert_eq!(client.lease_of(lease.lane()).unwrap(), Some(lease.id()));
    assert_eq!(client.status().unwrap().pid, service);
}

/// Who has lanes of the dead service and is stopped keeps them; others are served after a while, and it is when it goes on.
fn programs_that_sleep_hold_nobody_up(scene: &Scene) {
    let port = scene.options.port;
    let sleeper = scene.connect_or_start();
    let mut asleep = Traffic::new(sleeper.lease_lane().unwrap());
    let gone = sleeper.lease_lane().unwrap();
    scene.kill_service(&sleeper.status().unwrap());
    let second = scene.connect_or_start();
    let mut fresh = Traffic::new(second.lease_lane().unwrap());
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    fresh.send(&from, port);
    fresh.check();
    // A socket of nobody that the service knows goes, and another one takes its place in the kernel's order.
    drop(gone);
    eventually("the order is right again", || {
        from.send_to(&packet(fresh.lease.lane(), 0), ("127.0.0.1", port)).unwrap();
        receive(&fresh.socket, &mut [0; 64]).is_ok()
    });
    sleeper.recover().unwrap();
    wait_for(&sleeper, "it has its lane", |status| lanes(status) == 2);
    while receive(&asleep.socket, &mut [0; 64]).is_ok() {}
    while receive(&fresh.socket, &mut [0; 64]).is_ok() {}
    for traffic in [&mut asleep, &mut fresh] {
        traffic.send(&from, port);
        traffic.check();
    }
    asleep.release();
    fresh.release();
    let status = wait_for(&second, "everything is returned", |status| lanes(status) == 0 && status.lingering == 0);
    assert!(status.sockets <= 4, "{status:?}");
}

const MINUTE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// A base transport header for a QP number of the lane, and a tag.
fn packet(lane: u16, tag: u32) -> [u8; 16] {
    let mut bytes = [0xa5; 16];
    let qpn = u32::from(lane) << 14 | 0x11;
    bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
    bytes[12..].copy_from_slice(&tag.to_be_bytes());
    bytes
}

/// A lane, its socket, and how many packets were sent to it and arrived.
struct Traffic {
    lease: LaneLease,
    socket: OwnedFd,
    sent: u32,
}

impl Traffic {
    fn new(mut lease: LaneLease) -> Traffic {
        let socket = lease.take_rx().pop().unwrap();
        Traffic { lease, socket, sent: 0 }
    }

    fn send(&mut self, from: &UdpSocket, port: u16) {
        from.send_to(&packet(self.lease.lane(), self.sent), ("127.0.0.1", port)).unwrap();
        self.sent += 1;
    }

    /// Everything that was sent arrives, in order, and nothing else.
    fn check(&mut self) {
        let mut buffer = [0; 64];
        for tag in 0..self.sent {
            let got = loop {
                let came = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&MINUTE));
                assert_eq!(came, Ok(1), "packet {tag} of {} did not come", self.sent);
                match receive(&self.socket, &mut buffer) {
                    // It was a probe.
                    Err(rustix::io::Errno::AGAIN) => {}
                    got => break got,
                }
            };
            assert_eq!(got, Ok(16), "packet {tag} of {}", self.sent);
            assert_eq!(buffer[..16], packet(self.lease.lane(), tag));
        }
        receive(&self.socket, &mut buffer).unwrap_err();
        self.sent = 0;
    }

    fn release(self) {
        drop(self.socket);
        self.lease.release().unwrap();
    }
}

/// The next datagram that is no probe: a service that did not have the socket yet may have sent some while it looked for others.
fn receive(socket: &OwnedFd, buffer: &mut [u8; 64]) -> rustix::io::Result<usize> {
    loop {
        let (len, _) = rustix::net::recv(socket, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT)?;
        if len != 8 {
            return Ok(len);
        }
    }
}

fn a_crash_of_the_service_moves_no_packet(scene: &Scene) {
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let mut all: Vec<Traffic> = (0..5).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    // A hole in the group, so that something could move.
    all.remove(1).release();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    for crash in 0..3 {
        let before = client.status().unwrap();
        assert_eq!(before.restarts, crash);
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        kill(before.pid);
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        let after = client.status().unwrap();
        assert_eq!((after.keeper, after.restarts), (before.keeper, crash + 1));
        assert_ne!(after.pid, before.pid);
        let held = |status: &Status| status.clients.iter().map(|c| (c.pid, c.lanes.clone())).collect::<Vec<_>>();
        assert_eq!(held(&after), held(&before));
        assert_eq!(lanes(&after), all.len());
        for Traffic { lease, .. } in &all {
            assert_eq!(client.lease_of(lease.lane()).unwrap(), Some(lease.id()));
        }
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);

        // Leases go on, and the relay does.
        all.remove(0).release();
        all.push(Traffic::new(client.lease_lane().unwrap()));
        let (src, dst) = ("10.0.0.1:50000".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let to = packet(all[1].lease.lane(), 7);
        assert!(all[0].lease.relay_send(src, dst, &to).unwrap());
        let mut buffer = Vec::new();
        eventually("the relay brings it", || {
            all[1]
                .lease
                .relay_recv(&mut buffer)
                .unwrap()
                .and_then(Relayed::packet)
                .is_some_and(|relayed| relayed.bytes == to)
        });
        all.iter_mut().for_each(|traffic| traffic.send(&from, port));
        all.iter_mut().for_each(Traffic::check);
    }
    let mut helper = scene.helper("hold");
    helper.line();
    kill(client.status().unwrap().pid);
    helper.kill();
    wait_for(&client, "who dies while nobody looks is seen", |status| status.clients.len() == 1);
    all.into_iter().for_each(Traffic::release);
    let status = wait_for(&client, "everything is returned", |status| lanes(status) == 0 && status.lingering == 0);
    assert!(status.sockets <= 3, "{status:?}");
}

/// The worker is killed: event channels end, connections are adopted by the next worker, and end in order.
fn connections_outlive_a_crash_of_the_service(scene: &Scene) {
    let restarts = connections_outlive(scene, |status| kill(status.pid));
    assert_eq!(restarts, 1);
}

/// The same where another service must be started, which gets to know the programs' lanes from them.
fn connections_outlive_the_death_of_service_and_keeper(scene: &Scene) {
    let restarts = connections_outlive(scene, |status| scene.kill_service(status));
    assert_eq!(restarts, 0);
}

/// Gives the number of times that the service at the end was restarted.
fn connections_outlive(scene: &Scene, end: impl Fn(&Status)) -> u32 {
    use ferroce_service::cm::client::EventChannel;
    use ferroce_service::cm::protocol::{CmRequest, Ece, Param};
    use ferroce_service::cm::route;

    let clients = [scene.connect_or_start(), scene.connect_or_start()];
    let leases = clients.each_ref().map(|client| client.lease_lane().unwrap());
    let channels = clients.each_ref().map(|client| EventChannel::open(client).unwrap());
    let expect = |channel: &EventChannel, code: u32| {
        let event = channel.next_event().unwrap();
        assert_eq!(event.code, code, "{event:?}");
        event.id
    };
    let param = |end: usize| Param { qpn: u32::from(leases[end].lane()) << 14 | 0x33, ..Param::default() };
    let (private_data, ece) = (Vec::new(), Ece::default());

    let listener = clients[1].cm_create_id(&channels[1], 0x0106, false).unwrap();
    let addr = clients[1].cm_bind(listener, "127.0.0.1:0".parse().unwrap(), false, false).unwrap();
    clients[1].cm(CmRequest::Listen { id: listener, backlog: 1 }).unwrap();
    let path = route::resolve(addr, None).unwrap().path;
    let active = clients[0].cm_create_id(&channels[0], 0x0106, false).unwrap();
    let (port, data) = (addr.port(), private_data.clone());
    clients[0].cm(CmRequest::Connect { id: active, path, port, param: param(0), private_data: data, ece }).unwrap();
    let passive = expect(&channels[1], 4);
    clients[1].cm(CmRequest::Accept { id: passive, param: param(1), private_data, ece }).unwrap();
    expect(&channels[0], 5);
    clients[0].cm(CmRequest::Establish { id: active }).unwrap();
    expect(&channels[1], 9);
    let kept = [clients[0].cm_keep(active).unwrap(), clients[1].cm_keep(passive).unwrap()];
    assert!(clients[1].cm_adopt(&channels[1], &kept[1]).is_err(), "it is there");

    let before = clients[0].status().unwrap();
    end(&before);
    for channel in &channels {
        assert_eq!(channel.next_event().unwrap_err().raw_os_error(), Some(libc::ECONNRESET));
    }
    let channels = clients.each_ref().map(|client| EventChannel::open(client).unwrap());
    assert!(clients[0].cm_adopt(&channels[0], &kept[1]).is_err(), "the other program's queue pair");
    let active = clients[0].cm_adopt(&channels[0], &kept[0]).unwrap();
    let passive = clients[1].cm_adopt(&channels[1], &kept[1]).unwrap();
    clients[0].cm(CmRequest::Disconnect { id: active }).unwrap();
    assert_eq!(expect(&channels[1], 10), passive);
    clients[1].cm(CmRequest::Disconnect { id: passive }).unwrap();
    assert_eq!(expect(&channels[0], 10), active);
    clients[0].status().unwrap().restarts
}

/// Tells others to stop when it is dropped.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn crashes_in_the_midst_of_changes_lose_nothing(scene: &Scene) {
    const CRASHES: u32 = 8;
    let port = scene.options.port;
    let client = scene.connect_or_start();
    let stop = AtomicBool::new(false);
    let rounds = AtomicU32::new(0);
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut steady: Vec<Traffic> = (0..3).map(|_| Traffic::new(client.lease_lane().unwrap())).collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let own = scene.connect_or_start();
                while !stop.load(Ordering::Relaxed) {
                    let lease = own.lease_lane().unwrap();
                    let second = Traffic::new(own.lease_lane().unwrap());
                    drop(lease);
                    second.release();
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Also when a step below fails: the scope waits for the storms.
        let _stopper = Stopper(&stop);
        eventually("the storm has begun", || rounds.load(Ordering::Relaxed) > 0);
        for crash in 0..CRASHES {
            let status = wait_for(&client, "it is back", |status| status.restarts == crash);
            // At some point of whatever it does.
            std::thread::sleep(Duration::from_micros(u64::from(3000 + crash * 700)));
            kill(status.pid);
            steady.iter_mut().for_each(|traffic| traffic.send(&from, port));
        }
        let before = rounds.load(Ordering::Relaxed);
        eventually("the storm goes on", || rounds.load(Ordering::Relaxed) > before);
    });
    steady.iter_mut().for_each(Traffic::check);
    let status = wait_for(&client, "the storm is over", |status| {
        status.clients.len() == 1 && lanes(status) == 3 && status.lingering == 0
    });
    assert_eq!(status.restarts, CRASHES);
    assert!(status.sockets <= 6, "{status:?}");
    let kept = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    // Connection, pidfd, 3 sockets and relays, spare sockets; standard and the service's own descriptors.
    assert!(kept(status.keeper) <= 20, "{}", kept(status.keeper));
    steady.push(Traffic::new(client.lease_lane().unwrap()));
    steady.iter_mut().for_each(|traffic| traffic.send(&from, port));
    steady.iter_mut().for_each(Traffic::check);
}

fn an_idle_service_ends_and_is_started_again(scene: &Scene) {
    let start = || {
        let mut command = scene.helper_command("hold");
        command.env("FERROCE_SERVICE_IDLE_S", "1");
        let mut helper = Helper::spawn(command);
        let pid = helper.line();
        helper.end();
        pid
    };
    let first = start();
    eventually("it ends", || !Path::new(&format!("/proc/{first}/exe")).exists());
    assert_ne!(start(), first);
}

fn what_cannot_be_started_is_explained(scene: &Scene) {
    let folder = SharedFolder::new();
    let not_a_program = folder.path().join("program");
    fs::write(&not_a_program, "not a program").unwrap();
    fs::set_permissions(&not_a_program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let options = StartOptions { candidates: vec![not_a_program], ..scene.options.clone() };
    let error = Client::connect_or_start(&options).unwrap_err();
    assert_eq!(error.errno(), libc::ENOEXEC, "{error}");
    assert!(error.to_string().contains("could not be executed"), "{error}");

    // Starts, fails, says why.
    let options = StartOptions { candidates: vec!["/bin/ls".into()], ..scene.options.clone() };
    let error = Client::connect_or_start(&options).unwrap_err();
    assert!(error.to_string().contains("cannot start /bin/ls"), "{error}");
}

fn a_namespace_of_its_own_has_its_own_port(scene: &Scene) {
    let available = Command::new("unshare").args(["-rn", "true"]).stderr(Stdio::null()).status();
    if !available.is_ok_and(|status| status.success()) {
        return println!("(this system lets no ordinary user make a network namespace)");
    }
    let helper = scene.helper_command("namespace");
    let mut command = Command::new("unshare");
    command.arg("-rn").arg(helper.get_program()).args(helper.get_args()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut helper = Helper::spawn(command);
    assert!(helper.line().contains("ip link set lo up"));
    assert_eq!(helper.line(), "done");
    helper.end();
}
