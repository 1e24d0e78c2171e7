//! One end of the verifier: what each side does in a case.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferroce::{
    Ah, AhAttr, Completion, FlushRange, Placement, Qp, QpAttr, QpAttrMask, QpModify, QpState, RecvWr, SendData,
    SendFlags, SendOp, SendWr, UdDest, WcFlags, WcOpcode, WcStatus,
};
use serde::{Deserialize, Serialize};

use super::arena::{Arena, Mismatch, background, pattern};
use super::case::{Case, HALF, MAX_INLINE, Op, Transport};
use super::queues::{Queues, Role, Window};
use crate::rig::{Control, Endpoint, Peer, PeerQp, Place, QKEY, Settings, status_error};

/// How long a message may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long an unreliable message is waited for at least and at most before it counts as lost.
const ARRIVAL: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// And else so many times as long as most reliable ones took for the way there and back: it left before the client asked for a verdict.
const ROUND_TRIPS: u32 = 10;
/// Bytes of the area in front of a datagram where its network header goes (IBA 11.4.1.2).
const GRH_AREA: usize = 40;
/// Bytes that a receive buffer is longer than its message.
const SLACK: usize = 16;
/// Identifiers of requests.
const SEND_ID: u64 = 0x5e4d_0001;
const RECV_ID: u64 = 0x4ecf_0002;
/// Queue depths: one request is in flight at a time.
pub(super) const SETTINGS: Settings = Settings { depth: 16, events: false, inline: MAX_INLINE };

/// What the server found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Right,
    /// An unreliable message did not arrive, which it may; what is there of it is right.
    Lost,
    Wrong(String),
}

impl Verdict {
    fn of_memory(mismatch: &Mismatch) -> Verdict {
        Verdict::Wrong(format!("server's memory: {mismatch}"))
    }
}

/// What the client reaches at the server.
pub(super) struct Remote {
    pub(super) peer: Peer,
    ah: Arc<Ah>,
    /// What XRC requests name.
    srqn: Option<u32>,
    /// Key of the window that was lent for the present case.
    pub(super) window: Option<u32>,
}

/// A device, one queue pair of each service type, memory.
pub(super) struct End {
    endpoint: Endpoint,
    queues: Queues,
    /// Lent for a case, of the RC queue pair.
    window: Window,
    arena: Arena,
    psn: u32,
    /// Path MTU in bytes, once connected.
    mtu: u32,
    /// (server) Whose message was lost, so that its receive is still posted.
    receive_left: Option<Case>,
    /// (server) Since when the client may send.
    prepared: Instant,
    /// (server) How long reliable operations took, with the asking for a verdict.
    round_trips: Vec<Duration>,
}

impl End {
    pub(super) fn open(place: &Place, control: &Control, settings: Settings, role: Role) -> Result<End> {
        let endpoint = Endpoint::open(&place.choice(), control, Transport::ALL.len() as u32, settings)?;
        let queues = Queues::open(&endpoint, role)?;
        let window = Window::new(&endpoint, queues.of(Transport::Rc))?;
        let arena = Arena::new(&endpoint.pd, 2 * HALF)?;
        Ok(End {
            endpoint,
            queues,
            window,
            arena,
            psn: std::process::id() & 0xff_ffff,
            mtu: 0,
            receive_left: None,
            prepared: Instant::now(),
            round_trips: Vec::new(),
        })
    }

    pub(super) fn introduction(&self) -> Peer {
        Peer {
            addr: self.endpoint.addr(),
            mtu: self.endpoint.mtu(),
            qps: self.queues.all().iter().map(|qp| PeerQp { qpn: qp.qpn(), psn: self.psn }).collect(),
            area: self.arena.registered().area(),
        }
    }

    /// (server) Number of the shared receive queue that XRC requests name.
    pub(super) fn srqn(&self) -> Option<u32> {
        self.queues.srqn()
    }

