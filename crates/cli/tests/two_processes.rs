//! `ferroce verify` and `ferroce perf` between two processes of this machine.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// The command, after the service was built beside it (a test of this package alone does not build it).
fn ferroce() -> Command {
    static SERVICE: OnceLock<()> = OnceLock::new();
    let program = Path::new(env!("CARGO_BIN_EXE_ferroce"));
    SERVICE.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "ferroce-service", "--bin", "ferroced"]);
        if program.parent().is_some_and(|dir| dir.ends_with("release")) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo can be run").success(), "ferroced can be built");
    });
    let mut command = Command::new(program);
    command.env("FERROCE_SERVICE", program.with_file_name("ferroced"));
    command
}

fn run(args: &[&str]) -> Output {
    ferroce().args(args).output().expect("ferroce can be run")
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {:?}: {stderr}", output.status);
    serde_json::from_slice(&output.stdout).expect("stdout is JSON")
}

#[test]
fn every_byte_of_every_operation_is_right() {
    for arguments in [&["--seed", "7"][..], &["--seed", "8", "--mtu", "256", "--events"]] {
        let report = json(&[&["verify", "--self", "--json"], arguments].concat());
        let results = report["results"].as_array().expect("a list");
        assert_eq!(results.len(), 28, "12 operations of RC, 4 of UC, 2 of UD, 10 of XRC");
        for result in results {
            assert!(result["cases"].as_u64().expect("a number") >= 8, "{result}");
        }
        assert_eq!(report["failures"], Value::Array(vec![]));
    }
}

