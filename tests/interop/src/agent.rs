//! `/init` of the guest: makes it usable, then starts programs as the bench asks.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, setrlimit};

use crate::image;
use crate::remote::{Numbered, PORT, Reply, Request};

/// Most of a program's output that is handed on, in bytes.
const OUTPUT_LIMIT: u64 = 1 << 20;

/// Most of a file that is handed on, in bytes.
const FILE_LIMIT: u64 = 64 << 10;

/// Runs as the first process of the guest; returns only when the guest is of no more use.
pub fn main() -> Result<()> {
    let troubles = prepare()?;
    let port = find_port()?;
    let writer = Arc::new(Mutex::new(port.try_clone().context("cannot use the serial port twice")?));
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    answer(&writer, 0, Reply::Hello { kernel, troubles });
    let children: Children = Arc::default();
    for line in BufReader::new(port).lines() {
        let line = line.context("the serial port is gone")?;
        let Ok(Numbered { id, body }) = serde_json::from_str::<Numbered<Request>>(&line) else { continue };
        let (writer, children) = (Arc::clone(&writer), Arc::clone(&children));
        thread::spawn(move || answer(&writer, id, carry_out(id, body, &children)));
    }
    Ok(())
}

/// Process groups of programs that run, by the number of their request.
type Children = Arc<Mutex<HashMap<u64, Pid>>>;

fn answer(writer: &Mutex<File>, id: u64, body: Reply) {
    let mut writer = writer.lock().expect("no holder panics");
    // Without the port there is nobody to tell.
    let _ = Numbered { id, body }.write(&mut *writer);
}

/// Mounts what programs expect and loads the modules; tells which were refused.
fn prepare() -> Result<Vec<String>> {
    for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")] {
        fs::create_dir_all(at)?;
        mount(kind, at, kind, MountFlags::empty(), None).with_context(|| format!("cannot mount {at}"))?;
    }
    fs::create_dir_all("/dev/shm")?;
    mount("tmpfs", "/dev/shm", "tmpfs", MountFlags::empty(), None)?;
    // Registered memory is locked memory to the kernel.
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    let mut troubles = Vec::new();
    for name in fs::read_to_string(image::MODULE_LIST).unwrap_or_default().lines() {
        let loaded = File::open(name).map_err(anyhow::Error::from).and_then(|file| {
            rustix::system::finit_module(&file, c"", 0).map_err(|e| anyhow!("the kernel refuses it: {e}"))
        });
        if let Err(error) = loaded {
            troubles.push(format!("{name}: {error}"));
        }
    }
    Ok(troubles)
}

/// The serial port named [`PORT`].
fn find_port() -> Result<File> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT {
                let device = PathBuf::from("/dev").join(entry.file_name());
                return File::options().read(true).write(true).open(&device).context("cannot open the serial port");
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(anyhow!("QEMU gave this machine no serial port named {PORT}"))
}

fn carry_out(id: u64, request: Request, children: &Children) -> Reply {
    match request {
        Request::Run { argv, limit_ms } => run(id, &argv, Duration::from_millis(limit_ms), children)
            .unwrap_or_else(|error| Reply::Refused(format!("{error:#}"))),
        Request::End(id) => {
            if let Some(group) = children.lock().expect("no holder panics").get(&id) {
                // An error means that all of it have ended.
                let _ = kill_process_group(*group, Signal::KILL);
            }
            Reply::Done
        }
        Request::Listening(port) => Reply::Listening(listening(port)),
        Request::Read(paths) => Reply::Files(paths.iter().flat_map(|path| read(path)).collect()),
    }
}

fn run(id: u64, argv: &[String], limit: Duration, children: &Children) -> Result<Reply> {
    let (program, args) = argv.split_first().context("there is no program to run")?;
    let begun = Instant::now();
    let mut child = Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", image::PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let group = Pid::from_child(&child);
    children.lock().expect("no holder panics").insert(id, group);
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = wait(&mut child, group, begun + limit);
    children.lock().expect("no holder panics").remove(&id);
    // A child of the program that kept the pipes open must not hold up the answer.
    let _ = kill_process_group(group, Signal::KILL);
    let text = |reader: thread::JoinHandle<String>| reader.join().unwrap_or_default();
    Ok(Reply::Ran {
        wait_status: status?.into_raw(),
        stdout: text(stdout),
        stderr: text(stderr),
        took_ms: begun.elapsed().as_millis() as u64,
    })
}

