//! BTH opcodes (IBA table 38) and what each of them implies.

use core::fmt;

/// A BTH opcode: three bits of transport class, five of operation. Open: unknown values survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

macro_rules! opcodes {
    ($($name:ident = $value:expr;)*) => {
        impl Opcode {
            $(#[allow(missing_docs)] pub const $name: Opcode = Opcode($value);)*

            /// The name used by the specification, or `None` for a code that it does not define.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($value => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

opcodes! {
    RC_SEND_FIRST = 0x00; RC_SEND_MIDDLE = 0x01; RC_SEND_LAST = 0x02; RC_SEND_LAST_IMM = 0x03;
    RC_SEND_ONLY = 0x04; RC_SEND_ONLY_IMM = 0x05;
    RC_WRITE_FIRST = 0x06; RC_WRITE_MIDDLE = 0x07; RC_WRITE_LAST = 0x08; RC_WRITE_LAST_IMM = 0x09;
    RC_WRITE_ONLY = 0x0a; RC_WRITE_ONLY_IMM = 0x0b;
    RC_READ_REQUEST = 0x0c; RC_READ_RESPONSE_FIRST = 0x0d; RC_READ_RESPONSE_MIDDLE = 0x0e;
    RC_READ_RESPONSE_LAST = 0x0f; RC_READ_RESPONSE_ONLY = 0x10;
    RC_ACKNOWLEDGE = 0x11; RC_ATOMIC_ACKNOWLEDGE = 0x12; RC_COMPARE_SWAP = 0x13; RC_FETCH_ADD = 0x14; RC_RESYNC = 0x15;
    RC_SEND_LAST_INV = 0x16; RC_SEND_ONLY_INV = 0x17; RC_FLUSH = 0x1c; RC_ATOMIC_WRITE = 0x1d;
    UC_SEND_FIRST = 0x20; UC_SEND_MIDDLE = 0x21; UC_SEND_LAST = 0x22; UC_SEND_LAST_IMM = 0x23;
    UC_SEND_ONLY = 0x24; UC_SEND_ONLY_IMM = 0x25;
    UC_WRITE_FIRST = 0x26; UC_WRITE_MIDDLE = 0x27; UC_WRITE_LAST = 0x28; UC_WRITE_LAST_IMM = 0x29;
    UC_WRITE_ONLY = 0x2a; UC_WRITE_ONLY_IMM = 0x2b;
    UD_SEND_ONLY = 0x64; UD_SEND_ONLY_IMM = 0x65;
    CNP = 0x81;
    XRC_SEND_FIRST = 0xa0; XRC_SEND_MIDDLE = 0xa1; XRC_SEND_LAST = 0xa2; XRC_SEND_LAST_IMM = 0xa3;
    XRC_SEND_ONLY = 0xa4; XRC_SEND_ONLY_IMM = 0xa5;
    XRC_WRITE_FIRST = 0xa6; XRC_WRITE_MIDDLE = 0xa7; XRC_WRITE_LAST = 0xa8; XRC_WRITE_LAST_IMM = 0xa9;
    XRC_WRITE_ONLY = 0xaa; XRC_WRITE_ONLY_IMM = 0xab;
    XRC_READ_REQUEST = 0xac; XRC_READ_RESPONSE_FIRST = 0xad; XRC_READ_RESPONSE_MIDDLE = 0xae;
    XRC_READ_RESPONSE_LAST = 0xaf; XRC_READ_RESPONSE_ONLY = 0xb0;
    XRC_ACKNOWLEDGE = 0xb1; XRC_ATOMIC_ACKNOWLEDGE = 0xb2; XRC_COMPARE_SWAP = 0xb3; XRC_FETCH_ADD = 0xb4;
    XRC_SEND_LAST_INV = 0xb6; XRC_SEND_ONLY_INV = 0xb7; XRC_FLUSH = 0xbc; XRC_ATOMIC_WRITE = 0xbd;
    FERROCE_FLOW = 0xc0;
}

/// Transport class: the top three bits of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Class {
    Rc,
    Uc,
    Rd,
    Ud,
    /// Congestion notification, RoCEv2 only.
    Cnp,
    Xrc,
    /// Left to manufacturers.
    Other,
}

bitflags::bitflags! {
    /// Extended headers, in their order on the wire.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Ext: u16 {
        /// XRC extended transport header: the shared receive queue.
        const XRCETH = 1;
        /// Datagram extended transport header.
        const DETH = 1 << 1;
        /// FLUSH extended transport header.
        const FETH = 1 << 2;
        /// RDMA extended transport header.
        const RETH = 1 << 3;
        /// Atomic extended transport header.
        const ATOMIC_ETH = 1 << 4;
        /// ACK extended transport header.
        const AETH = 1 << 5;
        /// Atomic ACK extended transport header: the word's original value.
        const ATOMIC_ACK_ETH = 1 << 6;
        /// Immediate data.
        const IMM_DT = 1 << 7;
        /// Invalidate extended transport header: the rkey.
        const IETH = 1 << 8;
    }
}

/// What a packet does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Operation {
    Send,
    Write,
    ReadRequest,
    ReadResponse,
    Acknowledge,
    AtomicAcknowledge,
    CompareSwap,
    FetchAdd,
    Flush,
    AtomicWrite,
    CongestionNotification,
}

/// Which side of a queue pair the packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Direction {
    /// For the responder.
    Request,
    /// For the requester.
    Response,
}

