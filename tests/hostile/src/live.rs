//! A live process under attack over its own sockets.
//!
//! The process has queue pairs of each type, connected to numbers of a lane that the attacker leased; so it receives their answers
//! and looks for secrets in them. The attacker knows everything and sends from the peer's address.

#![allow(unsafe_code)]

mod victim;

use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use ferroce::{AsyncEvent, Context, Device};
use ferroce_link::{Link, UdpLink};
use ferroce_service::client::{Client, StartOptions};

use crate::forge::{Forge, Packets};
use crate::legit::{self, End, Peer};
use crate::live::victim::Victims;
use crate::machine::tells_secret;
use crate::recorded;
use crate::socket::Attacker;
use crate::source::{Seed, Source};

/// Bursts of packets between two looks at completions.
const BURSTS: usize = 10;
/// Rounds between two looks at the memory.
const ROUNDS_PER_CHECK: u64 = 256;
/// How much a process may grow while it is attacked, in bytes.
const GROWTH_MAX: u64 = 64 << 20;

/// What an attack did.
#[derive(Debug, Default)]
pub struct Report {
    /// Packets sent.
    pub sent: u64,
    /// Packets that the process read, those of honest traffic included.
    pub received: u64,
    /// Packets of the process that the attacker looked at.
    pub seen: u64,
    /// Times that a queue pair was connected anew, having failed.
    pub revived: u64,
    /// Rounds of honest traffic: between two queue pairs of the process, and with another process.
    pub honest: [u64; 2],
    /// Growth of the resident memory, in bytes.
    pub growth: i64,
    /// How long it took.
    pub time: Duration,
    /// The process's counters, by how much each grew.
    pub counters: Vec<(&'static str, u64)>,
}

impl Report {
    /// Packets of the attacker that were not dropped for want of room in a receive buffer. (Of a batch that was dropped, more may
    /// have been lost than the system counts.)
    pub fn attacked(&self) -> u64 {
        self.sent.saturating_sub(self.counter("rx_drop_full").unwrap_or(0))
    }

    /// What of [`EVIDENCE`] is missing.
    pub fn missing(&self) -> Vec<&'static str> {
        EVIDENCE.iter().copied().filter(|name| self.counter(name).is_none_or(|value| value == 0)).collect()
    }

    /// By how much a counter grew.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.sent as f64 / self.time.as_secs_f64();
        writeln!(
            f,
            "{} packets sent in {:.1?} ({rate:.0} a second), {} with honest ones received; {} answers seen; {} connections made anew",
            self.sent, self.time, self.received, self.seen, self.revived
        )?;
        writeln!(
            f,
            "honest traffic meanwhile: {} rounds within the process, {} with another; memory grew by {} KiB",
            self.honest[0],
            self.honest[1],
            self.growth / 1024
        )?;
        for (name, value) in self.counters.iter().filter(|(_, value)| *value > 0) {
            writeln!(f, "{name:28} {value}")?;
        }
        Ok(())
    }
}

/// Packets that are enough to go every way.
pub const ENOUGH: u64 = 100_000;
/// How many times the packets that were asked for are sent at most to go every way.
const MOST_TIMES: u64 = 10;

/// Counters that tell that an attack went every way. (A wrong transport header version is dropped by the link, before any queue
/// pair sees it.)
pub const EVIDENCE: &[&str] = &[
    "drop_qp_state",
    "drop_wrong_transport",
    "drop_wrong_source",
    "drop_pkey",
    "drop_qkey",
    "drop_psn",
    "drop_duplicate_unknown",
    "drop_ghost_response",
    "drop_bad_opcode",
    "drop_bad_length",
    "drop_no_receive",
    "drop_message_broken",
    "drop_access",
    "drop_overload",
    "drop_no_queue_pair",
    "ack_sent",
    "ack_received",
    "nak_sequence_sent",
    "packet_seq_err",
    "resp_remote_invalid_request",
    "req_remote_invalid_request",
    "resp_remote_access_errors",
    "req_remote_access_errors",
    "send_rnr_err",
    "rnr_nak_retry_err",
    "duplicate_request",
    "packets_retransmitted",
    "rx_icrc_errors",
    "rx_too_short",
    "rx_bad_version",
    "rx_bad_pad",
    "rx_gro_batches",
];

/// Attacks this process with so many packets.
///
/// # Errors
/// Honest traffic failed, memory grew, or something was refused.
///
/// # Panics
/// A byte was written that nobody had a right to write, or a secret was told.
pub fn attack(packets: u64, seed: u64) -> Result<Report> {
    let context = loopback()?.open()?;
    let stop = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let within = scope.spawn(|| legit::within_process(&context, &stop));
        let with_peer = scope.spawn(|| legit::with_peer(&context, &stop));
        // Also when the attack panics: the scope waits for both.
        let stopper = Stopper(&stop);
        let outcome = Attack::new(&context, seed).and_then(|mut attack| attack.run(packets));
        drop(stopper);
        let joined = |thread: std::thread::ScopedJoinHandle<'_, Result<u64>>| {
            thread.join().map_err(|_| anyhow!("honest traffic panicked"))?
        };
        let honest =
            [joined(within).context("within the process")?, joined(with_peer).context("with another process")?];
        let mut report = outcome?;
        report.honest = honest;
        Ok::<_, anyhow::Error>(report)
    });
    let report = outcome?;
    fresh_connection(&context).context("a fresh connection after the attack")?;
    Ok(report)
}

