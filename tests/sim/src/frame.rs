//! From trains to frames with their ICRC, and back: the bytes that the simulated network carries and damages.

use ferroce_transport::MemoryError;
use ferroce_transport::{PathAddr, Payload, Span, Train};
use ferroce_wire::icrc::{self, Pseudo};
use ferroce_wire::{BTH_LEN, Headers, ICRC_LEN, NetHeader};

use crate::memory::NodeMemory;

/// What was done to a frame on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    None,
    /// Bits flipped or bytes cut off under the ICRC: it must show.
    Below,
    /// Bits flipped where the ICRC does not look (byte 4 of the BTH).
    Masked,
    /// Made up, with a good ICRC.
    Forged,
}

/// One frame in the buffer of its [`Datagram`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) start: u32,
    pub(crate) len: u32,
    /// IPv4 Identification.
    pub(crate) id: u16,
    pub(crate) damage: Damage,
}

/// Frames that arrive together: what GRO makes of a train, or a single frame.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) net: NetHeader,
    pub(crate) data: Vec<u8>,
    pub(crate) frames: Vec<Frame>,
}

impl Datagram {
    pub(crate) fn bytes(&self, frame: &Frame) -> &[u8] {
        &self.data[frame.start as usize..(frame.start + frame.len) as usize]
    }

    pub(crate) fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        let Frame { start, len, .. } = self.frames[frame];
        &mut self.data[start as usize..(start + len) as usize]
    }

    /// One of its frames as a datagram of its own.
    pub(crate) fn single(&self, frame: &Frame) -> Datagram {
        Datagram { net: self.net, data: self.bytes(frame).to_vec(), frames: vec![Frame { start: 0, ..*frame }] }
    }

    /// Bytes of all frames.
    pub(crate) fn len(&self) -> u32 {
        self.frames.iter().map(|frame| frame.len).sum()
    }
}

/// Cuts a train into frames, as a link does. Checks what the transport promises of trains.
pub(crate) fn build(
    train: &Train,
    path: &PathAddr,
    src_port: u16,
    memory: &NodeMemory,
) -> Result<Datagram, MemoryError> {
    check_train(train);
    let net = NetHeader {
        src: path.src.to_canonical(),
        dst: path.dst.to_canonical(),
        src_port,
        tclass: path.tclass,
        hop_limit: path.hop_limit,
        udp_len: 0,
        ifindex: 0,
    };
    let sum = Pseudo::new(net.src, net.dst, net.src_port);
    let overhead = BTH_LEN + 28 + 3 + ICRC_LEN;
    let mut data = Vec::with_capacity(train.len as usize + train.packets as usize * overhead);
    let mut frames = Vec::with_capacity(train.packets as usize);
    let mut source = Source::new(train);
    for index in 0..train.packets {
        let headers = headers(train, index);
        assert!(headers.matches_opcode(), "{headers:?}");
        let payload = if index + 1 == train.packets { train.len - index * train.mtu } else { train.mtu };
        assert_eq!((payload + u32::from(headers.bth.pad)) % 4, 0, "pad of {headers:?}");
        let start = data.len();
        data.resize(start + headers.len(), 0);
        headers.emit(&mut data[start..]);
        source.take(payload, memory, &mut data)?;
        data.resize(data.len() + usize::from(headers.bth.pad), 0);
        let len = data.len() - start + ICRC_LEN;
        let state = icrc::body(sum.state(len as u16, index as u16), &data[start..]);
        data.extend_from_slice(&icrc::finish(state));
        frames.push(Frame { start: start as u32, len: len as u32, id: index as u16, damage: Damage::None });
    }
    assert!(source.is_empty(), "the payload is as long as the train says: {train:?}");
    Ok(Datagram { net, data, frames })
}

fn check_train(train: &Train) {
    assert!(train.is_within_limits(), "{train:?}");
    assert_eq!(train.tail.is_some(), train.packets > 1, "{train:?}");
    assert!(train.packets == 1 || train.len > (train.packets - 1) * train.mtu, "{train:?}");
    assert!(train.packets > 1 || train.len <= train.mtu, "{train:?}");
}

fn headers(train: &Train, index: u32) -> Headers {
    let headers = match &train.tail {
        Some(tail) if index + 1 == train.packets => *tail,
        _ if index == 0 => train.head,
        _ => {
            let mut headers = train.middle();
            headers.bth.psn = headers.bth.psn.add(index);
            headers
        }
    };
    assert_eq!(headers.bth.psn, train.head.bth.psn.add(index), "PSNs of a train count up");
    headers
}

/// Gives a train's payload piece by piece.
struct Source<'a> {
    train: &'a Train,
    /// Piece of a gather list, and bytes of the present piece (or of all) that were given.
    piece: usize,
    given: u32,
}

impl<'a> Source<'a> {
    fn new(train: &'a Train) -> Source<'a> {
        Source { train, piece: 0, given: 0 }
    }

    fn take(&mut self, mut len: u32, memory: &NodeMemory, into: &mut Vec<u8>) -> Result<(), MemoryError> {
        match &self.train.payload {
            Payload::Inline(bytes, offset) => {
                let start = (offset + self.given) as usize;
                into.extend_from_slice(&bytes[start..start + len as usize]);
                self.given += len;
            }
            Payload::Copy(span) | Payload::Lent(span) => {
                assert!(self.given + len <= span.len, "{:?}", self.train);
                let addr = span.addr + u64::from(self.given);
                into.extend_from_slice(memory.load(Span { addr, len })?);
                self.given += len;
            }
            Payload::Gather(spans) => {
                while len > 0 {
                    let span = spans[self.piece];
                    let now = len.min(span.len - self.given);
                    let addr = span.addr + u64::from(self.given);
                    into.extend_from_slice(memory.load(Span { addr, len: now })?);
                    len -= now;
                    self.given += now;
                    if self.given == span.len {
                        self.piece += 1;
                        self.given = 0;
                    }
                }
            }
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        match &self.train.payload {
            Payload::Inline(..) => self.given == self.train.len,
            Payload::Copy(span) | Payload::Lent(span) => self.given == span.len,
            Payload::Gather(spans) => self.given == 0 && spans[self.piece..].iter().all(|span| span.len == 0),
        }
    }
}

/// Why a frame did not get to a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Icrc,
    Parse,
}

/// Takes a frame apart: headers and where its payload is. `udp_len` of the net header is the frame's length.
pub(crate) fn parse(net: &NetHeader, frame: &[u8], id: u16) -> Result<(Headers, std::ops::Range<usize>), Refused> {
    let Some((packet, trailer)) = frame.split_last_chunk::<ICRC_LEN>() else { return Err(Refused::Parse) };
    if icrc::finish(icrc::icrc_over(net, id, packet)) != *trailer {
        return Err(Refused::Icrc);
    }
    Headers::parse(packet).map_err(|_| Refused::Parse)
}

/// Makes a frame's ICRC right again, for whatever its bytes are now.
pub(crate) fn seal(net: &NetHeader, id: u16, frame: &mut [u8]) {
    let len = frame.len();
    let net = NetHeader { udp_len: len as u16, ..*net };
    let (packet, trailer) = frame.split_at_mut(len - ICRC_LEN);
    trailer.copy_from_slice(&icrc::finish(icrc::icrc_over(&net, id, packet)));
}
