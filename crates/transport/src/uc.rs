//! The receiver of UC (IBA 9.8.2): messages arrive whole or not at all, and nothing is ever acknowledged.

use ferroce_wire::Psn;

use crate::decode::{Part, Request, length_fits, request};
use crate::flow::Answers;
use crate::host::{Drop, Host, Packet};
use crate::qp::{Conn, Outcome, Upset};
use crate::receive::{self, Extras, Receive};
use crate::verbs::{Access, RecvWr, WcStatus};
use crate::wqe::{Failure, MAX_MESSAGE, vendor};

#[derive(Debug)]
enum Message {
    None,
    Send(Receive),
    Write { va: u64, rkey: u32, len: u32, done: u32 },
}

/// Receiver state of one UC queue pair.
#[derive(Debug)]
pub(crate) struct UcReceiver {
    expected: Psn,
    message: Message,
    /// The receive request of a message that was broken off; the next message gets it.
    spare: Option<RecvWr>,
    /// Packets were missing since the last answer.
    missing: bool,
    pub(crate) answers: Answers,
}

impl UcReceiver {
    pub(crate) fn new() -> UcReceiver {
        UcReceiver {
            expected: Psn::new(0),
            message: Message::None,
            spare: None,
            missing: false,
            answers: Answers::default(),
        }
    }

    /// Sets the first PSN: the queue pair goes to RTR.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// The PSN expected next.
    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    pub(crate) fn handle_packet(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Outcome {
        let bth = &packet.headers.bth;
        let Some(request @ (Request::Send(part) | Request::Write(part))) = request(bth.opcode) else {
            host.drop_packet(Drop::BadOpcode);
            return Ok(());
        };
        self.missing |= bth.psn != self.expected;
        if bth.ack_req {
            self.asked(conn, packet, host);
        }
        // A gap breaks the message that was arriving; so does the start of another (IBA 9.8.2.2.1).
        if bth.psn != self.expected || part.starts() {
            self.abandon();
        }
        self.expected = bth.psn.add(1);
        let continues = match (&self.message, request) {
            (Message::None, _) => part.starts(),
            (Message::Send(_), Request::Send(_)) | (Message::Write { .. }, Request::Write(_)) => !part.starts(),
            _ => false,
        };
        if !continues {
            self.abandon();
            host.drop_packet(Drop::MessageBroken);
            return Ok(());
        }
        if !length_fits(part, packet.payload.len(), conn.attr.path_mtu) {
            self.abandon();
            host.drop_packet(Drop::BadLength);
            return Ok(());
        }
        match request {
            Request::Send(_) => self.send(part, conn, packet, host),
            _ => self.write(part, conn, packet, host),
        }
    }

    /// The sender asks what was taken from the receive buffer.
    pub(crate) fn asked(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) {
        let missing = std::mem::take(&mut self.missing);
        self.answers.asked(conn, packet.net, conn.attr.dest_qpn, packet.headers.bth.psn, missing, host);
    }

    fn send(&mut self, part: Part, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Outcome {
        let mut receive = match std::mem::replace(&mut self.message, Message::None) {
            Message::Send(receive) => receive,
            _ => match self.next_receive(host) {
                Some(wr) => Receive::new(wr),
                None => {
                    host.drop_packet(Drop::NoReceive);
                    return Ok(());
                }
            },
        };
        let src_qp = conn.attr.dest_qpn;
        if !receive.has_room(packet.payload.len()) {
            receive.fail(conn.init, src_qp, Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG), host);
            return Err(Upset::Err);
        }
        if let Err(error) = receive.put(conn.init.pd, packet.payload, part.ends(), host) {
            receive.fail(conn.init, src_qp, Failure::local(error), host);
            return Err(Upset::Err);
        }
        if part.ends() {
            receive.complete(conn.init, extras(conn, packet), host);
        } else {
            self.message = Message::Send(receive);
        }
        Ok(())
    }

    fn write(&mut self, part: Part, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Outcome {
        let size = packet.payload.len() as u32;
        let (va, rkey, len, done) = match self.message {
            Message::Write { va, rkey, len, done } => (va, rkey, len, done),
            _ => match begin_write(conn, packet, host) {
                Ok((va, rkey, len)) => (va, rkey, len, 0),
                Err(reason) => {
                    host.drop_packet(reason);
                    return Ok(());
                }
            },
        };
        self.message = Message::None;
        let left = len - done;
        let fits = if part.ends() { size == left } else { size < left };
        if !fits {
            host.drop_packet(Drop::BadLength);
            return Ok(());
        }
        let immediate = match (part.ends(), packet.headers.imm) {
            (true, Some(_)) => match self.next_receive(host) {
                Some(wr) => Some(wr),
                None => {
                    host.drop_packet(Drop::NoReceive);
                    return Ok(());
                }
            },
            _ => None,
        };
        if size > 0 {
            let stored = host
                .resolve_remote(conn.init.pd, rkey, va.wrapping_add(u64::from(done)), size, Access::REMOTE_WRITE)
                .and_then(|span| host.store(span, packet.payload, part.ends()));
            if stored.is_err() {
                // Without an immediate, one that waits already must not be lost.
                self.spare = immediate.or(self.spare.take());
                host.drop_packet(Drop::Access);
                return Ok(());
            }
        }
        if let Some(wr) = immediate {
            receive::complete_write_imm(&wr, len, conn.init, extras(conn, packet), host);
        }
        if !part.ends() {
            self.message = Message::Write { va, rkey, len, done: done + size };
        }
        Ok(())
    }

    fn next_receive(&mut self, host: &mut impl Host) -> Option<RecvWr> {
        self.spare.take().or_else(|| host.pop_recv())
    }

    /// Forgets the message that was arriving; its receive request is used again.
    fn abandon(&mut self) {
        if let Message::Send(receive) = std::mem::replace(&mut self.message, Message::None) {
            self.spare = Some(receive.into_wr());
        }
    }

    /// The queue pair went to ERR.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        self.answers.clear();
        self.abandon();
        if let Some(wr) = self.spare.take() {
            receive::flush(&wr, conn.init, conn.attr.dest_qpn, host);
        }
    }
}

/// Checks the whole range of a WRITE at its first packet.
fn begin_write(conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Result<(u64, u32, u32), Drop> {
    let reth = packet.headers.reth.ok_or(Drop::BadLength)?;
    if u64::from(reth.len) > MAX_MESSAGE {
        return Err(Drop::BadLength);
    }
    if !conn.attr.access.contains(Access::REMOTE_WRITE) {
        return Err(Drop::Access);
    }
    if reth.len > 0 {
        host.resolve_remote(conn.init.pd, reth.rkey, reth.va, reth.len, Access::REMOTE_WRITE)
            .map_err(|_| Drop::Access)?;
    }
    Ok((reth.va, reth.rkey, reth.len))
}

fn extras(conn: Conn<'_>, packet: &Packet<'_>) -> Extras {
    Extras {
        imm: packet.headers.imm,
        invalidated: None,
        solicited: packet.headers.bth.solicited,
        src_qp: conn.attr.dest_qpn,
        grh: false,
        sl: 0,
        flow_tag: 0,
    }
}