    pub(super) fn connect(&mut self, peer: Peer, srqn: Option<u32>, mtu: u32) -> Result<Remote> {
        let qps = self.queues.all();
        if peer.qps.len() != qps.len() {
            bail!("the peer has {} queue pairs instead of {}", peer.qps.len(), qps.len());
        }
        for (qp, remote) in qps.iter().zip(&peer.qps) {
            self.endpoint.connect(qp, self.psn, &peer, *remote, mtu)?;
        }
        self.mtu = mtu;
        let ah = self.endpoint.pd.create_ah(&self.endpoint.path_to(peer.addr))?;
        Ok(Remote { peer, ah, srqn, window: None })
    }

    pub(super) fn describe(&self) -> String {
        self.endpoint.describe()
    }

    /// Bytes that one check looks at.
    pub(super) fn bytes_checked(&self) -> u64 {
        self.arena.len() as u64
    }

    fn qp(&self, transport: Transport) -> &Arc<Qp> {
        self.queues.of(transport)
    }

    /// Server: fresh memory, a receive if the case takes one, a window if it takes that, whose key is the result.
    pub(super) fn prepare(&mut self, case: &Case, peer: &Peer) -> Result<Option<u32>> {
        let left = self.receive_left.take();
        let again = left == Some(*case);
        if let Some(left) = left.filter(|_| !again) {
            self.take_back_receive(left.transport, peer)?;
        }
        self.arena.reset(case.seed ^ 2);
        if case.op == Op::Read {
            self.arena.put(case.whole(true), &pattern(case.seed, case.size as usize));
        }
        if case.op.takes_receive() && !again {
            let mut sges = Vec::new();
            if case.op != Op::WriteImm {
                let mut pieces = case.pieces(false);
                if case.transport == Transport::Ud {
                    sges.extend(self.arena.sges(&[(case.whole(false) - GRH_AREA, GRH_AREA)]));
                    // One element is taken by the header area.
                    pieces = match pieces.first() {
                        Some(_) => vec![(case.whole(false), case.size as usize)],
                        None => pieces,
                    };
                }
                if let Some(last) = pieces.last_mut() {
                    last.1 += SLACK;
                }
                sges.extend(self.arena.sges(&pieces));
            }
            self.queues.post_recv(case.transport, RecvWr { wr_id: RECV_ID, sges: sges.into_iter().collect() })?;
        }
        let window = case.op.takes_window().then(|| self.lend(case)).transpose()?;
        self.prepared = Instant::now();
        Ok(window)
    }

    /// Binds the window to just where the message goes.
    fn lend(&mut self, case: &Case) -> Result<u32> {
        let (lkey, addr) = (self.arena.registered().lkey(), self.arena.address(case.whole(false)));
        self.window.bind(&self.endpoint, lkey, addr, case.size.into())
    }

    /// Server: empties the receive queue. The client sends on as before: the next message of an unreliable service begins with
    /// any PSN (IBA 9.8.2).
    fn take_back_receive(&self, transport: Transport, peer: &Peer) -> Result<()> {
        let (qp, remote) = (self.qp(transport), peer.qps[transport as usize]);
        let reset = QpModify { attr: QpAttr { state: QpState::Reset, ..QpAttr::default() }, ah: AhAttr::default() };
        qp.modify(&reset, QpAttrMask::STATE)?;
        self.endpoint.connect(qp, self.psn, peer, remote, self.mtu)
    }

    /// Server: what must have happened has happened, and nothing else.
    pub(super) fn judge(&mut self, case: &Case, peer: &Peer) -> Result<Verdict> {
        if case.transport.is_reliable() {
            self.round_trips.push(self.prepared.elapsed());
        }
        if case.op.takes_receive() {
            let patience = if case.transport.is_reliable() { PATIENCE } else { arrival(&mut self.round_trips) };
            match self.wait(Instant::now() + patience)? {
                Some(completion) => {
                    if let Some(fault) = self.fault_of_receive(case, peer, &completion) {
                        return Ok(Verdict::Wrong(fault));
                    }
                }
                None if case.transport.is_reliable() => {
                    return Ok(Verdict::Wrong(format!("no completion within {} s", PATIENCE.as_secs())));
                }
                None => {
                    self.receive_left = Some(*case);
                    return Ok(self.judge_lost(case));
                }
            }
        }
        if case.op == Op::Write && !case.transport.is_reliable() {
            return self.judge_silent(case);
        }
        match case.op {
            Op::SendInv => self.window.was_closed(),
            _ => self.window.close(&self.endpoint)?,
        }
        self.expect(case);
        Ok(self.arena.check().map_or_else(|mismatch| Verdict::of_memory(&mismatch), |()| Verdict::Right))
    }

