//! What programs ask for: one request after the other, good ones and such that must fail.

use std::sync::Arc;

use ferroce_transport::{Access, QpType, SendData, SendFlags, SendOp, SendWr, Sge, UdDest, WcStatus};
use smallvec::SmallVec;

use crate::coverage::Met;
use crate::memory::{MrId, Piece};
use crate::oracle::{Fate, Request};
use crate::pattern::Pattern;
use crate::plan::OPS;
use crate::world::World;

/// Longest inline request.
const INLINE_MAX: u32 = 1000;
/// Elements of a request.
const SGES_MAX: u64 = 4;

/// A request in the making.
struct Draft {
    op: SendOp,
    len: u32,
    fate: Fate,
    pattern: Pattern,
    target: u64,
    sges: SmallVec<[Sge; 2]>,
    local: SmallVec<[(u64, u32); 4]>,
    inline: Option<Box<[u8]>>,
    fence: bool,
    met: Met,
}

impl Draft {
    fn new(op: SendOp, len: u32, pattern: Pattern, met: Met) -> Draft {
        Draft {
            op,
            len,
            fate: Fate::Good,
            pattern,
            target: 0,
            sges: SmallVec::new(),
            local: SmallVec::new(),
            inline: None,
            fence: false,
            met,
        }
    }
}

/// How a request is to be spoilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    BadRkey,
    WrongPd,
    Bounds,
    NoRight,
    BadLkey,
    Length,
}

