//! Packets of an attacker who has seen everything: numbers, keys, sequence numbers. Most are nearly right.

use std::net::IpAddr;

use ferroce_transport::QpType;
use ferroce_transport::testing::SRQN;
use ferroce_wire::icrc::{self, Pseudo};
use ferroce_wire::{
    Aeth, AtomicEth, BTH_LEN, Bth, Class, Deth, Ext, Feth, Headers, ICRC_LEN, Opcode, Operation, Position, Psn, Reth,
    Syndrome,
};

use crate::source::Source;

/// Longest payload that is forged: the largest path MTU and a little more.
const PAYLOAD_MAX: usize = 4096 + 8;
/// Requests that an attacker remembers to have seen.
const ASKED_MAX: usize = 8;

/// Memory that some key names.
#[derive(Clone, Copy, Debug)]
pub struct Zone {
    /// Its first address in the key's terms.
    pub va: u64,
    /// Bytes.
    pub len: u32,
    /// The key.
    pub key: u32,
}

/// A READ or atomic that the victim sent.
#[derive(Clone, Copy, Debug)]
struct Asked {
    psn: Psn,
    len: u32,
    atomic: bool,
}

/// What the attacker knows of the queue pair that it aims at.
#[derive(Clone, Debug)]
pub struct Aim {
    /// Service type.
    pub qp_type: QpType,
    /// Number.
    pub qpn: u32,
    /// Number of its peer.
    pub peer: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Q_Key.
    pub qkey: u32,
    /// The PSN that its responder expects next.
    pub expected: Psn,
    /// The PSN that its requester sends next.
    pub next: Psn,
    /// READs and atomics that it sent last.
    asked: Vec<Asked>,
    /// PSNs of any requests that it sent last.
    sent: Vec<Psn>,
}

impl Aim {
    /// A queue pair of which nothing was seen yet.
    pub fn new(qp_type: QpType, qpn: u32, peer: u32, mtu: u32, qkey: u32) -> Aim {
        let zero = Psn::new(0);
        Aim { qp_type, qpn, peer, mtu, qkey, expected: zero, next: zero, asked: Vec::new(), sent: Vec::new() }
    }

    /// The victim sent this.
    pub fn saw(&mut self, headers: &Headers) {
        if headers.bth.opcode.is_response() {
            return;
        }
        let psn = headers.bth.psn;
        remember(&mut self.sent, psn);
        let atomic = headers.atomic.is_some();
        if matches!(headers.bth.opcode, Opcode::RC_READ_REQUEST | Opcode::XRC_READ_REQUEST) || atomic {
            let len = headers.reth.map_or(8, |reth| reth.len);
            remember(&mut self.asked, Asked { psn, len, atomic });
        }
    }

    /// The queue pair was connected anew.
    pub fn forget(&mut self) {
        self.asked.clear();
        self.sent.clear();
    }
}

fn remember<T>(list: &mut Vec<T>, item: T) {
    if list.len() == ASKED_MAX {
        list.remove(0);
    }
    list.push(item);
}

/// Packets in one piece of memory, each from the BTH to the ICRC.
#[derive(Clone, Debug, Default)]
pub struct Packets {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Packets {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    /// Number of packets.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.bytes[start..*end])
    }
}

/// A packet before it is made to bytes.
type Draft = (Headers, usize);

/// Makes packets.
#[derive(Debug)]
pub struct Forge {
    path: Pseudo,
    /// Packets without ICRC that were recorded elsewhere.
    recorded: Vec<Vec<u8>>,
    drafts: Vec<Draft>,
}

impl Forge {
    /// For packets from `src` and `src_port` to `dst`.
    pub fn new(src: IpAddr, dst: IpAddr, src_port: u16) -> Forge {
        Forge { path: Pseudo::new(src, dst, src_port), recorded: Vec::new(), drafts: Vec::new() }
    }

    /// Takes recorded packets (from the BTH to the pad) as raw material too.
    pub fn with_recorded(self, recorded: Vec<Vec<u8>>) -> Forge {
        Forge { recorded, ..self }
    }