/// Ends honest traffic when it is dropped.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The device of the loopback interface.
///
/// # Errors
/// There is none.
pub fn loopback() -> Result<Arc<Device>> {
    let devices = ferroce::devices()?;
    devices
        .into_iter()
        .find(|device| device.ifname() == "lo")
        .context("no loopback device: run in a network namespace of its own, or set FERROCE_LOOPBACK=1")
}

/// A new queue pair and a new process work at once.
fn fresh_connection(context: &Arc<Context>) -> Result<()> {
    let end = End::new(context, 0x77)?;
    let (_peer, card) = Peer::connect(&end)?;
    let mut source = Seed::new(9);
    (0..20).try_for_each(|_| end.round(&card, &mut source))
}

struct Attack {
    context: Arc<Context>,
    source: Seed,
    victims: Victims,
    /// Sends from the peer's address, and from one that is nobody's.
    sockets: [(Attacker, Forge); 2],
    /// What the victims answer.
    answers: UdpLink,
    packets: Packets,
    report: Report,
    before: Vec<(&'static str, u64)>,
}

impl Attack {
    fn new(context: &Arc<Context>, seed: u64) -> Result<Attack> {
        let client = Client::connect_or_start(&StartOptions::default())?;
        let mut lease = client.lease_lane()?;
        let lane = lease.lane();
        let answers = UdpLink::new(lease.take_rx()).context("cannot receive answers")?;
        // Kept for the life of the process, like the lane.
        std::mem::forget((client, lease));
        let recorded = recorded::packets();
        let socket = |from: Ipv4Addr| -> Result<(Attacker, Forge)> {
            let socket = Attacker::new(from, Ipv4Addr::LOCALHOST).context("the attacker's socket")?;
            let forge = Forge::new(from.into(), Ipv4Addr::LOCALHOST.into(), socket.port()?);
            Ok((socket, forge.with_recorded(recorded.clone())))
        };
        set_nonblocking(context)?;
        Ok(Attack {
            context: Arc::clone(context),
            source: Seed::new(seed),
            victims: Victims::new(context, lane)?,
            sockets: [socket(Ipv4Addr::LOCALHOST)?, socket(Ipv4Addr::new(127, 0, 0, 2))?],
            answers,
            packets: Packets::default(),
            report: Report::default(),
            before: context.counters(),
        })
    }

    fn run(&mut self, packets: u64) -> Result<Report> {
        let start = Instant::now();
        let mut resident = None;
        let mut round = 0u64;
        while !self.is_enough(packets) {
            self.round()?;
            round += 1;
            if round.is_multiple_of(ROUNDS_PER_CHECK) {
                self.victims.arena.check();
                self.count();
                // What is allocated at first use is there by now.
                if self.report.attacked() > packets / 10 {
                    let at_first = *resident.get_or_insert(resident_bytes()?);
                    self.report.growth = resident_bytes()? as i64 - at_first as i64;
                    ensure!(self.report.growth < GROWTH_MAX as i64, "memory grew by {} bytes", self.report.growth);
                }
            }
        }
        self.victims.quiet()?;
        self.victims.arena.check();
        self.count();
        self.report.time = start.elapsed();
        Ok(std::mem::take(&mut self.report))
    }

    /// So many packets have been sent. Which ways they went is a matter of time, too: where one is missing yet, more are sent.
    fn is_enough(&self, packets: u64) -> bool {
        let attacked = self.report.attacked();
        let goes_on = packets >= ENOUGH && attacked < MOST_TIMES * packets;
        attacked >= packets && (!goes_on || self.report.missing().is_empty())
    }

    /// Some bursts go out; then the victims' program does its part.
    fn round(&mut self) -> Result<()> {
        let stranger = usize::from(self.source.one_in(50));
        let (socket, forge) = &mut self.sockets[stranger];
        self.packets.clear();
        for _ in 0..BURSTS {
            let at = self.source.below(self.victims.len() as u32) as usize;
            self.victims.look_at(at)?;
            let (aim, zones) = (self.victims.aim(at), self.victims.arena.zones());
            forge.burst(&mut self.source, aim, zones, &mut self.packets);
        }
        socket.send(&self.packets, self.source.one_in(2)).context("the attacker cannot send")?;
        self.report.sent += self.packets.len() as u64;
        self.victims.act(&mut self.source)?;
        self.see();
        drain_events(&self.context);
        Ok(())
    }

    /// Looks at what the victims say.
    fn see(&mut self) {
        let victims = &mut self.victims;
        let seen = &mut self.report.seen;
        self.answers.recv(64, &mut |_, headers, payload| {
            *seen += 1;
            assert!(!tells_secret(payload), "{headers:?} tells a secret");
            victims.saw(headers);
        });
    }

    fn count(&mut self) {
        let now = self.context.counters();
        let grown = now.iter().zip(&self.before).map(|((name, now), (_, before))| (*name, now - before));
        self.report.counters = grown.collect();
        self.report.received = self.report.counter("rx_packets").unwrap_or(0);
        self.report.revived = self.victims.revived;
    }
}

/// Takes what a program would take.
fn drain_events(context: &Arc<Context>) {
    while let Ok(event) = context.next_async_event() {
        assert!(!matches!(event, AsyncEvent::Cq { .. } | AsyncEvent::DeviceFatal), "{event:?}");
    }
}

fn set_nonblocking(context: &Arc<Context>) -> Result<()> {
    let fd = context.async_fd();
    // SAFETY: the descriptor is the context's, which is alive; these calls change its flags only.
    let changed = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    ensure!(changed == 0, "cannot make the descriptor of events non-blocking");
    Ok(())
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    let number = line.trim().trim_end_matches(" kB").parse::<u64>().context("VmRSS is no number")?;
    Ok(number * 1024)
}
