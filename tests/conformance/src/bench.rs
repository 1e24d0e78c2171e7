//! What cases are written with: queue pairs of the DUT, packets to them, and what must come back.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce_wire::{Opcode, Psn, Syndrome};

use crate::dut::{Dut, Kind, Post, Region, Setup, Wc, Window};
use crate::frame::{Heard, Packet};
use crate::wire::Wire;

/// `IBV_ACCESS_LOCAL_WRITE`.
pub const LOCAL_WRITE: u32 = 1;
/// `IBV_ACCESS_REMOTE_WRITE`.
pub const REMOTE_WRITE: u32 = 2;
/// `IBV_ACCESS_REMOTE_READ`.
pub const REMOTE_READ: u32 = 4;
/// `IBV_ACCESS_REMOTE_ATOMIC`.
pub const REMOTE_ATOMIC: u32 = 8;
/// All four.
pub const ALL: u32 = 15;
/// `IBV_ACCESS_MW_BIND`.
pub const MW_BIND: u32 = 16;

/// `IBV_QPS_RTS`.
pub const RTS: u32 = 3;
/// `IBV_QPS_ERR`.
pub const ERR: u32 = 6;

/// Opcodes of send requests (`ibv_wr_opcode`).
pub mod wr {
    #![allow(missing_docs)]
    pub const WRITE: u32 = 0;
    pub const WRITE_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_IMM: u32 = 3;
    pub const READ: u32 = 4;
    pub const CMP_SWAP: u32 = 5;
    pub const FETCH_ADD: u32 = 6;
    pub const LOCAL_INV: u32 = 7;
    pub const SEND_INV: u32 = 9;
}

/// Flags of send requests (`ibv_send_flags`).
pub mod flag {
    #![allow(missing_docs)]
    pub const FENCE: u32 = 1;
    pub const SIGNALED: u32 = 2;
    pub const SOLICITED: u32 = 4;
}

/// Completion statuses (`ibv_wc_status`).
pub mod status {
    #![allow(missing_docs)]
    pub const SUCCESS: u32 = 0;
    pub const LOC_LEN: u32 = 1;
    pub const FLUSHED: u32 = 5;
    pub const BAD_RESP: u32 = 7;
    pub const REM_INV_REQ: u32 = 9;
    pub const REM_ACCESS: u32 = 10;
    pub const REM_OP: u32 = 11;
    pub const RETRY_EXC: u32 = 12;
    pub const RNR_RETRY_EXC: u32 = 13;
}

/// Opcode of a receive's completion (`IBV_WC_RECV`), and of one that a WRITE with immediate used.
pub const WC_RECV: u32 = 128;
/// See [`WC_RECV`].
pub const WC_RECV_WRITE_IMM: u32 = 129;
/// `IBV_WC_GRH`.
pub const WC_GRH: u32 = 1;
/// `IBV_WC_WITH_IMM`.
pub const WC_WITH_IMM: u32 = 2;
/// `IBV_WC_WITH_INV`.
pub const WC_WITH_INV: u32 = 8;

/// What is seen of a device that does not answer.
pub const SILENCE: &str = "no packet came";

/// Why a case does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The device departs from the clause.
    #[error("departs: {0}")]
    Departs(String),
    /// The bench itself failed.
    #[error("trouble: {0:#}")]
    Trouble(anyhow::Error),
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Stop {
        Stop::Trouble(error)
    }
}

/// What a case gives.
pub type Seen<T = ()> = Result<T, Stop>;

/// Departs with what was seen.
pub fn departs<T>(what: impl Into<String>) -> Seen<T> {
    Err(Stop::Departs(what.into()))
}

/// Departs unless `condition`.
pub fn must(condition: bool, what: impl FnOnce() -> String) -> Seen {
    if condition { Ok(()) } else { departs(what()) }
}

/// Both ends of a connection: the DUT's queue pair and what the tester plays.
#[derive(Clone, Copy, Debug)]
pub struct Conn {
    /// Number of the DUT's queue pair in the conversation.
    pub id: u32,
    /// QPN of the DUT.
    pub dut: u32,
    /// QPN that the tester plays.
    pub own: u32,
    /// How it was made.
    pub setup: Setup,
    /// PSN of the tester's next new request.
    pub psn: u32,
    /// Messages that the DUT completed as responder.
    pub msn: u32,
}