/// Waits for the end, which comes by force at `deadline`.
fn wait(child: &mut Child, group: Pid, deadline: Instant) -> Result<std::process::ExitStatus> {
    // Emulated processors are slow: looking costs the program under test.
    const LOOK_AGAIN: Duration = Duration::from_millis(10);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            let _ = kill_process_group(group, Signal::KILL);
            return Ok(child.wait()?);
        }
        thread::sleep(LOOK_AGAIN);
    }
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let Some(mut pipe) = pipe else { return String::new() };
        let mut bytes = Vec::new();
        let _ = pipe.by_ref().take(OUTPUT_LIMIT).read_to_end(&mut bytes);
        // What is too much is read all the same, so that the program does not hang on a full pipe.
        let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Does anyone listen on this TCP port?
fn listening(port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, state) = (fields.next(), fields.nth(1));
            local.is_some_and(|local| local.ends_with(&suffix)) && state == Some(LISTEN)
        })
    })
}

/// The file, or all files of a folder: their beginnings.
fn read(path: &str) -> Vec<(String, String)> {
    let paths = match path.strip_suffix("/*") {
        Some(folder) => fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect(),
        None => vec![PathBuf::from(path)],
    };
    let text = |path: &PathBuf| {
        let mut bytes = Vec::new();
        File::open(path).and_then(|file| file.take(FILE_LIMIT).read_to_end(&mut bytes)).ok()?;
        Some((path.to_string_lossy().into_owned(), String::from_utf8_lossy(&bytes).into_owned()))
    };
    paths.iter().filter_map(text).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn ran(argv: &[&str], limit: Duration) -> (i32, String, String) {
        let argv: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
        match run(1, &argv, limit, &Arc::default()) {
            Ok(Reply::Ran { wait_status, stdout, stderr, .. }) => (wait_status, stdout, stderr),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn programs_are_run_and_their_output_told() {
        let (status, out, err) = ran(&["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], Duration::from_secs(60));
        assert_eq!((status, out.as_str(), err.as_str()), (3 << 8, "out\n", "err\n"));
        let none = run(1, &["/nowhere".to_owned()], Duration::from_secs(1), &Arc::default());
        assert!(none.expect_err("is not there").to_string().contains("cannot start /nowhere"));
    }

    #[test]
    fn programs_that_hang_are_ended_with_their_children() {
        // On a busy machine it may be ended before it has begun: then it gets more time.
        let mut limit = Duration::from_millis(300);
        loop {
            let (status, out, _) = ran(&["/bin/sh", "-c", "echo begun; sleep 1000; true"], limit);
            assert_eq!(status, Signal::KILL.as_raw());
            if out == "begun\n" {
                break;
            }
            assert!(out.is_empty() && limit < Duration::from_secs(60), "{out:?}");
            limit *= 2;
        }
    }

    #[test]
    fn files_and_folders_are_read() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        fs::write(path("a"), "one\n").expect("can write");
        fs::write(path("b"), vec![b'x'; FILE_LIMIT as usize + 1]).expect("can write");
        assert_eq!(read(&path("a")), [(path("a"), "one\n".to_owned())]);
        assert!(read(&path("c")).is_empty() && read(&path("c/*")).is_empty());
        let mut all = read(&path("*"));
        all.sort();
        let lengths: Vec<usize> = all.iter().map(|(_, text)| text.len()).collect();
        assert_eq!(lengths, [4, FILE_LIMIT as usize]);
    }

    #[test]
    fn listeners_are_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("can listen");
        let port = listener.local_addr().expect("is bound").port();
        assert!(listening(port));
        drop(listener);
        // Another test's child may hold a copy until it executes its program.
        let end = Instant::now() + Duration::from_secs(60);
        while listening(port) {
            assert!(Instant::now() < end, "it is closed");
            thread::sleep(Duration::from_millis(10));
        }
    }
}