    /// Of an unreliable WRITE, whose arrival nothing tells.
    fn judge_silent(&mut self, case: &Case) -> Result<Verdict> {
        let before = self.arena.model().to_vec();
        self.expect(case);
        let deadline = Instant::now() + arrival(&mut self.round_trips);
        while self.arena.check().is_err() {
            let is_over = Instant::now() > deadline;
            // It takes what has come, too, where no thread does.
            let mut completion = [Completion::UNUSED];
            if self.endpoint.look(&mut completion)? > 0 {
                return Ok(Verdict::Wrong(format!("server's completion: {completion:?} instead of none")));
            }
            if is_over && self.arena.check().is_err() {
                return Ok(self.partial(&before));
            }
        }
        Ok(Verdict::Right)
    }

    /// Of a message that did not arrive whole, and told so by silence.
    fn judge_lost(&mut self, case: &Case) -> Verdict {
        let before = self.arena.model().to_vec();
        self.expect(case);
        self.partial(&before)
    }

    /// Each byte is what the lost message has there, or as before.
    fn partial(&self, before: &[u8]) -> Verdict {
        self.arena.check_partial(before).map_or_else(|mismatch| Verdict::of_memory(&mismatch), |()| Verdict::Lost)
    }

    /// Puts what must have arrived into the model.
    fn expect(&mut self, case: &Case) {
        let data = pattern(case.seed, case.size as usize);
        match case.op {
            op if op.is_send() && case.transport == Transport::Ud => {
                // The header area belongs to the network header; which of its bytes are set depends on the IP version.
                self.arena.accept(case.whole(false) - GRH_AREA, GRH_AREA);
                self.arena.expect(case.whole(false), &data);
            }
            Op::Send | Op::SendImm | Op::SendInv => {
                let mut at = 0;
                for (offset, length) in case.pieces(false) {
                    self.arena.expect(offset, &data[at..at + length]);
                    at += length;
                }
            }
            Op::Write | Op::WriteImm | Op::WriteWindow | Op::WriteFlush | Op::AtomicWrite => {
                self.arena.expect(case.whole(false), &data);
            }
            Op::Read | Op::CompareSwapMiss => {}
            Op::CompareSwap => self.arena.expect(case.whole(false), &case.operand().to_ne_bytes()),
            Op::FetchAdd => {
                let old = Self::original(case);
                self.arena.expect(case.whole(false), &old.wrapping_add(case.operand()).to_ne_bytes());
            }
        }
    }

    /// What the server's word holds before an atomic.
    fn original(case: &Case) -> u64 {
        background(case.seed ^ 2, case.whole(false))
    }

