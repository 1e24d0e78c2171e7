//! The receiver of UD (IBA 9.8.3): every packet is a message; what does not fit anywhere is dropped.

use ferroce_wire::Opcode;

use crate::flow::Answers;
use crate::host::{Drop, Host, Packet};
use crate::qp::{Conn, Outcome, Upset};
use crate::receive::{self, Extras, Receive};
use crate::verbs::RecvWr;
use crate::wqe::Failure;

/// Receiver state of one UD queue pair.
#[derive(Debug, Default)]
pub(crate) struct UdReceiver {
    /// A receive request that was too small for a datagram; it waits for the next one.
    spare: Option<RecvWr>,
    pub(crate) answers: Answers,
}

impl UdReceiver {
    pub(crate) fn handle_packet(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Outcome {
        let headers = packet.headers;
        let (Opcode::UD_SEND_ONLY | Opcode::UD_SEND_ONLY_IMM, Some(deth)) = (headers.bth.opcode, headers.deth) else {
            host.drop_packet(Drop::BadOpcode);
            return Ok(());
        };
        if deth.qkey != conn.attr.qkey {
            host.drop_packet(Drop::QKey);
            return Ok(());
        }
        // An answer of every member would be a storm.
        if headers.bth.ack_req && !packet.net.dst.is_multicast() {
            self.answers.asked(conn, packet.net, deth.src_qp, headers.bth.psn, false, host);
        }
        let Some(wr) = self.spare.take().or_else(|| host.pop_recv()) else {
            host.drop_packet(Drop::NoReceive);
            return Ok(());
        };
        let grh = packet.net.grh();
        let mut receive = Receive::new(wr);
        if !receive.has_room(grh.len() + packet.payload.len()) {
            self.spare = Some(receive.into_wr());
            host.drop_packet(Drop::BadLength);
            return Ok(());
        }
        let put = receive
            .put(conn.init.pd, &grh, packet.payload.is_empty(), host)
            .and_then(|()| receive.put(conn.init.pd, packet.payload, true, host));
        if let Err(error) = put {
            receive.fail(conn.init, deth.src_qp, Failure::local(error), host);
            return Err(Upset::Err);
        }
        let extras = Extras {
            imm: headers.imm,
            invalidated: None,
            solicited: headers.bth.solicited,
            src_qp: deth.src_qp,
            grh: true,
            sl: packet_kind(&grh),
            flow_tag: 0,
        };
        receive.complete(conn.init, extras, host);
        Ok(())
    }

    /// The queue pair went to ERR.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        self.answers.clear();
        if let Some(wr) = self.spare.take() {
            receive::flush(&wr, conn.init, 0, host);
        }
    }
}

/// What [`Completion::sl`](crate::Completion::sl) tells of a datagram with this header in its GRH area.
fn packet_kind(grh: &[u8]) -> u8 {
    const ROCE_V2: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    ROCE_V2 | if grh[0] >> 4 == 6 { IPV6 } else { IPV4 }
}
