//! BTH opcodes (IBA table 38).

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
}