    fn fault_of_receive(&self, case: &Case, peer: &Peer, completion: &Completion) -> Option<String> {
        let is_ud = case.transport == Transport::Ud;
        let opcode = if case.op == Op::WriteImm { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        let bytes = case.size + if is_ud { GRH_AREA as u32 } else { 0 };
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::WITH_IMM, case.op.has_immediate());
        flags.set(WcFlags::WITH_INV, case.op == Op::SendInv);
        flags.set(WcFlags::GRH, is_ud);
        let mut faults = Vec::new();
        let mut compare = |what: &str, found: String, expected: String| {
            if found != expected {
                faults.push(format!("{what} is {found} instead of {expected}"));
            }
        };
        compare("status", format!("{:?}", completion.status), format!("{:?}", WcStatus::Success));
        compare("wr_id", completion.wr_id.to_string(), RECV_ID.to_string());
        compare("opcode", format!("{:?}", completion.opcode), format!("{opcode:?}"));
        compare("byte_len", completion.byte_len.to_string(), bytes.to_string());
        compare("wc_flags", format!("{:?}", completion.flags), format!("{flags:?}"));
        compare("qp_num", completion.qp_num.to_string(), self.qp(case.transport).qpn().to_string());
        if case.op.has_immediate() {
            compare("imm_data", completion.imm.to_string(), case.immediate().to_string());
        }
        if case.op == Op::SendInv {
            compare("invalidated_rkey", completion.imm.to_string(), self.window.rkey().to_string());
        }
        if is_ud {
            compare("src_qp", completion.src_qp.to_string(), peer.qps[Transport::Ud as usize].qpn.to_string());
        }
        (!faults.is_empty()).then(|| format!("server's completion: {}", faults.join(", ")))
    }

    /// Client: fresh memory, the operation, its completion, its effect here. `Ok(None)`: right.
    pub(super) fn perform(&mut self, case: &Case, remote: &Remote) -> Result<Option<String>> {
        self.arena.reset(case.seed ^ 1);
        let wrs = self.requests(case, remote);
        let qp = self.qp(case.transport);
        for wr in wrs {
            qp.post_send(wr)?;
        }
        qp.ring();
        let completion = self.wait(Instant::now() + PATIENCE)?;
        let completion = completion.with_context(|| format!("no completion within {} s", PATIENCE.as_secs()))?;
        if completion.status != WcStatus::Success {
            bail!(status_error(&completion));
        }
        let opcode = match case.op {
            Op::Send | Op::SendImm | Op::SendInv => WcOpcode::Send,
            Op::Write | Op::WriteImm | Op::WriteWindow => WcOpcode::RdmaWrite,
            Op::WriteFlush => WcOpcode::Flush,
            Op::AtomicWrite => WcOpcode::AtomicWrite,
            Op::Read => WcOpcode::RdmaRead,
            Op::CompareSwap | Op::CompareSwapMiss => WcOpcode::CompSwap,
            Op::FetchAdd => WcOpcode::FetchAdd,
        };
        if completion.opcode != opcode || completion.wr_id != SEND_ID || completion.qp_num != qp.qpn() {
            return Ok(Some(format!("client's completion: {completion:?} instead of {opcode:?}")));
        }
        let returned = match case.op {
            Op::Read => Some(pattern(case.seed, case.size as usize)),
            _ if case.op.is_atomic() => Some(Self::original(case).to_ne_bytes().to_vec()),
            _ => None,
        };
        if let Some(data) = returned {
            if completion.byte_len != case.size {
                return Ok(Some(format!(
                    "client's completion: byte_len {} instead of {}",
                    completion.byte_len, case.size
                )));
            }
            let mut at = 0;
            for (offset, length) in case.pieces(false) {
                self.arena.expect(offset, &data[at..at + length]);
                at += length;
            }
        }
        Ok(self.arena.check().err().map(|mismatch| format!("client's memory: {mismatch}")))
    }

    /// What the client posts; the last request is signaled.
    fn requests(&mut self, case: &Case, remote: &Remote) -> Vec<SendWr> {
        let wr = self.request(case, remote);
        if case.op != Op::WriteFlush {
            return vec![wr];
        }
        let range = FlushRange::Bytes { raddr: remote.peer.area.addr + case.whole(false) as u64, len: case.size };
        let op = SendOp::Flush { rkey: remote.peer.area.rkey, range, placement: Placement::GLOBAL };
        let data = SendData::Sges(std::iter::empty().collect());
        let flush = SendWr { op, data, flags: SendFlags::SIGNALED, ..wr.clone() };
        vec![SendWr { flags: wr.flags - SendFlags::SIGNALED, ..wr }, flush]
    }

