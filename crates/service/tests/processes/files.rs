//! Files of a hostile user's own file system, which does not answer when one is closed.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{io, thread};

use ferroce_service::client::{Client, StartOptions};
use ferroce_testkit::SharedFolder;
use rustix::event::{PollFd, PollFlags, poll};

use super::lingering::{self, Lingering, send};
use super::{Helper, MINUTE, Scene, eventually, say, wait_for_end_of_input};

const SOME: usize = 10;

/// More than wait for a user's thread, in one message.
const MANY: usize = 100;

/// The variable that tells a helper where.
const MOUNTPOINT: &str = "MOUNTPOINT";

/// The service closed copies of them in its loop, and waited for a process that had to close copies of those that waited. Whoever waits for such a
/// file system cannot be killed.
pub(super) fn files_whose_closing_hangs_hold_nobody_up(scene: &Scene) {
    let folder = SharedFolder::new();
    let config = folder.path().join("ferroce.toml");
    fs::write(&config, "[fault]\nold_kernel = true\n").unwrap();
    let mut command = scene.helper_command("hold");
    command.env("FERROCE_CONFIG", config);
    let mut first = Helper::spawn(command);
    first.line();
    let client = scene.connect_or_start();
    let before = client.status().unwrap();
    let served = |after: &str| {
        client.lease_lane().unwrap().release().unwrap();
        let status = client.status().unwrap();
        assert_eq!((status.pid, status.restarts), (before.pid, 0), "after {after}");
    };
    let mountpoint = folder.path().join("file");
    File::create(&mountpoint).unwrap();
    let mut sender = hung_files(scene, &mountpoint);
    assert_eq!(sender.line(), "sent some files");
    served("files that wait for the user's thread");
    let line = sender.line();
    let socket = line.strip_prefix("sent sockets ").unwrap();
    served("sockets that are handed over meanwhile");
    eventually("they are handed over", || !descriptors(before.pid).any(|descriptor| descriptor == socket));
    eventually("who was handed them has ended", || children(before.pid).is_empty());
    assert_eq!(sender.line(), "sent many files");
    served("more files than wait for the thread");
    // Its file system ends with it.
    sender.kill();
    eventually("its user's programs are served again", || Client::connect(&scene.options).is_ok());
    served("all");
    first.end();
}

fn hung_files(scene: &Scene, mountpoint: &Path) -> Helper {
    let helper = scene.helper_command("hung-files");
    let mut command = Command::new("unshare");
    command.arg("-rm").arg(helper.get_program()).args(helper.get_args()).env(MOUNTPOINT, mountpoint);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Helper::spawn(command)
}

/// What a process has open.
fn descriptors(pid: u32) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()))
}

/// The children of all of a process's threads.
fn children(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect()
}

/// Sends files that hang, then sockets, and says so when the service has taken them: it ends the connection.
pub(super) fn role_hung_files(options: &StartOptions) {
    let file = hung_file(Path::new(&std::env::var_os(MOUNTPOINT).unwrap()));
    send_copies(options, &file, SOME);
    say("sent some files");
    let Lingering { socket, other_end: _other_end } = Lingering::new();
    let name = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
    send_copies(options, &socket, MANY);
    drop(socket);
    say(format_args!("sent sockets {}", name.display()));
    send_copies(options, &file, MANY);
    drop(file);
    say("sent many files");
    wait_for_end_of_input();
}

fn send_copies(options: &StartOptions, descriptor: impl AsFd, copies: usize) {
    let connection = lingering::connect(&options.name);
    send(&connection, b"garbage", &vec![descriptor.as_fd(); copies]).unwrap();
    // There is nothing to read but its end.
    assert_eq!(poll(&mut [PollFd::new(&connection, PollFlags::IN)], Some(&MINUTE)), Ok(1), "it is not disconnected");
}

/// A file whose closing is answered to this thread only. (A file system of which the file is the root, in a mount namespace of its own.)
fn hung_file(mountpoint: &Path) -> File {
    let device = File::options().read(true).write(true).open("/dev/fuse").expect("this test needs /dev/fuse");
    let target = CString::new(mountpoint.as_os_str().as_bytes()).unwrap();
    let options = format!("fd={},rootmode=100600,user_id=0,group_id=0", device.as_raw_fd());
    let options = CString::new(options).unwrap();
    // SAFETY: strings that end with zero, which the kernel reads during the call.
    let mounted = unsafe {
        libc::mount(
            c"hung".as_ptr(),
            target.as_ptr(),
            c"fuse".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV,
            options.as_ptr().cast(),
        )
    };
    assert_eq!(mounted, 0, "this test mounts a FUSE file system: {}", io::Error::last_os_error());
    thread::spawn(move || serve(&device, std::process::id()));
    File::open(mountpoint).unwrap()
}

/// Answers what fuse(4) and linux/fuse.h have, as far as opening and closing needs it.
fn serve(mut device: &File, answered: u32) {
    const OPEN: u32 = 14;
    const RELEASE: u32 = 18;
    const FLUSH: u32 = 25;
    const INIT: u32 = 26;
    // The version, bytes of a write, and 0 for what there is besides.
    const ABLE: [u32; 6] = [7, 22, 0, 0, 0, 4096];
    const OPENED: [u32; 4] = [0; 4];
    let mut request = vec![0; 1 << 16];
    while let Ok(40..) = device.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (opcode, pid) = (word(4), word(32));
        let (error, body): (i32, &[u32]) = match opcode {
            INIT => (0, &ABLE),
            OPEN => (0, &OPENED),
            FLUSH if pid != answered => continue,
            FLUSH | RELEASE => (0, &[]),
            _ => (-libc::ENOSYS, &[]),
        };
        let header = [16 + 4 * body.len() as u32, error.cast_unsigned(), word(8), word(12)];
        let answer: Vec<u8> = header.iter().chain(body).flat_map(|word| word.to_ne_bytes()).collect();
        // Some requests want no answer.
        let _written = device.write(&answer);
    }
}