/// A queue pair with all rights, patient timers, and a start PSN of 0x1000 (tester) and 0xa00000 (DUT).
pub const SETUP: Setup = Setup {
    kind: Kind::Rc,
    mtu: 1024,
    sq_psn: 0xa0_0000,
    rq_psn: 0x1000,
    access: ALL,
    min_rnr_timer: 12,
    timeout: 20,
    retry_cnt: 6,
    rnr_retry: 7,
    rd_atomic: 4,
    dest_rd_atomic: 4,
    qkey: 0x1111_1111,
    v6: false,
};

impl Conn {
    /// A packet to the DUT with the next PSN and AckReq.
    pub fn request(&self, opcode: Opcode) -> Packet {
        self.packet(opcode, self.psn).ack_req(true)
    }

    fn packet(&self, opcode: Opcode, psn: u32) -> Packet {
        Packet { v6: self.setup.v6, ..Packet::new(opcode, self.dut, psn) }
    }

    /// A response to the DUT.
    pub fn response(&self, opcode: Opcode, psn: u32, syndrome: Syndrome, msn: u32) -> Packet {
        self.packet(opcode, psn).aeth(syndrome, msn)
    }

    /// An ACK to the DUT.
    pub fn ack(&self, psn: u32, msn: u32) -> Packet {
        self.response(Opcode::RC_ACKNOWLEDGE, psn, Syndrome::ACK, msn)
    }

    /// A NAK to the DUT.
    pub fn nak(&self, psn: u32, msn: u32, syndrome: Syndrome) -> Packet {
        self.response(Opcode::RC_ACKNOWLEDGE, psn, syndrome, msn)
    }

    /// The PSN `n` after the DUT's first.
    pub fn sq(&self, n: u32) -> u32 {
        add(self.setup.sq_psn, n)
    }
}

/// PSN arithmetic.
pub fn add(psn: u32, n: u32) -> u32 {
    Psn::new(psn).add(n).get()
}

/// The endless test pattern.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| 0x10 + (i % 211) as u8).collect()
}

/// The tester.
pub struct Bench {
    wire: Wire,
    /// The DUT's program.
    pub dut: Dut,
    own: [IpAddr; 2],
    peer: [IpAddr; 2],
    /// Longest wait for what must come.
    pub patience: Duration,
    next_qpn: u32,
    next_id: u32,
    /// Region that probes write to.
    scratch: Option<Region>,
    probes: u32,
    identification: u16,
    /// Packets for queue pairs that were not asked about yet.
    waiting: VecDeque<Heard>,
}

/// Port that the tester's packets come from.
const SOURCE_PORT: u16 = 0xc123;

impl Bench {
    /// The tester is `own`, the DUT is `peer`: addresses of IPv4 and IPv6.
    pub fn new(wire: Wire, dut: Dut, own: [IpAddr; 2], peer: [IpAddr; 2], patience: Duration) -> Bench {
        Bench {
            wire,
            dut,
            own,
            peer,
            patience,
            next_qpn: 0x4001,
            next_id: 0,
            scratch: None,
            probes: 0,
            identification: 1,
            waiting: VecDeque::new(),
        }
    }

    /// Forgets everything before the next case.
    pub fn clear(&mut self) -> anyhow::Result<()> {
        self.next_id = 0;
        self.scratch = None;
        self.waiting.clear();
        self.dut.reset()
    }

    /// The tester's address.
    pub fn own(&self, v6: bool) -> IpAddr {
        self.own[usize::from(v6)]
    }

    /// The DUT's address.
    pub fn peer(&self, v6: bool) -> IpAddr {
        self.peer[usize::from(v6)]
    }

    /// Makes a connection.
    pub fn connect(&mut self, setup: Setup) -> Seen<Conn> {
        let (id, own) = (self.id(), self.next_qpn);
        self.next_qpn += 1;
        let dut = self.dut.queue_pair(id, self.own(setup.v6), own, &setup)?;
        Ok(Conn { id, dut, own, setup, psn: setup.rq_psn, msn: 0 })
    }

    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// A region of the DUT with these rights.
    pub fn region(&mut self, size: usize, access: u32) -> Seen<Region> {
        let id = self.id();
        Ok(self.dut.region(id, size, access, 0)?)
    }

    /// A region of another protection domain than the queue pairs have.
    pub fn foreign_region(&mut self, size: usize) -> Seen<Region> {
        let id = self.id();
        Ok(self.dut.region(id, size, ALL, 1)?)
    }

