//! RC responder: the answers that wait, and how they go out.

use ferroce_wire::{Aeth, Bth, Headers, Opcode, Psn, Syndrome};
use smallvec::SmallVec;

use super::request::remote_syndrome;
use super::{Fault, ReadReply, Reply, Responder};
use crate::decode::{Part, part_at};
use crate::host::{Count, Drop, Host, MemoryError, Payload, Side, Span, Train};
use crate::qp::{Conn, Outcome, Upset};
use crate::verbs::Access;
use crate::wqe::{Wqe, pad, train_packets_max};

/// No more ACKs and NAKs wait among the answers of READs and atomics: only a peer that sends nonsense between READs gets there, and whoever means
/// it well asks again.
pub(super) const REPLIES_MAX: usize = 256;

fn is_fatal(syndrome: Syndrome) -> bool {
    syndrome.is_nak() && syndrome != Syndrome::NAK_SEQUENCE
}

impl Responder {
    /// Queues an ACK. One that is queued already and directly before it need not go: the later one says the same (IBA 9.7.5.1.2).
    pub(super) fn queue_ack(&mut self, psn: Psn) {
        let ack = Reply::Ack { psn, msn: self.msn };
        let room = self.has_room_to_acknowledge();
        match self.replies.back_mut() {
            Some(last @ Reply::Ack { .. }) => *last = ack,
            _ if room => self.replies.push_back(ack),
            _ => {}
        }
    }

    fn has_room_to_acknowledge(&self) -> bool {
        self.replies.len() - self.replies_owed < REPLIES_MAX
    }

    /// Queues a NAK, and tells if there was room for it.
    pub(super) fn queue_nak(&mut self, psn: Psn, syndrome: Syndrome, host: &mut impl Host) -> bool {
        // A sequence NAK counts when it leaves: the gap may close before.
        if is_fatal(syndrome) {
            host.count(Count::fatal_nak_sent(syndrome), 1);
        } else if syndrome != Syndrome::NAK_SEQUENCE {
            host.count(Count::RnrNakSent, 1);
        }
        let nak = Reply::Nak { psn, msn: self.msn, syndrome };
        let room = self.has_room_to_acknowledge() || is_fatal(syndrome);
        match self.replies.back_mut() {
            // The later one is the one to obey.
            Some(last @ Reply::Nak { .. }) => {
                if last.is_sequence_nak() {
                    self.nak_queued = false;
                }
                *last = nak;
            }
            _ if room => self.replies.push_back(nak),
            _ => return false,
        }
        true
    }

    /// Queues the answer of a READ or atomic.
    pub(super) fn owe(&mut self, reply: Reply) {
        self.replies_owed += 1;
        self.replies.push_back(reply);
        if self.nak_queued
            && let Some(at) = self.replies.iter().position(Reply::is_sequence_nak)
        {
            // It tells of what is behind this request, too.
            self.replies.remove(at).into_iter().for_each(|nak| self.replies.push_back(nak));
        }
    }

    /// Puts the next answer into `out`.
    pub(crate) fn poll_transmit(&mut self, conn: Conn<'_>, host: &mut impl Host, out: &mut Option<Train>) -> Outcome {
        let Some(&reply) = self.replies.front() else { return Ok(()) };
        match reply {
            Reply::Ack { psn, msn } => {
                host.count(Count::AckSent, 1);
                *out = Some(single(Opcode::RC_ACKNOWLEDGE, psn, Aeth { syndrome: Syndrome::ACK, msn }, None, conn));
            }
            Reply::Nak { syndrome: syndrome @ Syndrome::NAK_SEQUENCE, .. } => {
                host.count(Count::NakSequenceSent, 1);
                self.nak_queued = false;
                let aeth = Aeth { syndrome, msn: self.msn };
                *out = Some(single(Opcode::RC_ACKNOWLEDGE, self.expected, aeth, None, conn));
            }
            Reply::Nak { psn, msn, syndrome } => {
                *out = Some(single(Opcode::RC_ACKNOWLEDGE, psn, Aeth { syndrome, msn }, None, conn));
            }
            Reply::Atomic { psn, msn, value } => {
                self.replies_owed -= 1;
                let aeth = Aeth { syndrome: Syndrome::ACK, msn };
                *out = Some(single(Opcode::RC_ATOMIC_ACKNOWLEDGE, psn, aeth, Some(value), conn));
            }
            Reply::Placed { psn, msn } => {
                self.replies_owed -= 1;
                let aeth = Aeth { syndrome: Syndrome::ACK, msn };
                *out = Some(single(Opcode::RC_READ_RESPONSE_ONLY, psn, aeth, None, conn));
            }
            Reply::Read(read) => return self.read_train(read, conn, host, out),
        }
        self.replies.pop_front();
        Ok(())
    }

