//! Immediates: three bits say what a message is, 29 bits say how much or which.

/// Number of bits of the value.
const VALUE_BITS: u32 = 29;
const VALUE_MASK: u32 = (1 << VALUE_BITS) - 1;

/// `RS_OP_*`.
mod op {
    pub(super) const DATA: u32 = 0;
    pub(super) const SGL: u32 = 4;
    pub(super) const IOMAP_SGL: u32 = 6;
    pub(super) const CTRL: u32 = 7;
}

/// What an immediate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// So many bytes were written to the target.
    Data(u32),
    /// Messages may be sent up to this number (exclusive, modulo 2^16); perhaps a target was written, too.
    Credits(u16),
    /// An entry of the table of mappings was written.
    Mapping(u16),
    /// About the connection.
    Control(Control),
    /// None that version 1 sends: operation and value.
    Unknown(u8, u32),
}

/// `RS_CTRL_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// The sender neither sends nor reads any more.
    Disconnect,
    /// Nothing.
    Keepalive,
    /// The sender sends no more.
    Shutdown,
    /// Of a later version.
    Other(u32),
}

impl Message {
    /// The immediate, in the order of the host.
    pub fn encode(self) -> u32 {
        let (op, value) = match self {
            Message::Data(bytes) => (op::DATA, bytes),
            Message::Credits(limit) => (op::SGL, limit.into()),
            Message::Mapping(index) => (op::IOMAP_SGL, index.into()),
            Message::Control(control) => (op::CTRL, control.encode()),
            Message::Unknown(op, value) => (op.into(), value),
        };
        op << VALUE_BITS | value & VALUE_MASK
    }

    /// Reads an immediate. Numbers of messages count modulo 2^16, so of grants only 16 bits mean something.
    pub fn decode(imm: u32) -> Message {
        let value = imm & VALUE_MASK;
        match imm >> VALUE_BITS {
            op::DATA => Message::Data(value),
            op::SGL => Message::Credits(value as u16),
            op::IOMAP_SGL => Message::Mapping(value as u16),
            op::CTRL => Message::Control(Control::decode(value)),
            other => Message::Unknown(other as u8, value),
        }
    }
}

impl Control {
    fn encode(self) -> u32 {
        match self {
            Control::Disconnect => 0,
            Control::Keepalive => 1,
            Control::Shutdown => 2,
            Control::Other(value) => value,
        }
    }

    fn decode(value: u32) -> Control {
        match value {
            0 => Control::Disconnect,
            1 => Control::Keepalive,
            2 => Control::Shutdown,
            other => Control::Other(other),
        }
    }
}