    /// A memory window of type 2 over part of a region, bound for the connection's queue pair.
    pub fn window(&mut self, conn: &Conn, region: Region, offset: u64, len: u32, access: u32) -> Seen<Window> {
        let id = self.id();
        self.bind(conn, id, region, offset, len, access)
    }

    /// Binds window `id`, perhaps once more.
    pub fn bind(&mut self, conn: &Conn, id: u32, region: Region, offset: u64, len: u32, access: u32) -> Seen<Window> {
        const BINDING: u64 = 900;
        let window = self.dut.bind(id, (conn.id, BINDING), region, offset, len, access)?;
        self.expect_completions(conn, &[(BINDING, status::SUCCESS)])?;
        Ok(window)
    }

    /// Sends a packet.
    pub fn say(&mut self, packet: &Packet) -> Seen {
        let (own, peer) = (self.own(packet.v6), self.peer(packet.v6));
        let datagram = packet.datagram(own, peer, SOURCE_PORT, self.identification);
        self.identification = self.identification.wrapping_add(1).max(1);
        self.wire.send(&datagram).map_err(|e| Stop::Trouble(anyhow::Error::new(e).context("cannot send a packet")))
    }

    /// The next packet to the connection until `deadline`.
    fn hear_until(&mut self, conn: &Conn, deadline: Instant) -> Seen<Option<Heard>> {
        if let Some(at) = self.waiting.iter().position(|heard| heard.headers.bth.dest_qp == conn.own) {
            return Ok(self.waiting.remove(at));
        }
        loop {
            let got = self.wire.recv(deadline).map_err(|e| Stop::Trouble(e.into()))?;
            let Some(datagram) = got else {
                if Instant::now() >= deadline {
                    return Ok(None);
                }
                continue;
            };
            match Heard::parse(&datagram) {
                Some(Ok(heard)) if heard.dst != self.own(conn.setup.v6) => {}
                Some(Ok(heard)) if heard.headers.bth.dest_qp == conn.own => return Ok(Some(heard)),
                Some(Ok(heard)) => self.waiting.push_back(heard),
                Some(Err(what)) => return departs(format!("sent {what}")),
                None => {}
            }
        }
    }

    /// The next packet to the connection; departs if none comes.
    pub fn hear(&mut self, conn: &Conn) -> Seen<Heard> {
        let deadline = Instant::now() + self.patience;
        match self.hear_until(conn, deadline)? {
            Some(heard) => Ok(heard),
            None => departs(SILENCE),
        }
    }

    /// All packets that have come already.
    pub fn drain(&mut self, conn: &Conn) -> Seen<Vec<Heard>> {
        let mut all = Vec::new();
        while let Some(heard) = self.hear_until(conn, Instant::now())? {
            all.push(heard);
        }
        Ok(all)
    }

    /// The next packet is an ACK of `psn` with `msn`.
    pub fn expect_ack(&mut self, conn: &Conn, psn: u32, msn: u32) -> Seen<Heard> {
        let heard = self.hear(conn)?;
        let good = heard.opcode() == Opcode::RC_ACKNOWLEDGE
            && heard.psn() == psn
            && heard.headers.aeth.is_some_and(|aeth| aeth.syndrome.is_ack() && aeth.msn == msn);
        must(good, || format!("answered {heard}, not ACK psn {psn:#08x} msn {msn}"))?;
        Ok(heard)
    }

    /// The next packet is this NAK of `psn`.
    pub fn expect_nak(&mut self, conn: &Conn, psn: u32, syndrome: Syndrome) -> Seen<Heard> {
        let heard = self.hear(conn)?;
        let got = heard.headers.aeth.map(|aeth| aeth.syndrome);
        let good = heard.opcode() == Opcode::RC_ACKNOWLEDGE && heard.psn() == psn && got == Some(syndrome);
        must(good, || format!("answered {heard}, not {syndrome} psn {psn:#08x}"))?;
        Ok(heard)
    }

    /// The next packet to a requester is one of PSN `psn`. What is behind it is a repetition, which is passed over.
    pub fn expect_request(&mut self, conn: &Conn, psn: u32) -> Seen<Heard> {
        loop {
            let heard = self.hear(conn)?;
            let ahead = Psn::new(heard.psn()).diff(Psn::new(psn));
            if ahead == 0 {
                return Ok(heard);
            }
            must(ahead < 0, || format!("sent {heard}, not psn {psn:#08x}"))?;
        }
    }

