//! Bytes on the wire and in memory.

use ferroce_rsocket::{ConnData, ConnError, Control, Iomap, Message, Sge, from_scaled, to_scaled};
use proptest::prelude::*;

#[test]
fn immediates() {
    for (message, imm) in [
        (Message::Data(0x1234), 0x0000_1234),
        (Message::Unknown(1, 5), 0x2000_0005),
        (Message::Credits(384), 0x8000_0180),
        (Message::Mapping(3), 0xc000_0003),
        (Message::Control(Control::Disconnect), 0xe000_0000),
        (Message::Control(Control::Keepalive), 0xe000_0001),
        (Message::Control(Control::Shutdown), 0xe000_0002),
    ] {
        assert_eq!(message.encode(), imm, "{message:?}");
        assert_eq!(Message::decode(imm), message, "{imm:#x}");
    }
    // Grants count on past 16 bits at the sender; only those mean something.
    assert_eq!(Message::decode(0x8001_0002), Message::Credits(2));
}

#[test]
fn private_data() {
    let said = ConnData {
        big_endian: false,
        credits: 384,
        iomaps: 16,
        table: Sge { addr: 0x0102_0304_0506_0708, key: 0x1122_3344, length: 2 },
        target: Sge { addr: 0x1112_1314_1516_1718, key: 0x5566_7788, length: 65_536 },
    };
    let bytes = said.to_bytes();
    assert_eq!(bytes[..8], [1, 2, 1, 0x80, 0, 0, 0, 16]);
    assert_eq!(bytes[8..24], [1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 2]);
    assert_eq!(bytes[36..], [0, 1, 0, 0]);
    let mut padded = bytes.to_vec();
    padded.resize(56, 0);
    assert_eq!(ConnData::parse(&padded), Ok(said));

    padded[1] = 1;
    assert_eq!(ConnData::parse(&padded), Ok(ConnData { big_endian: true, iomaps: 0, ..said }));
    padded[23] = 1;
    assert_eq!(ConnData::parse(&padded), Err(ConnError::Table(1)));
    padded[0] = 2;
    assert_eq!(ConnData::parse(&padded), Err(ConnError::Version(2)));
    assert_eq!(ConnData::parse(&bytes[..39]), Err(ConnError::Short(39)));
}

#[test]
fn numbers_of_mappings_in_eight_bits() {
    for (value, scaled, rounded) in
        [(0, 0, 0), (128, 128, 128), (129, 128, 128), (256, 129, 256), (1000, 131, 768), (u32::MAX, 255, 32_512)]
    {
        assert_eq!(to_scaled(value), scaled, "{value}");
        assert_eq!(from_scaled(scaled), rounded, "{value}");
    }
    for scaled in 0..=255 {
        assert_eq!(to_scaled(from_scaled(scaled).into()), scaled);
    }
}

#[test]
fn tables_in_the_order_of_their_owner() {
    let sge = Sge { addr: 0x0102_0304_0506_0708, key: 0x1122_3344, length: 0x99 };
    assert_eq!(sge.to_le_bytes(), [8, 7, 6, 5, 4, 3, 2, 1, 0x44, 0x33, 0x22, 0x11, 0x99, 0, 0, 0]);
    assert_eq!(sge.to_be_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0x99]);
    let bytes = Iomap { offset: 0xab, sge }.to_bytes(false);
    assert_eq!(bytes[..8], [0xab, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[8..], sge.to_le_bytes());
}

proptest! {
    #[test]
    fn any_private_data(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(said) = ConnData::parse(&bytes) {
            prop_assert_eq!(ConnData::parse(&said.to_bytes()), Ok(said));
        }
    }

    #[test]
    fn any_immediate(imm: u32) {
        let message = Message::decode(imm);
        prop_assert_eq!(Message::decode(message.encode()), message);
    }
}