    /// The next train of a READ's answer.
    fn read_train(
        &mut self,
        read: ReadReply,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Outcome {
        let mtu = conn.attr.path_mtu;
        let total = Wqe::packets_for(read.len, mtu);
        let packets = total.min(train_packets_max(mtu));
        let len = read.len.min(packets * mtu);
        // The key is looked up again for every train: it may be gone since.
        let span = if len == 0 {
            Span { addr: 0, len: 0 }
        } else {
            match host.resolve_remote(read.pd, read.rkey, read.va, len, Access::REMOTE_READ) {
                Ok(span) => span,
                Err(error) if read.again => {
                    self.replies_owed -= 1;
                    self.replies.pop_front();
                    self.refuse_again(read.psn, error, host);
                    return self.poll_transmit(conn, host, out);
                }
                Err(error) => return Err(self.read_fault(read.psn, error, conn, host)),
            }
        };
        if packets == total {
            self.replies.pop_front();
            self.replies_owed -= 1;
        } else {
            let rest = ReadReply {
                psn: read.psn.add(packets),
                va: read.va.wrapping_add(u64::from(len)),
                len: read.len - len,
                fresh: false,
                ..read
            };
            *self.replies.front_mut().expect("the READ is at the front") = Reply::Read(rest);
        }
        *out = Some(response_train(read, packets, total, len, span, conn));
        Ok(())
    }

    /// The memory of a READ is gone: a NAK takes the place of its response, and nothing follows.
    fn read_fault(&mut self, psn: Psn, error: MemoryError, conn: Conn<'_>, host: &mut impl Host) -> Upset {
        self.replies.clear();
        self.replies_owed = 0;
        self.nak_queued = false;
        self.fatal(Fault::of_request(psn, remote_syndrome(error)), conn, host)
    }

    /// The memory of a READ that came again is gone. The requester may have its response since long, and the program may then take
    /// the memory away: so this is no error of the connection, and the responder stays in its state (IBA 9.9.3 takes it to ERR for a
    /// request that it executes; this one was executed). A requester that still waits learns by the NAK why it waits in vain; to any
    /// other the NAK is a ghost (IBA 9.7.5.1.4).
    fn refuse_again(&mut self, psn: Psn, error: MemoryError, host: &mut impl Host) {
        host.drop_packet(Drop::Access);
        if self.has_room_to_acknowledge() {
            let syndrome = remote_syndrome(error);
            host.count(Count::fatal_nak_sent(syndrome), 1);
            self.replies.push_front(Reply::Nak { psn, msn: self.msn, syndrome });
        }
    }

    /// The link could not read the memory of a READ response.
    pub(crate) fn handle_transmit_fault(
        &mut self,
        train: &Train,
        error: MemoryError,
        conn: Conn<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        let psn = train.head.bth.psn;
        if train.from != Side::ResponderAgain {
            return Err(self.read_fault(psn, error, conn, host));
        }
        let rest = psn.add(train.packets);
        if matches!(self.replies.front(), Some(Reply::Read(read)) if read.again && !read.fresh && read.psn == rest) {
            self.replies.pop_front();
            self.replies_owed -= 1;
        }
        self.refuse_again(psn, error, host);
        Ok(())
    }
}

/// `packets` of the `total` packets that are left of a READ's answer.
fn response_train(read: ReadReply, packets: u32, total: u32, len: u32, span: Span, conn: Conn<'_>) -> Train {
    let mtu = conn.attr.path_mtu;
    let one = |index: u32| {
        // Without its first packets the answer has no FIRST and no ONLY.
        let part = match (part_at(index, total), read.fresh) {
            (Part::First, false) => Part::Middle,
            (Part::Only, false) => Part::Last,
            (part, _) => part,
        };
        let opcode = match part {
            Part::First => Opcode::RC_READ_RESPONSE_FIRST,
            Part::Middle => Opcode::RC_READ_RESPONSE_MIDDLE,
            Part::Last => Opcode::RC_READ_RESPONSE_LAST,
            Part::Only => Opcode::RC_READ_RESPONSE_ONLY,
        };
        let mut headers = Headers::new(Bth::new(conn.opcode(opcode), conn.attr.dest_qpn, read.psn.add(index)));
        headers.aeth = (part != Part::Middle).then_some(Aeth { syndrome: Syndrome::ACK, msn: read.msn });
        headers.bth.pad = if index + 1 == total { pad(len - index * mtu) } else { 0 };
        headers
    };
    Train {
        head: one(0),
        body: conn.opcode(Opcode::RC_READ_RESPONSE_MIDDLE),
        tail: (packets > 1).then(|| one(packets - 1)),
        packets,
        mtu,
        len,
        payload: Payload::Copy(span),
        path: None,
        from: if read.again { Side::ResponderAgain } else { Side::Responder },
    }
}

fn single(opcode: Opcode, psn: Psn, aeth: Aeth, atomic_ack: Option<u64>, conn: Conn<'_>) -> Train {
    let opcode = conn.opcode(opcode);
    let mut headers = Headers::new(Bth::new(opcode, conn.attr.dest_qpn, psn));
    headers.aeth = Some(aeth);
    headers.atomic_ack = atomic_ack;
    Train {
        head: headers,
        body: opcode,
        tail: None,
        packets: 1,
        mtu: conn.attr.path_mtu,
        len: 0,
        payload: Payload::Gather(SmallVec::new()),
        path: None,
        from: Side::Responder,
    }
}