    /// The next packet of PSN `psn`, whatever else is under way.
    pub fn expect_among(&mut self, conn: &Conn, psn: u32) -> Seen<Heard> {
        loop {
            let heard = self.hear(conn)?;
            if heard.psn() == psn {
                return Ok(heard);
            }
        }
    }

    /// Shows that what was said before drew no answer and was not executed: a WRITE with the next PSN is acknowledged, nothing comes
    /// before, and its bytes are there (were its PSN used already, it would be a duplicate); then the same with the PSN behind it.
    pub fn expect_unmoved(&mut self, conn: &mut Conn) -> Seen {
        let scratch = match self.scratch {
            Some(region) => region,
            None => self.region(64, ALL)?,
        };
        self.scratch = Some(scratch);
        for _ in 0..2 {
            self.probes += 1;
            let bytes = self.probes.to_be_bytes();
            let probe = conn.request(Opcode::RC_WRITE_ONLY).reth(scratch.addr, scratch.rkey, 4).payload(&bytes);
            self.say(&probe)?;
            self.expect_ack(conn, conn.psn, conn.msn + 1).map_err(|stop| match stop {
                Stop::Departs(what) => Stop::Departs(format!("a good request behind it: {what}")),
                trouble => trouble,
            })?;
            let there = self.dut.get(scratch, 0, 4)? == bytes;
            must(there, || "it was executed: a good request with its PSN is taken for a duplicate".to_owned())?;
            conn.psn = add(conn.psn, 1);
            conn.msn += 1;
        }
        Ok(())
    }

    /// The queue pair goes to (or is in) this state.
    pub fn expect_state(&mut self, conn: &Conn, state: u32) -> Seen {
        let deadline = Instant::now() + self.patience;
        loop {
            let now = self.dut.state(conn.id)?;
            if now == state {
                return Ok(());
            }
            if Instant::now() > deadline {
                return departs(format!("the queue pair is {}, not {}", state_name(now), state_name(state)));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Posts a receive.
    pub fn recv(&mut self, conn: &Conn, wr_id: u64, region: Region, len: u32) -> Seen {
        Ok(self.dut.post_recv(conn.id, wr_id, region, 0, len)?)
    }

    /// Posts a signalled send request.
    pub fn post(&mut self, conn: &Conn, wr_id: u64, post: Post) -> Seen {
        let post = Post { flags: post.flags | flag::SIGNALED, ..post };
        Ok(self.dut.post_send(conn.id, wr_id, &post)?)
    }

    /// The next completions are these requests with these statuses, and there is none besides.
    pub fn expect_completions(&mut self, conn: &Conn, expected: &[(u64, u32)]) -> Seen<Vec<Wc>> {
        let mut got = Vec::new();
        if !expected.is_empty() {
            got = self.dut.wait(conn.id, expected.len(), self.patience)?;
        }
        got.extend(self.dut.wait(conn.id, 16, Duration::ZERO)?);
        let pairs: Vec<(u64, u32)> = got.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        must(pairs == expected, || format!("completed {}, not {}", show(&pairs), show(expected)))?;
        Ok(got)
    }

    /// The memory of a region has these bytes at `offset`.
    pub fn expect_bytes(&mut self, region: Region, offset: i64, bytes: &[u8]) -> Seen {
        let got = self.dut.get(region, offset, bytes.len())?;
        let first = got.iter().zip(bytes).position(|(a, b)| a != b);
        must(first.is_none(), || {
            let at = first.unwrap_or_default();
            format!("byte {} of the memory is {:#04x}, not {:#04x}", offset + at as i64, got[at], bytes[at])
        })
    }
}

/// Requests with statuses, for reports.
fn show(pairs: &[(u64, u32)]) -> String {
    if pairs.is_empty() {
        return "nothing".to_owned();
    }
    let words: Vec<String> = pairs.iter().map(|(id, status)| format!("{id}: {}", status_name(*status))).collect();
    words.join(", ")
}

/// Name of a completion status.
pub fn status_name(status: u32) -> String {
    const NAMES: [&str; 14] = [
        "success",
        "local length error",
        "local QP operation error",
        "local EEC operation error",
        "local protection error",
        "flushed",
        "memory window bind error",
        "bad response",
        "local access error",
        "remote invalid request",
        "remote access error",
        "remote operation error",
        "retry exceeded",
        "RNR retry exceeded",
    ];
    NAMES.get(status as usize).map_or_else(|| format!("status {status}"), |name| (*name).to_owned())
}

fn state_name(state: u32) -> &'static str {
    ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"].get(state as usize).copied().unwrap_or("in an unknown state")
}
