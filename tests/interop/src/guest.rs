//! The virtual machine: booted, asked, ended.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use program_tests::failure::Failure;
use program_tests::interrupt;
use tempfile::TempDir;

use crate::kernel::Kernel;
use crate::remote::{Agent, PORT, Reply};

/// Boots until the guest is given up: kernels under emulation sometimes panic early.
const BOOTS: u32 = 4;
/// Longest time from QEMU's start to the agent's first word, on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(150);
/// Longest time in which the agent must answer a small question.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// What the kernel writes on its console when it is broken.
const BROKEN: &[&str] = &["Kernel panic", "BUG: ", "Oops: ", "general protection fault", "soft lockup"];

/// What boots.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Kernel.
    pub kernel: Kernel,
    /// Initramfs.
    pub root: PathBuf,
    /// Network namespace in which QEMU runs.
    pub netns: String,
    /// Tap device in it.
    pub tap: String,
    /// MAC address of the guest.
    pub mac: &'static str,
    /// Memory in MiB.
    pub memory_mib: u32,
}

/// A virtual machine that is up. Dropping it ends it.
pub struct Guest {
    qemu: Qemu,
    agent: Agent,
    /// Release of its kernel.
    pub release: String,
}

struct Qemu {
    child: Child,
    dir: TempDir,
}

impl Guest {
    /// Boots; a machine that panics is booted again.
    pub fn boot(machine: &Machine) -> Result<Guest, Failure> {
        let mut attempt = 1;
        loop {
            let result = Guest::boot_once(machine);
            interrupt::check()?;
            match result {
                Ok((guest, troubles)) if troubles.is_empty() => return Ok(guest),
                // This would be no different another time.
                Ok((guest, troubles)) => {
                    let failure = Failure::new("the guest's modules do not load").with(troubles.join("\n"));
                    return Err(failure.with(guest.qemu.console()));
                }
                Err(failure) if attempt == BOOTS => {
                    let what = format!("the guest did not boot, {BOOTS} times running: {}", failure.what());
                    return Err(Failure::new(what).with(failure.to_string()));
                }
                Err(_) => attempt += 1,
            }
        }
    }

    /// Boots once; gives also what the guest complains about.
    fn boot_once(machine: &Machine) -> Result<(Guest, Vec<String>), Failure> {
        let io = |what: &'static str| move |e: std::io::Error| Failure::new(format!("{what}: {e}"));
        let dir = tempfile::Builder::new().prefix("ferroce-guest-").tempdir().map_err(io("cannot make a folder"))?;
        let listener = UnixListener::bind(dir.path().join("agent")).map_err(io("cannot make the agent's socket"))?;
        let mut qemu = Qemu::start(machine, dir)?;
        let deadline = Instant::now() + BOOT_LIMIT;
        let stream = qemu.accept(&listener, deadline)?;
        let agent = Agent::new(stream).map_err(io("cannot talk to the agent"))?;
        let hello = agent.hello();
        loop {
            match hello.poll() {
                Ok(Some(Reply::Hello { kernel, troubles })) => {
                    return Ok((Guest { qemu, agent, release: kernel }, troubles));
                }
                Ok(_) => {}
                Err(failure) => return Err(failure.with(qemu.console())),
            }
            qemu.check(deadline)?;
            sleep(Duration::from_millis(20));
        }
    }

    /// Who starts programs in it.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// An error that says why, if the guest is no longer in order.
    pub fn check(&mut self) -> Result<(), Failure> {
        if let Some(line) = self.qemu.broken() {
            return Err(Failure::new(format!("the guest's kernel is broken: {line}")).with(self.qemu.console()));
        }
        if let Ok(Some(status)) = self.qemu.child.try_wait() {
            return Err(Failure::new(format!("QEMU ended: {status}")).with(self.qemu.console()));
        }
        let answer = self.agent.run(&["/bin/busybox", "true"], ANSWER_LIMIT);
        answer.and_then(|finished| finished.check_success()).map_err(|failure| failure.with(self.qemu.console()))
    }
}

impl Qemu {
    fn start(machine: &Machine, dir: TempDir) -> Result<Qemu, Failure> {
        let agent = format!("socket,id=agent,path={}", dir.path().join("agent").display());
        let console = format!("file:{}", dir.path().join("console").display());
        let netdev = format!("tap,id=net,ifname={},script=no,downscript=no", machine.tap);
        let card = format!("virtio-net-pci,netdev=net,mac={},romfile=", machine.mac);
        let port = format!("virtserialport,chardev=agent,name={PORT}");
        let log = fs::File::create(dir.path().join("qemu"))
            .map_err(|e| Failure::new(format!("cannot make QEMU's log: {e}")))?;
        let mut command = Command::new("nsenter");
        command
            .args([&format!("--net=/run/netns/{}", machine.netns), "--", "qemu-system-x86_64"])
            .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", &machine.memory_mib.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"])
            .args(["-serial", &console])
            .args(["-chardev", &agent, "-device", "virtio-serial-pci", "-device", &port])
            .args(["-netdev", &netdev, "-device", &card])
            .arg("-kernel")
            .arg(&machine.kernel.image)
            .arg("-initrd")
            .arg(&machine.root)
            .args(["-append", "console=ttyS0 quiet panic=-1 oops=panic mitigations=off"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        let child = command.spawn().map_err(|e| Failure::new(format!("cannot start QEMU: {e}")))?;
        Ok(Qemu { child, dir })
    }

    /// QEMU's connection to the agent's socket.
    fn accept(&mut self, listener: &UnixListener, deadline: Instant) -> Result<UnixStream, Failure> {
        let fail = |e: std::io::Error| Failure::new(format!("QEMU does not connect: {e}"));
        listener.set_nonblocking(true).map_err(fail)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(fail)?;
                    return Ok(stream);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(fail(e)),
            }
            self.check(deadline)?;
            sleep(Duration::from_millis(10));
        }
    }

    /// An error if it has ended or the time is over.
    fn check(&mut self, deadline: Instant) -> Result<(), Failure> {
        interrupt::check()?;
        match self.child.try_wait() {
            Ok(None) if Instant::now() < deadline => Ok(()),
            Ok(None) => Err(Failure::new("the guest did not come up in time").with(self.console())),
            Ok(Some(status)) => Err(Failure::new(format!("QEMU ended while booting: {status}")).with(self.console())),
            Err(e) => Err(Failure::new(format!("cannot wait for QEMU: {e}"))),
        }
    }

    /// A line of the console by which the kernel is broken.
    fn broken(&self) -> Option<String> {
        let console = read(&self.dir.path().join("console"));
        console.lines().find(|line| BROKEN.iter().any(|word| line.contains(word))).map(str::to_owned)
    }

    /// The end of what QEMU and the kernel wrote.
    fn console(&self) -> String {
        // Room for the whole of a panic: its trace tells whose fault it is.
        const LINES: usize = 120;
        let mut text = String::new();
        for name in ["qemu", "console"] {
            let content = read(&self.dir.path().join(name));
            let lines: Vec<&str> = content.lines().filter(|line| !line.trim().is_empty()).collect();
            if !lines.is_empty() {
                text += &format!("{name}:\n  {}\n", lines[lines.len().saturating_sub(LINES)..].join("\n  "));
            }
        }
        text
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
