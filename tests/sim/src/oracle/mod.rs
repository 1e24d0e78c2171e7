//! What must be true: the book that is kept of every queue pair, and the checks of all that its machine does.

mod receive;
mod stream;

use std::collections::{BTreeMap, VecDeque};

use ferroce_transport::{AtomicOp, Nanos, QpEvent, QpType, RecvWr, SendOp, WcStatus};

pub(crate) use receive::{NO_RECEIVE_ID, Popped, receive_id};
pub(crate) use stream::{Check, Fate, Patience, Request, Silence, Stream, WELL_MAX};

/// What is known of one queue pair.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) qpn: u32,
    pub(crate) qp_type: QpType,
    /// The protection domain of its end; an XRC target's SRQ has it.
    pub(crate) pd: u32,
    /// The connected queue pair (UD: the other end of its plan).
    pub(crate) peer: usize,
    pub(crate) exposed: bool,
    pub(crate) srq: Option<usize>,
    pub(crate) stream: Stream,
    /// Streams of earlier connections, for the last look at memory.
    pub(crate) past: Vec<Stream>,
    /// Receives that wait (without an SRQ).
    pub(crate) receives: VecDeque<RecvWr>,
    /// The receive that the machine holds.
    pub(crate) popped: Option<Popped>,
    /// Bytes charged to the windows.
    pub(crate) charged: [u64; 2],
    /// SQ_DRAINED was raised: nothing moves until RTS.
    pub(crate) drained: bool,
    /// Frames towards it that the network doubled.
    pub(crate) duplicates: u32,
}

/// All books.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    /// Peers fetch the payload of large WRITEs themselves.
    pub(crate) lends: bool,
    /// Some frame was lost, damaged or kept back, or some node stood still.
    pub(crate) disturbed: bool,
    /// When faults ended.
    pub(crate) well_since: Option<Nanos>,
    pub(crate) books: Vec<Book>,
    pub(crate) srqs: Vec<VecDeque<RecvWr>>,
    /// Words that atomics work on, by address; addresses are unique over all nodes.
    pub(crate) words: BTreeMap<u64, u64>,
}

impl Oracle {
    /// The responder of `qp` stores bytes of a WRITE.
    pub(crate) fn remote_store(&mut self, qp: usize, at: u64, data: &[u8]) -> Check {
        let book = &self.books[qp];
        if book.exposed {
            return Ok(());
        }
        let (peer, reliable) = (book.peer, book.qp_type.is_reliable());
        let Book { past, stream, .. } = &mut self.books[peer];
        if !reliable {
            let requests = past.iter().flat_map(|past| &past.requests).chain(&stream.requests);
            return unreliable_store(requests, at, data);
        }
        let request = stream.executing()?;
        if !request.is_write() {
            return Err(format!("bytes of a WRITE at {at:#x}, but {request:?} is next"));
        }
        let expected_at = request.target + u64::from(request.stored);
        if at != expected_at || data.len() > (request.len - request.stored) as usize {
            return Err(format!("{} bytes stored at {at:#x}, not at {expected_at:#x}: {request:?}", data.len()));
        }
        if !request.pattern.skip(request.stored).matches(data) {
            return Err(format!("wrong bytes stored at {at:#x}: {request:?}"));
        }
        request.stored += data.len() as u32;
        if request.stored == request.len && !request.takes_receive() {
            stream.execute();
        }
        Ok(())
    }

    /// The responder of `qp` ran an atomic.
    pub(crate) fn atomic(&mut self, qp: usize, at: u64, op: AtomicOp, old: u64, new: u64) -> Check {
        let book = &self.books[qp];
        if book.exposed {
            return Ok(());
        }
        let peer = book.peer;
        let stream = &mut self.books[peer].stream;
        let request = stream.executing()?;
        let same = match (&request.op, op) {
            (SendOp::CompareSwap { compare: a, swap: b, .. }, AtomicOp::CompareSwap { compare, swap }) => {
                (*a, *b) == (compare, swap)
            }
            (SendOp::FetchAdd { add: a, .. }, AtomicOp::FetchAdd { add }) => *a == add,
            _ => false,
        };
        if !same || at != request.target {
            return Err(format!("{op:?} at {at:#x}, but {request:?} is next"));
        }
        let word = self.words.get_mut(&at).expect("atomics go to known words");
        if *word != old {
            return Err(format!("the word at {at:#x} held {old:#x}, not {word:#x}"));
        }
        *word = new;
        request.old = Some(old);
        stream.execute();
        Ok(())
    }

    /// The requester of `qp` stores bytes of a response.
    pub(crate) fn response_store(&mut self, qp: usize, at: u64, data: &[u8]) -> Check {
        let book = &mut self.books[qp];
        let exposed = book.exposed;
        let stream = &mut book.stream;
        let Some(request) = stream.requests.get_mut(stream.released) else {
            return Err(format!("a response is stored at {at:#x}, but nothing is outstanding"));
        };
        if !request.is_read() && !request.is_atomic() {
            return Err(format!("a response is stored at {at:#x}, but {request:?} is next"));
        }
        let place = request.locate(request.returned);
        let Some((expected_at, room)) = place else {
            return Err(format!("too long a response is stored at {at:#x}: {request:?}"));
        };
        if at != expected_at || data.len() > room as usize {
            return Err(format!("{} bytes of response at {at:#x}, not at {expected_at:#x}: {request:?}", data.len()));
        }
        if !exposed {
            let right = if request.is_read() {
                request.pattern.skip(request.returned).matches(data)
            } else {
                let from = request.returned as usize;
                request.old.is_some_and(|old| old.to_ne_bytes().get(from..from + data.len()) == Some(data))
            };
            if !right {
                return Err(format!("a wrong response at {at:#x}: {request:?}"));
            }
        }
        request.returned += data.len() as u32;
        Ok(())
    }

    /// `qp` raises an event that tells of a bad request.
    pub(crate) fn check_error_event(&self, qp: usize, event: QpEvent) -> Check {
        let stream = &self.books[self.books[qp].peer].stream;
        let bad = |request: &Request| matches!(request.fate, Fate::Remote(_) | Fate::Fragile);
        if self.books[qp].exposed || !stream.refusals.is_empty() || stream.requests.iter().any(bad) {
            return Ok(());
        }
        Err(format!("{event:?}, though the peer asked for nothing bad"))
    }

    /// The responder of `qp` refuses what it executes.
    pub(crate) fn refuse(&mut self, qp: usize, status: WcStatus) {
        let peer = self.books[qp].peer;
        if self.books[qp].qp_type.is_reliable() {
            self.books[peer].stream.refusals.push(status);
        }
    }
}

/// UC: every packet of a WRITE may be stored, and more than once if the network doubles it.
fn unreliable_store<'a>(mut requests: impl Iterator<Item = &'a Request>, at: u64, data: &[u8]) -> Check {
    let is_right = requests.any(|request| {
        request.is_write()
            && matches!(request.fate, Fate::Good | Fate::Fragile)
            && at >= request.target
            && at + data.len() as u64 <= request.target + u64::from(request.len)
            && request.pattern.skip((at - request.target) as u32).matches(data)
    });
    if is_right { Ok(()) } else { Err(format!("{} bytes stored at {at:#x}: no WRITE has them there", data.len())) }
}