/// A message of 1 MiB has at least 256 packets, so most are lost: that is the good right of UC and UD.
#[test]
fn what_a_bad_network_loses_of_unreliable_services_is_no_fault() {
    let args = ["verify", "--self", "--json", "--events", "--seed", "3"];
    let output = ferroce().args(args).env("FERROCE_FAULT", "loss=0.01,seed=3").output().expect("ferroce can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*stderr), (Some(0), ""));
    let report: Value = serde_json::from_slice(&output.stdout).expect("stdout is JSON");
    assert_eq!(report["failures"], Value::Array(vec![]));
    let results = report["results"].as_array().expect("a list");
    let sum = |service: &str, name: &str| -> u64 {
        let of_service = results.iter().filter(|result| result["transport"] == service);
        of_service.map(|result| result[name].as_u64().expect("a number")).sum()
    };
    assert_eq!((sum("RC", "lost"), sum("RC", "given_up")), (0, 0));
    assert!(sum("UC", "given_up") > 0 && sum("UC", "lost") >= 3 * sum("UC", "given_up"), "{report}");
    assert!(sum("UC", "cases") > 0 && sum("UD", "cases") > 0, "{report}");
}

#[test]
fn all_tests_give_figures_for_both_sides() {
    let report = json(&["perf", "all", "--self", "--iters", "200", "--qps", "3", "--json"]);
    let results = report["results"].as_array().expect("a list");
    assert_eq!(results.len(), 8);
    for result in results {
        assert_eq!(result["messages"], 200, "{result}");
        let tcp = &result["tcp"];
        if result["test"].as_str().expect("a name").ends_with("-bw") {
            assert!(result["gbit_per_second"].as_f64() > Some(0.0) && tcp["gbit_per_second"].as_f64() > Some(0.0));
        } else {
            assert!(result["latency_us"]["median"].as_f64() > Some(0.0), "{result}");
            assert!(tcp["latency_us"]["p99"].as_f64() >= tcp["latency_us"]["median"].as_f64(), "{result}");
        }
    }
}

#[test]
fn events_instead_of_polling() {
    let report = json(&["perf", "send-lat", "--self", "--iters", "50", "--sizes", "2,4K", "--events", "--json"]);
    assert_eq!(report["mode"], "events");
    assert_eq!(report["results"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_table_for_people() {
    let output = run(&["perf", "write-bw", "--self", "--iters", "100", "--sizes", "2,64K", "--no-tcp"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{stdout}");
    assert!(
        lines[0].contains("path MTU") && lines[1].starts_with("TEST ") && lines[3].starts_with("write-bw"),
        "{stdout}"
    );
}

/// A server that is ended with the test.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(command: &str) -> Server {
        let mut child = ferroce()
            .args([command, "server", "--port", "0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferroce can be run");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the server says where it listens");
        let port = line.trim().rsplit(' ').next().and_then(|word| word.parse().ok()).expect("a port");
        Server { child, port }
    }

    /// Ends it and gives what it complained about.
    fn end(mut self) -> String {
        self.child.kill().expect("it still runs");
        let mut text = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut text).expect("can read");
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_server_outlives_strangers_and_clients_that_vanish() {
    for (command, test) in [("perf", &["send-lat"][..]), ("verify", &[])] {
        let server = Server::start(command);
        let connect = || TcpStream::connect(("127.0.0.1", server.port)).expect("the server listens");
        // More silent ones than there could be if each was waited for.
        let _silent: Vec<TcpStream> = (0..30).map(|_| connect()).collect();
        connect().write_all(b"GET / HTTP/1.1\r\n\r\n").expect("can send");
        connect().write_all(b"{\"hello\":\"ferroce perf 1\"").expect("can send");
        drop(connect());
        let port = server.port.to_string();
        let mut args = [&[command], test, &["127.0.0.1", "--port", &port, "--json"]].concat();
        if command == "perf" {
            args.extend(["--iters", "20"]);
        }
        json(&args);
        let complaints = server.end();
        assert_eq!(complaints.lines().filter(|line| line.starts_with("ferroce: client ")).count(), 3, "{complaints}");
    }
}

#[test]
fn rows_are_aligned_although_each_is_written_when_it_is_complete() {
    let output = run(&["verify", "--self", "--rounds", "2"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!((output.status.code(), lines.len()), (Some(0), 1 + 1 + 28 + 1), "{stdout}");
    assert!(lines[1].starts_with("TYPE  OPERATION ") && lines[2].starts_with("RC    SEND "), "{stdout}");
    assert!(lines[29].starts_with("XRC   ATOMIC WRITE ") && lines[30].contains("every byte"), "{stdout}");
    let end = lines[1].rfind("GIVEN UP").expect("a heading") + "GIVEN UP".len();
    assert!(lines[2..30].iter().all(|line| line.len() == end), "aligned: {stdout}");
}

#[test]
fn wrong_variables_are_told_in_one_line_and_empty_ones_are_not_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo can be run").success());
    let fifo = fifo.to_str().expect("a plain name");
    let names = ["LOG", "LOOPBACK", "SAME_HOST", "PCAP", "FAULT", "COUNTERS", "CONFIG", "SERVICE_IDLE_S"];
    let empty = names.map(|name| (format!("FERROCE_{name}"), ""));
    let args = ["verify", "--self", "--json"];
    let output = ferroce().args(args).envs(empty).output().expect("ferroce can be run");
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
    for (name, value, said) in [
        ("FERROCE_LOOPBACK", "yes", r#"FERROCE_LOOPBACK is "yes": it can be 0 (as without it) or 1; correct it"#),
        ("FERROCE_SAME_HOST", "tcp", r#"FERROCE_SAME_HOST is "tcp": it can be ring (as without it) or udp or fetch"#),
        ("FERROCE_FAULT", "los=1", r#"FERROCE_FAULT is "los=1": no fault is called `los`: there are loss, dup"#),
        ("FERROCE_PCAP", "/dev/full", "FERROCE_PCAP asks for: it is neither a regular file nor a FIFO"),
        ("FERROCE_PCAP", fifo, "FERROCE_PCAP asks for: nobody reads this FIFO; start the reader first"),
        ("FERROCE_COUNTERS", "/dev/full", "as FERROCE_COUNTERS asks: it is no regular file"),
        ("FERROCE_COUNTERS", fifo, "as FERROCE_COUNTERS asks: it is no regular file"),
    ] {
        let output = ferroce().args(args).env(name, value).output().expect("ferroce can be run");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{name}={value}: {stderr}");
        assert!(stderr.lines().any(|line| line.starts_with("ferroce: ") && line.contains(said)), "{name}: {stderr}");
    }
}

/// It said that all is well, and every program failed.
#[test]
fn devices_are_listed_with_what_variables_make_of_programs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("x.pcap");
    let file = file.to_str().expect("a plain name");
    let capture = format!("FERROCE_PCAP is {file:?}: programs capture their packets");
    for (name, value, said) in [
        ("FERROCE_LOG", "loud", r#"FERROCE_LOG is "loud": this is no level (error, warn, info, debug, trace or off)"#),
        (
            "FERROCE_SAME_HOST",
            "udp",
            r#"FERROCE_SAME_HOST is "udp": packets between programs of this host go over UDP"#,
        ),
        (
            "FERROCE_FAULT",
            "loss=0.5",
            r#"FERROCE_FAULT is "loss=0.5": packets are lost, delayed or damaged on purpose"#,
        ),
        ("FERROCE_FAULT", "los=1", r#"No program can open a device at present: FERROCE_FAULT is "los=1": no fault is"#),
        ("FERROCE_PCAP", file, &capture),
        ("FERROCE_PCAP", "/", "No program can open a device at present: cannot write the capture / that FERROCE_PCAP"),
        ("FERROCE_COUNTERS", "/proc/self/mem", "No program can open a device at present: cannot write the counters to"),
    ] {
        let output = ferroce().arg("devices").env(name, value).output().expect("ferroce can be run");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}={value}");
        assert!(stdout.lines().any(|line| line.starts_with(said)), "{name}={value}: {stdout}");
    }
    assert!(!Path::new(file).exists(), "nothing was touched");
    let output = run(&["devices"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(!["LOG", "SAME_HOST", "FAULT", "PCAP", "COUNTERS"].iter().any(|name| stdout.contains(name)), "{stdout}");
}

#[test]
fn the_service_tells_wrong_variables_and_ends() {
    // Builds it.
    drop(ferroce());
    let service = Path::new(env!("CARGO_BIN_EXE_ferroce")).with_file_name("ferroced");
    for (name, value, said) in [
        (
            "FERROCE_CONFIG",
            "/dev/zero",
            "the configuration /dev/zero cannot be read: it is no regular file; correct it",
        ),
        ("FERROCE_SERVICE_IDLE_S", "soon", r#"FERROCE_SERVICE_IDLE_S is "soon": it can be a whole number of seconds"#),
    ] {
        let output = Command::new(&service).args(["--name", "ferroce-wrong-variables"]).env(name, value).output();
        let output = output.expect("the service can be run");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.starts_with(&format!("ferroced: {said}")), "{name}: {stderr}");
    }
}

/// Both ends capture and count in files of their own.
#[test]
fn files_are_named_after_processes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let named = |name: &str| folder.path().join(name);
    let output = ferroce()
        .args(["verify", "--self", "--json"])
        .env("FERROCE_COUNTERS", named("counters.%p"))
        .env("FERROCE_PCAP", named("pcap.%p"))
        .output()
        .expect("ferroce can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files =
        std::fs::read_dir(folder.path()).expect("is there").map(|entry| entry.expect("can be read").file_name());
    let files: Vec<String> = files.map(|name| name.into_string().expect("a plain name")).collect();
    let pids =
        |kind: &str| files.iter().filter_map(|name| name.strip_prefix(kind)).map(str::to_owned).collect::<Vec<_>>();
    let counted = pids("counters.");
    assert_eq!(pids("pcap.").len(), 2, "{files:?}");
    // The server is ended once the client is done; whether it left its counters by then is its luck.
    assert!(!counted.is_empty(), "{files:?}");
    for pid in counted {
        let text = std::fs::read_to_string(named(&format!("counters.{pid}"))).expect("is there");
        assert!(text.lines().all(|line| line.split('\t').next() == Some(&pid)), "{text}");
    }
}

#[test]
fn wrong_input_is_told_in_one_line() {
    for (args, word) in [
        (&["perf", "write-bw"][..], "use --self"),
        (&["perf", "write-bw", "127.0.0.1", "--port", "1"], "no TCP connection to 127.0.0.1:1"),
        (&["perf", "write-bw", "no-such-host.invalid"], "no-such-host.invalid"),
        (&["perf", "write-bw", "--self", "--device", "nothing0"], "there is no device or interface nothing0"),
        (&["perf", "write-bw", "--self", "--gid-index", "200"], "GID index 200"),
        (&["perf", "write-lat", "--self", "--events"], "leave out --events"),
        (&["verify", "127.0.0.1", "--self"], "leave out the host"),
        (&["verify", "--self", "--mtu", "8192"], "path_mtu"),
    ] {
        let output = run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{args:?}: {stderr}");
        assert!(stderr.lines().any(|line| line.starts_with("ferroce: ") && line.contains(word)), "{args:?}: {stderr}");
    }
}