    fn request(&mut self, case: &Case, remote: &Remote) -> SendWr {
        let peer = &remote.peer;
        let pieces = case.pieces(true);
        let data = pattern(case.seed, case.size as usize);
        let gathers = !(case.op == Op::Read || case.op.is_atomic());
        if gathers && !case.inline {
            let mut at = 0;
            for &(offset, length) in &pieces {
                self.arena.put(offset, &data[at..at + length]);
                at += length;
            }
        }
        let rkey = remote.window.unwrap_or(peer.area.rkey);
        let (source, sink) = (peer.area.addr + case.whole(true) as u64, peer.area.addr + case.whole(false) as u64);
        let (imm, operand, old) = (case.immediate(), case.operand(), Self::original(case));
        let op = match case.op {
            Op::Send => SendOp::Send,
            Op::SendImm => SendOp::SendImm { imm },
            Op::SendInv => SendOp::SendInv { rkey },
            Op::Write | Op::WriteWindow | Op::WriteFlush => SendOp::Write { raddr: sink, rkey },
            Op::WriteImm => SendOp::WriteImm { raddr: sink, rkey, imm },
            Op::Read => SendOp::Read { raddr: source, rkey },
            Op::CompareSwap => SendOp::CompareSwap { raddr: sink, rkey, compare: old, swap: operand },
            Op::CompareSwapMiss => SendOp::CompareSwap { raddr: sink, rkey, compare: !old, swap: operand },
            Op::FetchAdd => SendOp::FetchAdd { raddr: sink, rkey, add: operand },
            Op::AtomicWrite => SendOp::AtomicWrite { raddr: sink, rkey },
        };
        let mut flags = SendFlags::SIGNALED;
        let data = if case.inline {
            flags |= SendFlags::INLINE;
            SendData::Inline(data.into_boxed_slice())
        } else {
            let pieces = if gathers { pieces } else { case.pieces(false) };
            SendData::Sges(self.arena.sges(&pieces).into_iter().collect())
        };
        let ud = (case.transport == Transport::Ud).then(|| UdDest {
            path: Arc::clone(remote.ah.path()),
            qpn: peer.qps[Transport::Ud as usize].qpn,
            qkey: QKEY,
        });
        let xrc_srqn = remote.srqn.filter(|_| case.transport == Transport::Xrc);
        SendWr { wr_id: SEND_ID, op, flags, data, ud, xrc_srqn }
    }

    /// The next completion, if it comes in time.
    fn wait(&self, deadline: Instant) -> Result<Option<Completion>> {
        loop {
            // What is there counts, however late it is looked at.
            let is_over = Instant::now() > deadline;
            let completion = self.poll()?;
            if is_over || completion.is_some() {
                return Ok(completion);
            }
        }
    }

    fn poll(&self) -> Result<Option<Completion>> {
        let mut completion = [Completion::UNUSED];
        Ok((self.endpoint.poll(&mut completion)? > 0).then_some(completion[0]))
    }
}

/// How long to wait for an unreliable message, by how long reliable ones took.
fn arrival(round_trips: &mut [Duration]) -> Duration {
    let [least, most] = ARRIVAL;
    if round_trips.is_empty() {
        return most;
    }
    // Those of which a packet was lost took longer, and say nothing of the network.
    let middle = round_trips.len() / 2;
    let (_, usual, _) = round_trips.select_nth_unstable(middle);
    (*usual * ROUND_TRIPS).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was a second for each lost message, whatever the network: nearly a minute of `verify` on one machine.
    #[test]
    fn a_message_is_waited_for_as_the_network_is_fast() {
        let ms = Duration::from_millis;
        assert_eq!(arrival(&mut []), ms(1000));
        assert_eq!(arrival(&mut [ms(1), ms(700), ms(1)]), ms(50));
        assert_eq!(arrival(&mut [ms(20), ms(500), ms(1), ms(20), ms(20)]), ms(200));
        assert_eq!(arrival(&mut [ms(300), ms(300)]), ms(1000));
    }
}
