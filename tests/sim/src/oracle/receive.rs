//! Receives: whose message completes them, and with what.

use ferroce_transport::{Completion, QpType, RecvWr, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use ferroce_wire::GRH_LEN;

use super::stream::{locate, total};
use super::{Book, Check, Fate, Oracle, Request};
use crate::memory::NodeMemory;

/// A receive that the machine took.
#[derive(Debug)]
pub(crate) struct Popped {
    pub(crate) wr: RecvWr,
    /// Real addresses of its elements; 0 where a key is bad.
    pub(crate) places: Vec<(u64, u32)>,
    /// Bytes of a message stored so far.
    pub(crate) stored: u32,
}

/// No receive has this id.
pub(crate) const NO_RECEIVE_ID: u64 = 0;

/// The id of a receive tells whether its key is bad.
pub(crate) fn receive_id(number: u64, bad_key: bool) -> u64 {
    number << 1 | u64::from(bad_key)
}

fn has_bad_key(wr_id: u64) -> bool {
    wr_id & 1 == 1
}

impl Oracle {
    /// The machine of `qp` takes a receive; `places` are the addresses behind its elements.
    pub(crate) fn pop(
        &mut self,
        qp: usize,
        places: impl Fn(&RecvWr) -> Vec<(u64, u32)>,
    ) -> Result<Option<RecvWr>, String> {
        let book = &mut self.books[qp];
        let queue = match book.srq {
            Some(srq) => &mut self.srqs[srq],
            None => &mut book.receives,
        };
        let Some(wr) = queue.pop_front() else { return Ok(None) };
        let before = book.popped.replace(Popped { places: places(&wr), wr: wr.clone(), stored: 0 });
        match before {
            None => Ok(Some(wr)),
            Some(lost) => Err(format!("receive {:#x} is taken while {:#x} is in use", wr.wr_id, lost.wr.wr_id)),
        }
    }

    /// The responder of `qp` stores bytes into the receive that it took.
    pub(crate) fn receive_store(&mut self, qp: usize, at: u64, data: &[u8]) -> Check {
        let book = &mut self.books[qp];
        let (qp_type, exposed, peer) = (book.qp_type, book.exposed, book.peer);
        let Some(popped) = &mut book.popped else {
            return Err(format!("{} bytes received at {at:#x} without a receive", data.len()));
        };
        // UC and UD begin a receive anew when its message broke off.
        let begin = locate(popped.places.iter().copied(), 0);
        if !qp_type.is_reliable() && begin.is_some_and(|(start, _)| start == at) {
            popped.stored = 0;
        }
        let Some((expected_at, room)) = locate(popped.places.iter().copied(), popped.stored) else {
            return Err(format!("{} bytes received at {at:#x}, behind the end of {popped:?}", data.len()));
        };
        if at != expected_at || data.len() > room as usize {
            return Err(format!("{} bytes received at {at:#x}, not at {expected_at:#x}: {popped:?}", data.len()));
        }
        let offset = popped.stored;
        popped.stored += data.len() as u32;
        if !qp_type.is_reliable() || exposed {
            return Ok(());
        }
        let request = self.books[peer].stream.executing()?;
        if !request.is_send() || offset != request.stored || data.len() > (request.len - offset) as usize {
            return Err(format!("byte {offset} of a SEND is stored at {at:#x}, but {request:?} is next"));
        }
        if !request.pattern.skip(offset).matches(data) {
            return Err(format!("wrong bytes received at {at:#x}: {request:?}"));
        }
        request.stored += data.len() as u32;
        Ok(())
    }

    /// A receive of `qp` completes.
    pub(crate) fn complete_receive(&mut self, qp: usize, completion: &Completion, memory: &NodeMemory) -> Check {
        let book = &mut self.books[qp];
        let Some(popped) = book.popped.take() else {
            return Err(format!("a receive completes that was not taken: {completion:?}"));
        };
        if popped.wr.wr_id != completion.wr_id || completion.qp_num != book.qpn {
            return Err(format!("receive {:#x} was taken, not {completion:?}", popped.wr.wr_id));
        }
        let (qp_type, exposed, peer) = (book.qp_type, book.exposed, book.peer);
        if exposed {
            return Ok(());
        }
        let capacity = total(&popped.wr.sges);
        match (completion.status, qp_type) {
            (WcStatus::WrFlushErr, _) => Ok(()),
            (WcStatus::Success, QpType::Rc | QpType::XrcRecv) => self.received_reliably(peer, completion, capacity),
            (WcStatus::Success, QpType::Uc) => self.received_by_uc(peer, qp, completion, &popped, memory),
            (WcStatus::Success, QpType::Ud) => self.received_datagram(qp, completion, &popped, memory),
            (WcStatus::LocLenErr, QpType::Rc | QpType::XrcRecv) => {
                let request = self.books[peer].stream.executing()?;
                if !request.is_send() || request.len <= capacity {
                    return Err(format!("{completion:?}, though {capacity} bytes have room for {request:?}"));
                }
                self.refuse(qp, WcStatus::RemInvReqErr);
                Ok(())
            }
            (WcStatus::LocLenErr, QpType::Uc) => {
                let Book { past, stream, .. } = &self.books[peer];
                let mut requests = past.iter().flat_map(|past| &past.requests).chain(&stream.requests);
                match requests.any(|request| request.is_send() && request.len > capacity) {
                    true => Ok(()),
                    false => Err(format!("{completion:?}, though {capacity} bytes are enough for every message")),
                }
            }
            (WcStatus::LocProtErr, _) if has_bad_key(completion.wr_id) => {
                self.refuse(qp, WcStatus::RemOpErr);
                Ok(())
            }
            (WcStatus::MwBindErr, QpType::Rc | QpType::XrcRecv) => {
                let request = self.books[peer].stream.executing()?;
                match request.fate {
                    Fate::Remote(_) if matches!(request.op, SendOp::SendInv { .. }) => Ok(()),
                    _ => Err(format!("{completion:?}, but {request:?} is next")),
                }
            }
            // A WRITE with immediate that memory refused; the refusal was noted when it happened, as its requester is told it.
            (WcStatus::RemAccessErr | WcStatus::LocAccessErr, QpType::Rc | QpType::XrcRecv) => {
                let told = match completion.status {
                    WcStatus::LocAccessErr => WcStatus::RemOpErr,
                    status => status,
                };
                let stream = &self.books[peer].stream;
                match stream.next() {
                    Some(Request { op: SendOp::WriteImm { .. }, .. }) if stream.refusals.contains(&told) => Ok(()),
                    next => Err(format!("{completion:?}, but {next:?} is next")),
                }
            }
            _ => Err(format!("a receive ends with {completion:?} for no reason")),
        }
    }

    fn received_reliably(&mut self, peer: usize, completion: &Completion, capacity: u32) -> Check {
        let peer_qpn = self.books[peer].qpn;
        let stream = &mut self.books[peer].stream;
        let request = stream.executing()?;
        if matches!(request.fate, Fate::Remote(_)) {
            return Err(format!("{completion:?} by a request that must be refused: {request:?}"));
        }
        if !request.takes_receive() || request.stored != request.len {
            return Err(format!("{completion:?}, but {request:?} is next"));
        }
        if request.is_send() && request.len > capacity {
            return Err(format!("{completion:?} of {capacity} bytes by {request:?}"));
        }
        check_fields(completion, request, peer_qpn, 0, WcFlags::empty())?;
        stream.execute();
        Ok(())
    }

    /// UC: whole messages only, each no more often than it was sent; the content tells which.
    fn received_by_uc(
        &mut self,
        peer: usize,
        qp: usize,
        completion: &Completion,
        popped: &Popped,
        memory: &NodeMemory,
    ) -> Check {
        let duplicates = self.books[qp].duplicates;
        let peer_qpn = self.books[peer].qpn;
        let Book { past, stream, .. } = &mut self.books[peer];
        let candidates = past.iter_mut().flat_map(|past| &mut past.requests).chain(&mut stream.requests);
        let mut why = Ok(());
        for request in candidates.filter(|request| request.takes_receive() && request.len == completion.byte_len) {
            let same = match request.op {
                SendOp::WriteImm { .. } => request.pattern.matches(memory.read(request.target, request.len)),
                _ => holds(popped, 0, request, memory),
            };
            if same && request.delivered <= duplicates {
                why = check_fields(completion, request, peer_qpn, 0, WcFlags::empty());
                if why.is_ok() {
                    request.delivered += 1;
                    return Ok(());
                }
            }
        }
        why?;
        Err(format!("{completion:?}: no message of the peer is so"))
    }

    fn received_datagram(&mut self, qp: usize, completion: &Completion, popped: &Popped, memory: &NodeMemory) -> Check {
        let grh = GRH_LEN as u32;
        let duplicates = self.books[qp].duplicates;
        let Some(sender) = self.books.iter_mut().find(|book| book.qpn == completion.src_qp) else {
            return Err(format!("{completion:?}: there is no such source"));
        };
        let Some(len) = completion.byte_len.checked_sub(grh) else {
            return Err(format!("{completion:?}: too short for the GRH area"));
        };
        let sender_qpn = sender.qpn;
        let requests = sender.past.iter_mut().flat_map(|past| &mut past.requests).chain(&mut sender.stream.requests);
        let mut why = Ok(());
        for request in requests.filter(|request| request.to == Some(qp) && request.len == len) {
            if holds(popped, grh, request, memory) && request.delivered <= duplicates {
                why = check_fields(completion, request, sender_qpn, grh, WcFlags::GRH);
                if why.is_ok() {
                    request.delivered += 1;
                    return Ok(());
                }
            }
        }
        why?;
        Err(format!("{completion:?}: no message of the sender is so"))
    }
}

/// Does the receive hold the message, from byte `skip` on?
fn holds(popped: &Popped, skip: u32, request: &Request, memory: &NodeMemory) -> bool {
    let mut done = 0;
    while done < request.len {
        let Some((at, room)) = locate(popped.places.iter().copied(), skip + done) else { return false };
        if at == 0 {
            return false;
        }
        let len = room.min(request.len - done);
        if !request.pattern.skip(done).matches(memory.read(at, len)) {
            return false;
        }
        done += len;
    }
    true
}

fn check_fields(completion: &Completion, request: &Request, src_qp: u32, extra: u32, more: WcFlags) -> Check {
    let opcode = if request.is_send() { WcOpcode::Recv } else { WcOpcode::RecvRdmaWithImm };
    let (imm, flags) = match request.op {
        SendOp::SendImm { imm } | SendOp::WriteImm { imm, .. } => (imm, WcFlags::WITH_IMM),
        SendOp::SendInv { rkey } => (rkey, WcFlags::WITH_INV),
        _ => (0, WcFlags::empty()),
    };
    let right = completion.opcode == opcode
        && completion.byte_len == request.len + extra
        && completion.imm == imm
        && completion.flags == flags | more
        && completion.src_qp == src_qp
        && completion.vendor_err == 0
        && completion.solicited == request.flags.contains(SendFlags::SOLICITED);
    if right { Ok(()) } else { Err(format!("{completion:?} does not fit {request:?}")) }
}
