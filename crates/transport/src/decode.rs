//! What a request opcode says.

use ferroce_wire::{Opcode, Operation, Position};

use crate::verbs::QpType;

pub(crate) use ferroce_wire::Position as Part;

/// Transport class bits of an opcode (IBA table 38).
pub(crate) const CLASS_MASK: u8 = 0xe0;
/// Reliable connection.
pub(crate) const CLASS_RC: u8 = 0x00;
/// Unreliable connection.
pub(crate) const CLASS_UC: u8 = 0x20;
/// Unreliable datagram.
pub(crate) const CLASS_UD: u8 = 0x60;
/// Extended reliable connection.
pub(crate) const CLASS_XRC: u8 = 0xa0;

/// No opcode is of this class: RAW_PACKET has none.
const CLASS_NONE: u8 = 0xff;

/// The class of a service type's packets.
pub(crate) fn class(qp_type: QpType) -> u8 {
    match qp_type {
        QpType::Rc => CLASS_RC,
        QpType::Uc => CLASS_UC,
        QpType::Ud => CLASS_UD,
        QpType::XrcSend | QpType::XrcRecv => CLASS_XRC,
        QpType::RawPacket => CLASS_NONE,
    }
}

/// The opcode of RC that does in its class what `opcode` does in XRC's.
pub(crate) fn as_rc(opcode: Opcode) -> Opcode {
    Opcode(opcode.0 & !CLASS_MASK)
}

/// The part of its message that packet `index` of `count` is.
pub(crate) fn part_at(index: u32, count: u32) -> Part {
    match (index == 0, index + 1 == count) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    }
}

/// A request that a connected queue pair serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Send(Part),
    Write(Part),
    Read,
    CompareSwap,
    FetchAdd,
    Flush,
    AtomicWrite,
}

impl Request {
    /// It is answered by more than an ACK, which the responder keeps for when the request comes again.
    pub(crate) fn has_response(self) -> bool {
        !matches!(self, Request::Send(_) | Request::Write(_))
    }
}

/// The request that an opcode of RC, UC or XRC stands for; `None` for responses and for what we do not serve.
pub(crate) fn request(opcode: Opcode) -> Option<Request> {
    let layout = opcode.layout()?;
    Some(match layout.operation {
        Operation::Send => Request::Send(layout.position),
        Operation::Write => Request::Write(layout.position),
        Operation::ReadRequest => Request::Read,
        Operation::CompareSwap => Request::CompareSwap,
        Operation::FetchAdd => Request::FetchAdd,
        Operation::Flush => Request::Flush,
        Operation::AtomicWrite => Request::AtomicWrite,
        _ => return None,
    })
}

/// Every packet but a message's last is full, the last of several is not empty (IBA 9.7.4.1.6).
pub(crate) fn length_fits(part: Part, len: usize, mtu: u32) -> bool {
    let mtu = mtu as usize;
    match part {
        Part::First | Part::Middle => len == mtu,
        Part::Last => (1..=mtu).contains(&len),
        Part::Only => len <= mtu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_rc_and_uc() {
        assert_eq!(request(Opcode::RC_SEND_ONLY_INV), Some(Request::Send(Part::Only)));
        assert_eq!(request(Opcode::UC_WRITE_LAST_IMM), Some(Request::Write(Part::Last)));
        assert_eq!(request(Opcode(0x20 | Opcode::RC_SEND_ONLY_INV.0)), None, "UC has no SEND with invalidate");
        assert_eq!(request(Opcode(0x20 | Opcode::RC_READ_REQUEST.0)), None, "UC has no READ");
        assert_eq!(request(Opcode::RC_RESYNC), None);
        assert_eq!(request(Opcode::XRC_READ_REQUEST), Some(Request::Read));
        assert_eq!(request(Opcode::XRC_ACKNOWLEDGE), None);
        assert_eq!(request(Opcode::RC_ACKNOWLEDGE), None);
    }

    #[test]
    fn parts() {
        assert_eq!(part_at(0, 1), Part::Only);
        assert_eq!(part_at(0, 2), Part::First);
        assert_eq!(part_at(1, 3), Part::Middle);
        assert_eq!(part_at(2, 3), Part::Last);
    }
}