/// Where in its message the packet stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Position {
    First,
    Middle,
    Last,
    Only,
}

impl Position {
    /// The packet begins a message.
    pub const fn starts(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// The packet ends a message.
    pub const fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// What an opcode implies: the extended headers behind the BTH and the packet's part in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What the packet does.
    pub operation: Operation,
    /// Which machine it is for.
    pub direction: Direction,
    /// Where in its message it stands; whatever is always one packet counts as [`Position::Only`].
    pub position: Position,
    /// Extended headers that follow the BTH.
    pub ext: Ext,
    /// A payload may follow. It may still be empty.
    pub payload: bool,
}

impl Opcode {
    /// The transport class.
    pub const fn class(self) -> Class {
        match self.0 >> 5 {
            0 => Class::Rc,
            1 => Class::Uc,
            2 => Class::Rd,
            3 => Class::Ud,
            4 => Class::Cnp,
            5 => Class::Xrc,
            _ => Class::Other,
        }
    }

    /// What the opcode implies, or `None` if it is unknown, or of the RD class, which RoCE ends do not speak, or left to
    /// manufacturers (ours, [`FERROCE_FLOW`](Opcode::FERROCE_FLOW), is told from others' by what follows: [`Flow`](crate::Flow)).
    pub const fn layout(self) -> Option<Layout> {
        LAYOUTS[self.0 as usize]
    }

    /// The packet is for the requester. Unknown opcodes count as requests: the responder is the side that refuses them.
    pub const fn is_response(self) -> bool {
        matches!(self.layout(), Some(Layout { direction: Direction::Response, .. }))
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:?}_{:#04x}", self.class(), self.0),
        }
    }
}

static LAYOUTS: [Option<Layout>; 256] = {
    let mut table = [None; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = describe(code as u8);
        code += 1;
    }
    table
};

const fn describe(code: u8) -> Option<Layout> {
    let operation = code & 0x1f;
    match Opcode(code).class() {
        Class::Rc => reliable(operation),
        Class::Uc if operation <= 0x0b => reliable(operation),
        Class::Ud if operation == 0x04 || operation == 0x05 => match reliable(operation) {
            Some(layout) => Some(Layout { ext: layout.ext.union(Ext::DETH), ..layout }),
            None => None,
        },
        Class::Cnp if operation == 0x01 => {
            // The 16 reserved bytes of a CNP pass as payload. It travels from the receiver of data, yet the IBA calls it neither
            // request nor response; it belongs to the side that sends.
            Some(Layout {
                operation: Operation::CongestionNotification,
                direction: Direction::Response,
                position: Position::Only,
                ext: Ext::empty(),
                payload: true,
            })
        }
        Class::Xrc => match reliable(operation) {
            Some(Layout { direction: Direction::Request, operation, position, ext, payload }) => Some(Layout {
                operation,
                direction: Direction::Request,
                position,
                ext: ext.union(Ext::XRCETH),
                payload,
            }),
            response => response,
        },
        _ => None,
    }
}

/// Operations of the RC class; UC, UD and XRC have subsets of the same five bits.
const fn reliable(operation: u8) -> Option<Layout> {
    use Operation::*;
    use Position::*;
    let none = Ext::empty();
    let (operation, position, ext, payload) = match operation {
        0x00 => (Send, First, none, true),
        0x01 => (Send, Middle, none, true),
        0x02 => (Send, Last, none, true),
        0x03 => (Send, Last, Ext::IMM_DT, true),
        0x04 => (Send, Only, none, true),
        0x05 => (Send, Only, Ext::IMM_DT, true),
        0x06 => (Write, First, Ext::RETH, true),
        0x07 => (Write, Middle, none, true),
        0x08 => (Write, Last, none, true),
        0x09 => (Write, Last, Ext::IMM_DT, true),
        0x0a => (Write, Only, Ext::RETH, true),
        0x0b => (Write, Only, Ext::RETH.union(Ext::IMM_DT), true),
        0x0c => (ReadRequest, Only, Ext::RETH, false),
        0x0d => (ReadResponse, First, Ext::AETH, true),
        0x0e => (ReadResponse, Middle, none, true),
        0x0f => (ReadResponse, Last, Ext::AETH, true),
        0x10 => (ReadResponse, Only, Ext::AETH, true),
        0x11 => (Acknowledge, Only, Ext::AETH, false),
        0x12 => (AtomicAcknowledge, Only, Ext::AETH.union(Ext::ATOMIC_ACK_ETH), false),
        0x13 => (CompareSwap, Only, Ext::ATOMIC_ETH, false),
        0x14 => (FetchAdd, Only, Ext::ATOMIC_ETH, false),
        0x16 => (Send, Last, Ext::IETH, true),
        0x17 => (Send, Only, Ext::IETH, true),
        0x1c => (Flush, Only, Ext::FETH.union(Ext::RETH), false),
        0x1d => (AtomicWrite, Only, Ext::RETH, true),
        _ => return None,
    };
    let direction = match operation {
        ReadResponse | Acknowledge | AtomicAcknowledge => Direction::Response,
        _ => Direction::Request,
    };
    Some(Layout { operation, direction, position, ext, payload })
}