    /// Adds packets for one queue pair to `out`: one, or a few that belong together.
    pub fn burst(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone], out: &mut Packets) {
        self.drafts.clear();
        match source.below(16) {
            0..=3 => self.single(source, aim, zones),
            4..=5 => {
                self.single(source, aim, zones);
                self.spoil_one(source, aim, zones);
            }
            6..=8 => self.message(source, aim, zones),
            9..=11 => self.answer(source, aim),
            12 => self.duplicate(source, aim, zones),
            13 => self.rush(source, aim, zones),
            14 => return self.record(source, aim, zones, out),
            _ => return self.noise(source, aim, out),
        }
        let drafts = std::mem::take(&mut self.drafts);
        for (headers, len) in &drafts {
            self.emit(source, headers, *len, out);
        }
        self.drafts = drafts;
    }

    /// One request of one packet.
    fn single(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        let draft = request(source, aim, zones, aim.expected);
        self.drafts.push(draft);
    }

    /// A message of several packets, in which an accident may happen.
    fn message(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        let class = match aim.qp_type {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => Opcode::RC_SEND_FIRST.0,
            QpType::Uc => Opcode::UC_SEND_FIRST.0,
            QpType::Ud | QpType::RawPacket => return self.single(source, aim, zones),
        };
        let count = 2 + source.below((8192 / aim.mtu).clamp(1, 4));
        let last = 1 + source.below(aim.mtu);
        let total = (count - 1) * aim.mtu + last;
        let (first, middle, ends): (u8, u8, &[u8]) =
            if source.one_in(2) { (0x00, 0x01, &[0x02, 0x03, 0x16]) } else { (0x06, 0x07, &[0x08, 0x09]) };
        for index in 0..count {
            let (operation, len) = match index {
                0 => (first, aim.mtu),
                _ if index + 1 == count => (source.pick(ends), last),
                _ => (middle, aim.mtu),
            };
            let psn = aim.expected.add(index);
            let mut headers = dress(source, Opcode(class | operation), aim, zones, psn, total);
            headers.bth.pad = pad(len as usize);
            self.drafts.push((headers, len as usize));
        }
        if source.one_in(2) {
            self.accident(source, aim, zones);
        }
    }

    /// Answers to what the queue pair sent, in which an accident may happen.
    fn answer(&mut self, source: &mut impl Source, aim: &Aim) {
        let near = aim.next.sub(source.below(12)).add(source.below(3));
        let place = if aim.sent.is_empty() || source.one_in(4) { near } else { source.pick(&aim.sent) };
        match source.below(8) {
            0..=2 => self.acknowledge(source, aim, place),
            3..=5 if !aim.asked.is_empty() => {
                let asked = aim.asked[source.below(aim.asked.len() as u32) as usize];
                self.response(source, aim, asked);
            }
            6 => {
                let made_up = Asked { psn: place, len: source.below(9000), atomic: source.one_in(4) };
                self.response(source, aim, made_up);
            }
            _ => {
                let opcode = source.pick(&[
                    Opcode::RC_READ_RESPONSE_FIRST,
                    Opcode::RC_READ_RESPONSE_MIDDLE,
                    Opcode::RC_READ_RESPONSE_LAST,
                    Opcode::RC_READ_RESPONSE_ONLY,
                    Opcode::RC_ATOMIC_ACKNOWLEDGE,
                    Opcode::CNP,
                ]);
                let len = length(source, aim.mtu);
                let mut headers = dress(source, opcode, aim, &[], place, len as u32);
                headers.bth.pad = pad(len);
                self.drafts.push((headers, len));
            }
        }
        if source.one_in(3) {
            self.accident(source, aim, &[]);
        }
    }

    fn acknowledge(&mut self, source: &mut impl Source, aim: &Aim, psn: Psn) {
        let mut headers = dress(source, Opcode::RC_ACKNOWLEDGE, aim, &[], psn, 0);
        let syndrome = match source.below(16) {
            0..=8 => Syndrome::ACK,
            9 => Syndrome::rnr(source.below(32) as u8),
            10..=11 => Syndrome::NAK_SEQUENCE,
            12 => Syndrome::NAK_INVALID_REQUEST,
            13 => Syndrome::NAK_REMOTE_ACCESS,
            14 => Syndrome::NAK_REMOTE_OPERATIONAL,
            _ => Syndrome(source.below(256) as u8),
        };
        headers.aeth = Some(Aeth { syndrome, msn: source.below(1 << 24) });
        self.drafts.push((headers, 0));
    }

    fn response(&mut self, source: &mut impl Source, aim: &Aim, asked: Asked) {
        if asked.atomic {
            let headers = dress(source, Opcode::RC_ATOMIC_ACKNOWLEDGE, aim, &[], asked.psn, 8);
            return self.drafts.push((headers, 0));
        }
        let count = asked.len.div_ceil(aim.mtu).clamp(1, 16);
        for index in 0..count {
            let opcode = match (index == 0, index + 1 == count) {
                (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
                (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
                (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
                (false, true) => Opcode::RC_READ_RESPONSE_LAST,
            };
            let len = (asked.len - index * aim.mtu).min(aim.mtu) as usize;
            let mut headers = dress(source, opcode, aim, &[], asked.psn.add(index), 0);
            headers.bth.pad = pad(len);
            self.drafts.push((headers, len));
        }
    }

    /// A request that the responder has behind it.
    fn duplicate(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        let far = source.one_in(4);
        let back = 1 + source.below(if far { 1 << 23 } else { 24 });
        let draft = request(source, aim, zones, aim.expected.sub(back));
        self.drafts.push(draft);
    }

    /// Many READs or atomics at once, of one size, so that they arrive in one batch.
    fn rush(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        if !aim.qp_type.is_reliable() {
            return self.single(source, aim, zones);
        }
        let opcode = source.pick(&[
            Opcode::RC_FETCH_ADD,
            Opcode::RC_COMPARE_SWAP,
            Opcode::RC_READ_REQUEST,
            Opcode::RC_SEND_ONLY,
        ]);
        let headers = dress(source, opcode, aim, zones, aim.expected, 8);
        for index in 0..8 + source.below(40) {
            let mut next = headers;
            next.bth.psn = headers.bth.psn.add(index);
            self.drafts.push((next, 0));
        }
    }

    /// Something happens to the packets on their way, or another comes between them.
    fn accident(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        let count = self.drafts.len() as u32;
        let at = source.below(count) as usize;
        match source.below(6) {
            0 => drop(self.drafts.remove(at)),
            1 => self.drafts.insert(at, self.drafts[at]),
            2 => self.drafts.swap(at, source.below(count) as usize),
            3 => {
                let psn = self.drafts[at].0.bth.psn;
                let other = request(source, aim, zones, psn);
                self.drafts.insert(at, other);
            }
            _ => self.spoil_one(source, aim, zones),
        }
    }

    fn spoil_one(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone]) {
        let at = source.below(self.drafts.len() as u32) as usize;
        let (headers, len) = &mut self.drafts[at];
        spoil(source, headers, len, aim, zones);
    }

    /// A recorded packet, turned to this queue pair.
    fn record(&mut self, source: &mut impl Source, aim: &Aim, zones: &[Zone], out: &mut Packets) {
        if self.recorded.is_empty() {
            return self.noise(source, aim, out);
        }
        let start = out.bytes.len();
        let which = source.below(self.recorded.len() as u32) as usize;
        out.bytes.extend_from_slice(&self.recorded[which]);
        let packet = &mut out.bytes[start..];
        if packet.len() >= BTH_LEN {
            packet[5..8].copy_from_slice(&aim.qpn.to_be_bytes()[1..]);
            if source.one_in(2) {
                let psn = aim.expected.add(source.below(4)).sub(source.below(3));
                packet[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
            }
            // Where an RETH or AtomicETH would be.
            if packet.len() >= BTH_LEN + 16 && !zones.is_empty() && source.one_in(2) {
                let zone = source.pick(zones);
                packet[12..20].copy_from_slice(&zone.va.to_be_bytes());
                packet[20..24].copy_from_slice(&zone.key.to_be_bytes());
            }
        }
        self.finish(source, start, out);
    }

    /// Bytes that are hardly a packet, for this queue pair.
    fn noise(&mut self, source: &mut impl Source, aim: &Aim, out: &mut Packets) {
        let start = out.bytes.len();
        let long = source.one_in(4);
        let len = source.below(if long { 1500 } else { 80 }) as usize;
        out.bytes.resize(start + len, 0);
        let packet = &mut out.bytes[start..];
        source.fill(packet);
        if len >= BTH_LEN {
            packet[0] = source.below(256) as u8;
            packet[1] &= 0xf0;
            packet[2..4].fill(0xff);
            packet[5..8].copy_from_slice(&aim.qpn.to_be_bytes()[1..]);
        }
        self.finish(source, start, out);
    }

    fn emit(&mut self, source: &mut impl Source, headers: &Headers, len: usize, out: &mut Packets) {
        let start = out.bytes.len();
        let header_len = headers.len();
        out.bytes.resize(start + header_len + len + usize::from(headers.bth.pad), 0);
        headers.emit(&mut out.bytes[start..]);
        source.fill(&mut out.bytes[start + header_len..]);
        self.finish(source, start, out);
    }

    /// What the wire may do to the bytes, and the ICRC: most often right, whatever the bytes are.
    fn finish(&mut self, source: &mut impl Source, start: usize, out: &mut Packets) {
        let mut right = true;
        match source.below(40) {
            39 => {
                for _ in 0..1 + source.below(4) {
                    let len = out.bytes.len() - start;
                    if len > 0 {
                        let bit = source.below(8 * len as u32) as usize;
                        out.bytes[start + bit / 8] ^= 1 << (bit % 8);
                    }
                }
            }
            38 => {
                let len = out.bytes.len() - start;
                out.bytes.truncate(start + source.below(len as u32 + 1) as usize);
            }
            37 => {
                let more = source.below(9) as usize;
                out.bytes.resize(out.bytes.len() + more, 0);
            }
            36 => right = false,
            _ => {}
        }
        let packet = &out.bytes[start..];
        let sum = icrc::body(self.path.state((packet.len() + ICRC_LEN) as u16, 0), packet);
        let trailer = icrc::finish(if right { sum } else { sum ^ source.u32() });
        out.bytes.extend_from_slice(&trailer);
        out.ends.push(out.bytes.len());
    }
}

/// The pad that a payload needs.
fn pad(len: usize) -> u8 {
    (len.next_multiple_of(4) - len) as u8
}

/// A payload length that is often a boundary.
fn length(source: &mut impl Source, mtu: u32) -> usize {
    (match source.below(6) {
        0 => 0,
        1 => mtu,
        2 => mtu + 1,
        3 => source.below(16),
        _ => source.below(mtu + 1),
    }) as usize
}

/// A proper request of one packet.
fn request(source: &mut impl Source, aim: &Aim, zones: &[Zone], psn: Psn) -> Draft {
    let opcode = match aim.qp_type {
        QpType::Rc | QpType::XrcSend | QpType::XrcRecv => source.pick(&[
            Opcode::RC_SEND_ONLY,
            Opcode::RC_SEND_ONLY_IMM,
            Opcode::RC_SEND_ONLY_INV,
            Opcode::RC_WRITE_ONLY,
            Opcode::RC_WRITE_ONLY_IMM,
            Opcode::RC_READ_REQUEST,
            Opcode::RC_COMPARE_SWAP,
            Opcode::RC_FETCH_ADD,
            Opcode::RC_ATOMIC_WRITE,
            Opcode::RC_FLUSH,
        ]),
        QpType::Uc => source.pick(&[
            Opcode::UC_SEND_ONLY,
            Opcode::UC_SEND_ONLY_IMM,
            Opcode::UC_WRITE_ONLY,
            Opcode::UC_WRITE_ONLY_IMM,
        ]),
        QpType::Ud | QpType::RawPacket => source.pick(&[Opcode::UD_SEND_ONLY, Opcode::UD_SEND_ONLY_IMM]),
    };
    let carries = opcode.layout().is_some_and(|layout| layout.payload);
    let len = match source.below(8) {
        0 => 0,
        1 => aim.mtu,
        _ => source.below(160.min(aim.mtu)),
    };
    let mut headers = dress(source, opcode, aim, zones, psn, len);
    let len = if carries { len as usize } else { 0 };
    headers.bth.pad = pad(len);
    (headers, len)
}

/// The headers that an opcode asks for, with proper content. For XRC an opcode of RC stands for that of its own class.
fn dress(source: &mut impl Source, opcode: Opcode, aim: &Aim, zones: &[Zone], psn: Psn, message: u32) -> Headers {
    let opcode = match opcode.class() {
        Class::Rc if aim.qp_type.is_xrc() => Opcode(Opcode::XRC_SEND_FIRST.0 | opcode.0),
        _ => opcode,
    };
    let layout = opcode.layout();
    let ext = layout.map_or(Ext::empty(), |layout| layout.ext);
    let mut headers = Headers::new(Bth::new(opcode, aim.qpn, psn));
    let is = |operation| layout.is_some_and(|layout| layout.operation == operation);
    headers.bth.ack_req = is(Operation::ReadRequest)
        || layout.is_some_and(|layout| layout.position == Position::Last || layout.position == Position::Only)
            && source.one_in(2);
    if ext.contains(Ext::XRCETH) {
        headers.xrc_srqn = Some(if source.one_in(16) { source.below(1 << 24) } else { SRQN });
    }
    if ext.contains(Ext::DETH) {
        headers.deth = Some(Deth { qkey: aim.qkey, src_qp: aim.peer });
    }
    if ext.contains(Ext::FETH) {
        headers.feth = Some(Feth(source.u32()));
    }
    if ext.contains(Ext::RETH) {
        let (va, rkey) = range(source, zones, message, 1);
        headers.reth = Some(Reth { va, rkey, len: message });
    }
    if ext.contains(Ext::ATOMIC_ETH) {
        let (va, rkey) = range(source, zones, 8, 8);
        headers.atomic = Some(AtomicEth { va, rkey, swap_add: source.u64(), compare: u64::from(source.below(3)) });
    }
    if ext.contains(Ext::AETH) {
        headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: source.below(256) });
    }
    if ext.contains(Ext::ATOMIC_ACK_ETH) {
        headers.atomic_ack = Some(source.u64());
    }
    if ext.contains(Ext::IMM_DT) {
        headers.imm = Some(source.u32());
    }
    if ext.contains(Ext::IETH) {
        headers.ieth = Some(key(source, zones));
    }
    headers
}

