//! Bit fields of a message, in network order: bit 0 is the most significant of byte 0.

use super::{MAD_HEADER_LEN, MAD_LEN};

/// What follows the header of a MAD.
pub(super) type Data = [u8; MAD_LEN - MAD_HEADER_LEN];

/// A value that lies `width` bits from bit `at` on.
pub(super) trait Field {
    fn read(data: &Data, at: usize, width: usize) -> Self;
    fn write(&self, data: &mut Data, at: usize, width: usize);
}

fn read_bits(data: &Data, at: usize, width: usize) -> u64 {
    (at..at + width).fold(0, |value, bit| value << 1 | u64::from(data[bit / 8] >> (7 - bit % 8) & 1))
}

fn write_bits(data: &mut Data, at: usize, width: usize, value: u64) {
    for (place, bit) in (at..at + width).rev().enumerate() {
        let mask = 1 << (7 - bit % 8);
        let set = value >> place & 1 != 0;
        data[bit / 8] = if set { data[bit / 8] | mask } else { data[bit / 8] & !mask };
    }
}

macro_rules! integer_fields {
    ($($int:ty)*) => {
        $(impl Field for $int {
            fn read(data: &Data, at: usize, width: usize) -> $int {
                read_bits(data, at, width) as $int
            }

            fn write(&self, data: &mut Data, at: usize, width: usize) {
                write_bits(data, at, width, u64::from(*self));
            }
        })*
    };
}

integer_fields!(u8 u16 u32 u64);

impl Field for bool {
    fn read(data: &Data, at: usize, width: usize) -> bool {
        read_bits(data, at, width) != 0
    }

    fn write(&self, data: &mut Data, at: usize, width: usize) {
        write_bits(data, at, width, u64::from(*self));
    }
}

/// Bytes that begin on a byte; their number is the type's.
impl<const N: usize> Field for [u8; N] {
    fn read(data: &Data, at: usize, _: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&data[at / 8..at / 8 + N]);
        bytes
    }

    fn write(&self, data: &mut Data, at: usize, _: usize) {
        data[at / 8..at / 8 + N].copy_from_slice(self);
    }
}

/// A struct whose fields are bit fields: `name: type = [byte, bit, width]`, relative to where it begins.
macro_rules! layout {
    (
        $(#[$meta:meta])*
        $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty = [$byte:literal, $bit:literal, $width:expr],)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl Field for $name {
            fn read(data: &Data, at: usize, _: usize) -> $name {
                $name { $($field: Field::read(data, at + $byte * 8 + $bit, $width),)* }
            }

            fn write(&self, data: &mut Data, at: usize, _: usize) {
                $(self.$field.write(data, at + $byte * 8 + $bit, $width);)*
            }
        }

        #[cfg(test)]
        impl $name {
            /// Name, first bit and width of each field.
            pub(super) const FIELDS: &[(&'static str, usize, usize)] =
                &[$((stringify!($field), $byte * 8 + $bit, $width),)*];
        }
    };
}
pub(super) use layout;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_in_network_order() {
        let mut data: Data = [0; _];
        write_bits(&mut data, 4, 12, 0xabc);
        write_bits(&mut data, 16, 5, 20);
        write_bits(&mut data, 21, 3, 0xff);
        assert_eq!(&data[..4], &[0x0a, 0xbc, 20 << 3 | 7, 0]);
        assert_eq!(read_bits(&data, 4, 12), 0xabc);
        assert_eq!(read_bits(&data, 16, 5), 20);
        write_bits(&mut data, 4, 12, 0);
        assert_eq!(&data[..4], &[0, 0, 20 << 3 | 7, 0]);
        write_bits(&mut data, 0, 64, u64::MAX - 1);
        assert_eq!(read_bits(&data, 0, 64), u64::MAX - 1);
    }
}