impl World {
    pub(crate) fn next_request(&mut self, qp: usize) -> (SendWr, Request) {
        let mut draft = match self.plan.fixed_len {
            Some(len) => self.fixed_write(qp, len),
            None => self.draft(qp),
        };
        self.requests_numbered += 1;
        let wr_id = self.requests_numbered;
        let conn = &self.plan.conns[self.qps[qp].conn];
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, self.random.percent(conn.signalled));
        flags.set(SendFlags::FENCE, draft.fence || self.random.percent(conn.fenced));
        flags.set(SendFlags::SOLICITED, self.random.percent(20));
        flags.set(SendFlags::INLINE, draft.inline.is_some());
        let bad = conn.bad;
        let (ud, to) = if conn.qp_type == QpType::Ud { self.ud_destination(qp) } else { (None, None) };
        let xrc_srqn = self.xrc_srqn(qp, bad, &mut draft);
        self.cover_request(&draft, flags);
        let data = match draft.inline.take() {
            Some(bytes) => SendData::Inline(bytes),
            None => SendData::Sges(draft.sges),
        };
        let request = Request {
            wr_id,
            posted_at: self.now,
            op: draft.op.clone(),
            flags,
            len: draft.len,
            fate: draft.fate,
            pattern: draft.pattern,
            local: draft.local,
            target: draft.target,
            to,
            stored: 0,
            executed: false,
            returned: 0,
            old: None,
            delivered: 0,
            completed: false,
        };
        (SendWr { wr_id, op: draft.op, flags, data, ud, xrc_srqn }, request)
    }

    /// XRC: the number of the peer's SRQ, or now and then one that its domain does not have.
    fn xrc_srqn(&mut self, qp: usize, bad: u32, draft: &mut Draft) -> Option<u32> {
        if self.oracle.books[qp].qp_type != QpType::XrcSend {
            return None;
        }
        self.cover.add(Met::Xrc);
        let peer = self.oracle.books[qp].peer;
        // What a cell is said to hold must have been written.
        let in_cell = self.programs[peer].memory.cells.iter().any(|cell| cell.piece.at == draft.target);
        let may_fail = draft.fate == Fate::Good && draft.met != Met::LocalInv && !in_cell;
        if may_fail && self.random.chance(bad) {
            self.cover.add(Met::BadSrqNumber);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
            return Some(0x00ff_ffff);
        }
        let srq = self.oracle.books[peer].srq.expect("a target has an SRQ");
        Some(srq as u32 + 1)
    }

    fn cover_request(&mut self, draft: &Draft, flags: SendFlags) {
        self.cover.add(draft.met);
        let several = draft.sges.len() > 1;
        for (met, is) in [
            (Met::Inline, draft.inline.is_some()),
            (Met::ZeroLength, draft.len == 0 && draft.met != Met::LocalInv),
            (Met::SeveralSges, several),
            (Met::Fence, flags.contains(SendFlags::FENCE)),
            (Met::Solicited, flags.contains(SendFlags::SOLICITED)),
            (Met::Unsignalled, !flags.contains(SendFlags::SIGNALED)),
            (Met::Huge, draft.len >= 1 << 20),
            (Met::Fragile, draft.fate == Fate::Fragile),
        ] {
            if is {
                self.cover.add(met);
            }
        }
    }

    fn draft(&mut self, qp: usize) -> Draft {
        let conn = &self.plan.conns[self.qps[qp].conn];
        let (qp_type, bad) = (conn.qp_type, conn.bad);
        let usable: &[usize] = match qp_type {
            QpType::Rc | QpType::XrcSend => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            QpType::Uc => &[0, 1, 3, 4],
            QpType::Ud => &[0, 1],
            QpType::XrcRecv => unreachable!("a target requests nothing"),
            QpType::RawPacket => unreachable!("frames have no protocol to simulate"),
        };
        let mut weights = [0; OPS];
        for &op in usable {
            weights[op] = conn.mix[op];
        }
        if weights.iter().all(|&weight| weight == 0) {
            weights[0] = 1;
        }
        let op = self.random.weighted(&weights);
        let is_bad = self.random.chance(bad);
        let len = self.len(qp);
        let kind = |rc, uc, ud| match qp_type {
            QpType::Uc => uc,
            QpType::Ud => ud,
            _ => rc,
        };
        let imm = self.random.next() as u32;
        match op {
            0 => self.send(qp, SendOp::Send, len, is_bad, kind(Met::RcSend, Met::UcSend, Met::UdSend)),
            1 => {
                let met = kind(Met::RcSendImm, Met::UcSendImm, Met::UdSendImm);
                self.send(qp, SendOp::SendImm { imm }, len, is_bad, met)
            }
            2 => self.send_inv(qp, len, is_bad),
            3 => self.write(qp, None, len, is_bad, kind(Met::RcWrite, Met::UcWrite, Met::UcWrite)),
            4 => self.write(qp, Some(imm), len, is_bad, kind(Met::RcWriteImm, Met::UcWriteImm, Met::UcWriteImm)),
            5 => self.read(qp, len, is_bad),
            6 | 7 => self.atomic(qp, op == 6, is_bad),
            8 => self.local_inv(qp, is_bad),
            9 => self.write_cell(qp),
            _ => self.read_cell(qp),
        }
    }

    /// A length: often small, often at a boundary of packets or trains.
    fn len(&mut self, qp: usize) -> u32 {
        let conn = &self.plan.conns[self.qps[qp].conn];
        let (mtu, max) = (conn.mtu, conn.max_len);
        let random = &mut self.random;
        let len = match random.weighted(&[10, 25, 25, 5, 35]) {
            0 => 0,
            1 => random.between(1, 64) as u32,
            2 => mtu * random.between(1, 4) as u32 + random.below(3) as u32 - 1,
            3 => ferroce_transport::MAX_TRAIN_BYTES / mtu * mtu + random.below(3) as u32 - 1,
            _ => random.below(u64::from(max) + 1) as u32,
        };
        let bytes_left = &mut self.programs[qp].bytes_left;
        let len = len.min(max);
        // When the plan's bytes are used up, small ones still go.
        let len = if len <= *bytes_left { len } else { len % 64 };
        *bytes_left = bytes_left.saturating_sub(len);
        len
    }

    fn peer_end(&self, qp: usize) -> (usize, usize) {
        let peer = self.oracle.books[qp].peer;
        (peer, self.qps[peer].node)
    }

    /// Local memory for `len` bytes in one to four elements.
    fn local(&mut self, qp: usize, mr: MrId, len: u32, draft: &mut Draft) {
        let node = self.qps[qp].node;
        let parts = if self.random.percent(40) { self.random.between(1, SGES_MAX) } else { 1 };
        let mut left = len;
        for part in (0..parts).rev() {
            let size = if part == 0 { left } else { self.random.below(u64::from(left) + 1) as u32 };
            left -= size;
            if size == 0 {
                // An element of no bytes is good whatever it names.
                if parts > 1 {
                    draft.sges.push(Sge { addr: self.random.next(), length: 0, lkey: self.random.next() as u32 });
                }
                continue;
            }
            let gap = self.random.below(16) as u32;
            let piece = self.nodes[node].memory.alloc(mr, size, gap).expect("regions are as large as the plan's bytes");
            draft.sges.push(piece.sge(0, size));
            draft.local.push((piece.at, size));
        }
    }

    /// A source filled with the message.
    fn source(&mut self, qp: usize, draft: &mut Draft, is_bad: bool) {
        let inline = self.plan.conns[self.qps[qp].conn].inline;
        if draft.len <= INLINE_MAX && self.random.percent(inline) {
            draft.inline = Some(draft.pattern.bytes(draft.len as usize).into());
            return;
        }
        let memory = &self.programs[qp].memory;
        let (mr, node) = (memory.sources, self.qps[qp].node);
        let fragile = memory.fragile_out_piece;
        if self.random.percent(5) && draft.len <= fragile.len && draft.fate == Fate::Good {
            draft.pattern = memory.fragile_pattern;
            draft.fate = Fate::Fragile;
            draft.sges.push(fragile.sge(0, draft.len));
            draft.local.push((fragile.at, draft.len));
            return;
        }
        self.local(qp, mr, draft.len, draft);
        let mut offset = 0;
        for &(at, len) in &draft.local {
            draft.pattern.skip(offset).fill(self.nodes[node].memory.write(at, len));
            offset += len;
        }
        if is_bad && draft.len > 0 {
            self.spoil_lkey(qp, draft);
        }
    }

    fn spoil_lkey(&mut self, qp: usize, draft: &mut Draft) {
        self.cover.add(Met::BadLkey);
        let key = self.unknown_key(self.qps[qp].node);
        let last = draft.sges.iter_mut().rev().find(|sge| sge.length > 0).expect("a request with bytes has elements");
        last.lkey = key;
        draft.fate = Fate::Local(WcStatus::LocProtErr);
    }

    fn send(&mut self, qp: usize, op: SendOp, len: u32, is_bad: bool, met: Met) -> Draft {
        let pattern = Pattern::random(&mut self.random);
        let mut draft = Draft::new(op, len, pattern, met);
        self.source(qp, &mut draft, is_bad);
        draft
    }

    fn send_inv(&mut self, qp: usize, len: u32, is_bad: bool) -> Draft {
        let (peer, node) = self.peer_end(qp);
        let piece = self.programs[peer].memory.cells[0].piece;
        let rkey = if is_bad {
            self.cover.add(Met::BadInvalidate);
            piece.key
        } else {
            self.bind_window(peer, node, piece)
        };
        let mut draft = self.send(qp, SendOp::SendInv { rkey }, len, false, Met::RcSendInv);
        // Refused by the peer for its key: memory that goes away would leave open which of two errors it ends with.
        while draft.fate == Fate::Fragile {
            draft = self.send(qp, SendOp::SendInv { rkey }, len, false, Met::RcSendInv);
        }
        if is_bad {
            draft.fate = Fate::Remote(WcStatus::RemAccessErr);
        }
        draft
    }

    fn bind_window(&mut self, qp: usize, node: usize, piece: Piece) -> u32 {
        let key = self.unknown_key(node);
        let pd = self.domains[self.programs[qp].memory.domain].pd;
        self.nodes[node].memory.bind_window(pd, piece, Access::REMOTE_READ, key);
        key
    }

    fn local_inv(&mut self, qp: usize, is_bad: bool) -> Draft {
        let node = self.qps[qp].node;
        let piece = self.programs[qp].memory.cells[0].piece;
        let rkey = if is_bad { piece.key } else { self.bind_window(qp, node, piece) };
        let pattern = Pattern::random(&mut self.random);
        let mut draft = Draft::new(SendOp::LocalInv { rkey }, 0, pattern, Met::LocalInv);
        if is_bad {
            self.cover.add(Met::BadInvalidate);
            draft.fate = Fate::Local(WcStatus::MwBindErr);
        }
        draft
    }

    fn write(&mut self, qp: usize, imm: Option<u32>, len: u32, is_bad: bool, met: Met) -> Draft {
        let pattern = Pattern::random(&mut self.random);
        let op = |raddr, rkey| match imm {
            Some(imm) => SendOp::WriteImm { raddr, rkey, imm },
            None => SendOp::Write { raddr, rkey },
        };
        let (peer, node) = self.peer_end(qp);
        let memory = &self.programs[peer].memory;
        let (targets, fragile, domain) = (memory.targets, memory.fragile_in_piece, memory.domain);
        let denied = self.plan.conns[self.qps[qp].conn].denied.contains(Access::REMOTE_WRITE);
        let mut draft = Draft::new(op(0, 0), len, pattern, met);
        let flaw = (is_bad && len > 0).then(|| self.flaw());
        // UC goes on when such a WRITE fails: it can have more of them.
        let often = if self.oracle.books[qp].qp_type == QpType::Uc { 25 } else { 5 };
        let (raddr, rkey, at) = if flaw.is_none() && !denied && len <= fragile.len && self.random.percent(often) {
            draft.fate = Fate::Fragile;
            (fragile.va, fragile.key, fragile.at)
        } else {
            let gap = self.random.below(16) as u32;
            let piece =
                self.nodes[node].memory.alloc(targets, len, gap).expect("targets have room for the plan's bytes");
            let no_right = self.domains[domain].library;
            self.aim(domain, node, piece, no_right, flaw, &mut draft)
        };
        if denied {
            self.cover.add(Met::NoQpRight);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        draft.op = op(raddr, rkey);
        draft.target = at;
        let fate = draft.fate;
        self.source(qp, &mut draft, flaw == Some(Flaw::BadLkey) && !denied);
        if matches!(fate, Fate::Remote(_)) {
            draft.fate = fate;
        }
        draft
    }

    fn flaw(&mut self) -> Flaw {
        self.random.pick(&[Flaw::BadRkey, Flaw::WrongPd, Flaw::Bounds, Flaw::NoRight, Flaw::BadLkey])
    }

    /// Remote address and key for a piece, spoilt by a flaw; sets the fate.
    fn aim(
        &mut self,
        domain: usize,
        node: usize,
        piece: Piece,
        no_right: Piece,
        flaw: Option<Flaw>,
        draft: &mut Draft,
    ) -> (u64, u32, u64) {
        let (mut raddr, mut rkey) = (piece.va, piece.key);
        let met = match flaw {
            Some(Flaw::BadRkey) => {
                rkey = self.unknown_key(node);
                Met::BadRkey
            }
            Some(Flaw::WrongPd) => {
                let foreign = self.domains[domain].foreign;
                (raddr, rkey) = (foreign.va, foreign.key);
                Met::WrongPd
            }
            Some(Flaw::Bounds) => {
                raddr = match self.random.percent(50) {
                    true => self.nodes[node].memory.end_of(piece).wrapping_sub(u64::from(draft.len) - 1),
                    false => self.nodes[node].memory.begin_of(piece).wrapping_sub(1),
                };
                Met::Bounds
            }
            Some(Flaw::NoRight) => {
                (raddr, rkey) = (no_right.va, no_right.key);
                Met::NoRight
            }
            _ => return (raddr, rkey, piece.at),
        };
        self.cover.add(met);
        draft.fate = Fate::Remote(WcStatus::RemAccessErr);
        (raddr, rkey, piece.at)
    }

    fn read(&mut self, qp: usize, len: u32, is_bad: bool) -> Draft {
        let (peer, node) = self.peer_end(qp);
        let memory = &self.programs[peer].memory;
        let (domain, fragile, fragile_pattern) = (memory.domain, memory.fragile_out_piece, memory.fragile_pattern);
        let targets = self.nodes[node].memory.piece_of(memory.targets);
        let results = self.programs[qp].memory.results;
        let library = self.domains[domain].library;
        let offset = self.random.below(u64::from(library.len - len) + 1) as u32;
        let mut draft = Draft::new(SendOp::Send, len, self.domains[domain].library_pattern.skip(offset), Met::RcRead);
        let flaw = (is_bad && len > 0).then(|| self.flaw());
        let denied = self.plan.conns[self.qps[qp].conn].denied.contains(Access::REMOTE_READ);
        let (raddr, rkey, _) = if flaw.is_none() && !denied && len <= fragile.len && self.random.percent(5) {
            draft.fate = Fate::Fragile;
            draft.pattern = fragile_pattern;
            (fragile.va, fragile.key, fragile.at)
        } else {
            let piece =
                Piece { at: library.at + u64::from(offset), va: library.va + u64::from(offset), len, ..library };
            self.aim(domain, node, piece, targets, flaw, &mut draft)
        };
        draft.op = SendOp::Read { raddr, rkey };
        if flaw == Some(Flaw::Bounds) {
            // A long READ is sent in parts: those that lie inside are answered.
            let offset = raddr.wrapping_sub(library.va);
            draft.pattern = self.domains[domain].library_pattern.skip(offset as u32);
        }
        if denied {
            self.cover.add(Met::NoQpRight);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        self.local(qp, results, len, &mut draft);
        if flaw == Some(Flaw::BadLkey) && !denied {
            self.spoil_lkey(qp, &mut draft);
        }
        draft
    }

    fn atomic(&mut self, qp: usize, swap: bool, is_bad: bool) -> Draft {
        let (peer, node) = self.peer_end(qp);
        let memory = &self.programs[peer].memory;
        let domain = memory.domain;
        let targets = self.nodes[node].memory.piece_of(memory.targets);
        let results = self.programs[qp].memory.results;
        let words = self.domains[domain].words;
        let offset = 8 * self.random.below(u64::from(words.len / 8));
        let piece = Piece { at: words.at + offset, va: words.va + offset, len: 8, ..words };
        let met = if swap { Met::CompareSwap } else { Met::FetchAdd };
        let pattern = Pattern::random(&mut self.random);
        let mut draft = Draft::new(SendOp::Send, 8, pattern, met);
        let flaw = is_bad.then(|| match self.random.below(4) {
            0 => Flaw::Length,
            _ => self.flaw(),
        });
        // Out of bounds by a whole word: misaligned is another fault.
        let misaligned = flaw == Some(Flaw::Bounds);
        let (mut raddr, rkey, at) = self.aim(domain, node, piece, targets, flaw.filter(|_| !misaligned), &mut draft);
        if misaligned {
            self.cover.add(Met::Misaligned);
            raddr += self.random.between(1, 7);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        if self.plan.conns[self.qps[qp].conn].denied.contains(Access::REMOTE_ATOMIC) {
            self.cover.add(Met::NoQpRight);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        draft.op = if swap {
            // Half of them guess right, if nobody is faster.
            let compare = if self.random.percent(50) { self.nodes[node].memory.word(at) } else { self.random.next() };
            SendOp::CompareSwap { raddr, rkey, compare, swap: self.random.next() }
        } else {
            SendOp::FetchAdd { raddr, rkey, add: self.random.next() }
        };
        draft.target = at;
        if flaw == Some(Flaw::Length) {
            self.cover.add(Met::BadLength);
            draft.len = self.random.pick(&[0, 4, 7, 9, 16]);
            draft.fate = Fate::Local(WcStatus::LocLenErr);
        }
        let len = draft.len;
        self.local(qp, results, len, &mut draft);
        if flaw == Some(Flaw::BadLkey) && draft.fate == Fate::Good {
            self.spoil_lkey(qp, &mut draft);
        }
        draft
    }

    fn write_cell(&mut self, qp: usize) -> Draft {
        let (peer, _) = self.peer_end(qp);
        let denied = self.plan.conns[self.qps[qp].conn].denied.contains(Access::REMOTE_WRITE);
        let pattern = Pattern::random(&mut self.random);
        let index = self.random.below(self.programs[peer].memory.cells.len() as u64) as usize;
        let released = self.oracle.books[qp].stream.released;
        let cell = &mut self.programs[peer].memory.cells[index];
        cell.pattern = pattern;
        let Piece { at, va, key, len } = cell.piece;
        let mut draft = Draft::new(SendOp::Write { raddr: va, rkey: key }, len, pattern, Met::RcWrite);
        // A READ that is not complete may be answered from later bytes.
        draft.fence = cell.read_by.is_some_and(|place| place >= released);
        draft.target = at;
        let sources = self.programs[qp].memory.sources;
        let node = self.qps[qp].node;
        self.local(qp, sources, len, &mut draft);
        let mut offset = 0;
        for &(at, len) in &draft.local {
            pattern.skip(offset).fill(self.nodes[node].memory.write(at, len));
            offset += len;
        }
        if denied {
            self.cover.add(Met::NoQpRight);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        draft
    }

    fn read_cell(&mut self, qp: usize) -> Draft {
        let (peer, _) = self.peer_end(qp);
        let denied = self.plan.conns[self.qps[qp].conn].denied.contains(Access::REMOTE_READ);
        let index = self.random.below(self.programs[peer].memory.cells.len() as u64) as usize;
        let place = self.oracle.books[qp].stream.requests.len();
        let cell = &mut self.programs[peer].memory.cells[index];
        cell.read_by = Some(place);
        let Piece { va, key, len, .. } = cell.piece;
        let mut draft = Draft::new(SendOp::Read { raddr: va, rkey: key }, len, cell.pattern, Met::RcRead);
        let results = self.programs[qp].memory.results;
        self.local(qp, results, len, &mut draft);
        if denied {
            self.cover.add(Met::NoQpRight);
            draft.fate = Fate::Remote(WcStatus::RemInvReqErr);
        }
        draft
    }

    /// For measuring: always the same.
    fn fixed_write(&mut self, qp: usize, len: u32) -> Draft {
        let (peer, node) = self.peer_end(qp);
        let target = self.nodes[node].memory.piece_of(self.programs[peer].memory.targets);
        let source = self.nodes[self.qps[qp].node].memory.piece_of(self.programs[qp].memory.sources);
        let op = SendOp::Write { raddr: target.va, rkey: target.key };
        let mut draft = Draft::new(op, len, self.fixed_pattern, Met::RcWrite);
        draft.target = target.at;
        draft.sges.push(source.sge(0, len));
        draft.local.push((source.at, len));
        draft
    }

    fn ud_destination(&mut self, qp: usize) -> (Option<UdDest>, Option<usize>) {
        let book = &self.oracle.books[qp];
        let to = if book.exposed {
            book.peer
        } else {
            let all: Vec<usize> = (0..self.oracle.books.len())
                .filter(|&other| {
                    let other = &self.oracle.books[other];
                    other.qp_type == QpType::Ud && !other.exposed
                })
                .collect();
            self.random.pick(&all)
        };
        let own_key = self.random.percent(20);
        let qkey = if own_key { 1 << 31 } else { self.qkey(to) };
        let path = Arc::clone(&self.paths[self.qps[qp].node][self.qps[to].node]);
        (Some(UdDest { path, qpn: self.oracle.books[to].qpn, qkey }), Some(to))
    }
}