fn key(source: &mut impl Source, zones: &[Zone]) -> u32 {
    if zones.is_empty() { source.u32() } else { source.pick(zones).key }
}

/// A range of `len` bytes of a zone, and its key. If the zone is too short, it begins at its start.
fn range(source: &mut impl Source, zones: &[Zone], len: u32, align: u64) -> (u64, u32) {
    if zones.is_empty() {
        return (source.u64(), source.u32());
    }
    let zone = source.pick(zones);
    let room = zone.len.saturating_sub(len);
    let offset = match source.below(4) {
        0 => 0,
        1 => room,
        _ => source.below(room + 1),
    };
    (zone.va + u64::from(offset) / align * align, zone.key)
}

/// One thing of a packet is made wrong.
fn spoil(source: &mut impl Source, headers: &mut Headers, len: &mut usize, aim: &Aim, zones: &[Zone]) {
    match source.below(14) {
        0 => {
            headers.bth.psn = match source.below(4) {
                0 => headers.bth.psn.add(1 + source.below(4)),
                1 => headers.bth.psn.sub(1 + source.below(4)),
                2 => headers.bth.psn.add(1 << 23),
                _ => Psn::new(source.u32()),
            }
        }
        1 | 2 => {
            let bit = 1 << source.below(32);
            let other = if zones.is_empty() { None } else { Some(source.pick(zones).key) };
            let odd = |source: &mut dyn FnMut(u32) -> u32, key: u32| match source(6) {
                0 => key.wrapping_add(1),
                1 => key.wrapping_sub(1),
                2 => key ^ bit,
                3 => 0,
                _ => other.unwrap_or(!key),
            };
            let mut below = |n| source.below(n);
            if let Some(reth) = &mut headers.reth {
                reth.rkey = odd(&mut below, reth.rkey);
            }
            if let Some(atomic) = &mut headers.atomic {
                atomic.rkey = odd(&mut below, atomic.rkey);
            }
            if let Some(ieth) = &mut headers.ieth {
                *ieth = odd(&mut below, *ieth);
            }
        }
        3 | 4 => {
            if let Some(reth) = &mut headers.reth {
                reth.va = bad_address(source, reth.va, u64::from(reth.len), zones);
            }
            if let Some(atomic) = &mut headers.atomic {
                atomic.va = bad_address(source, atomic.va, 8, zones);
            }
        }
        5 => {
            if let Some(reth) = &mut headers.reth {
                reth.len = match source.below(8) {
                    0 => reth.len.wrapping_add(1),
                    1 => reth.len.wrapping_sub(1),
                    2 => 0,
                    3 => 1 << 31,
                    4 => (1 << 31) + 1,
                    5 => u32::MAX,
                    6 => source.below(20_000),
                    _ => source.u32(),
                };
            }
        }
        6 => {
            *len = match source.below(4) {
                0 => *len + 1,
                1 => len.saturating_sub(1),
                _ => length(source, aim.mtu),
            }
            .min(PAYLOAD_MAX);
            headers.bth.pad = pad(*len);
        }
        7 => headers.bth.pad = source.below(4) as u8,
        8 => {
            // The extended headers stay those of the true opcode: they contradict.
            let code = headers.bth.opcode.0;
            headers.bth.opcode = Opcode(match source.below(4) {
                0 => code ^ 1 << source.below(8),
                1 => code & 0x1f | (source.below(8) as u8) << 5,
                2 => code & 0xe0 | source.below(32) as u8,
                _ => source.below(256) as u8,
            });
        }
        9 => {
            // Another opcode with its own extended headers.
            let opcode = Opcode(headers.bth.opcode.0 & 0xe0 | source.below(32) as u8);
            *headers = dress(source, opcode, aim, zones, headers.bth.psn, *len as u32);
            headers.bth.pad = pad(*len);
        }
        10 => match source.below(4) {
            0 => headers.bth.pkey = source.pick(&[0x7fff, 0, 0x8001, 0xfffe]),
            1 => headers.bth.tver = 1 + source.below(15) as u8,
            2 => headers.bth.resv6 = source.below(64) as u8,
            _ => headers.bth.resv7 = source.below(128) as u8,
        },
        11 => {
            headers.bth.solicited ^= source.one_in(2);
            headers.bth.mig_req ^= source.one_in(2);
            headers.bth.ack_req ^= source.one_in(2);
            headers.bth.fecn ^= source.one_in(2);
            headers.bth.becn ^= source.one_in(2);
        }
        12 => {
            headers.bth.dest_qp = match source.below(6) {
                0 => aim.peer,
                1 => aim.qpn ^ 1,
                2 => aim.qpn ^ 1 << source.below(24),
                3 => source.below(2),
                4 => 0xff_ffff,
                _ => source.below(1 << 24),
            }
        }
        _ => {
            if let Some(deth) = &mut headers.deth {
                deth.qkey ^= 1 << source.below(32);
            }
            if let Some(aeth) = &mut headers.aeth {
                aeth.syndrome = Syndrome(source.below(256) as u8);
            }
        }
    }
}

fn bad_address(source: &mut impl Source, va: u64, len: u64, zones: &[Zone]) -> u64 {
    let zone = if zones.is_empty() { Zone { va, len: 1, key: 0 } } else { source.pick(zones) };
    let end = zone.va.wrapping_add(u64::from(zone.len));
    match source.below(9) {
        0 => zone.va.wrapping_sub(1),
        1 => zone.va.wrapping_sub(8),
        2 => end.wrapping_sub(len).wrapping_add(1),
        3 => end.wrapping_sub(len).wrapping_add(8),
        4 => end,
        5 => u64::MAX - u64::from(source.below(16)),
        6 => va ^ 1 << source.below(64),
        7 => 0,
        _ => va.wrapping_add(1),
    }
}
