//! Receive side scaling: a hash over a frame's addresses and ports chooses one of several receive queues (`ibv_create_qp_ex(3)`).
//! Fragments of a datagram go by its addresses alone, as only the first one has the ports: all of them reach one queue.

use super::frame::{Frame, Ip};
use super::{PROTO_TCP, PROTO_UDP};
use crate::error::CoreError;

/// Bytes of a key.
pub const RSS_KEY: usize = 40;
/// Entries of the largest table.
pub const RSS_TABLE_MAX: u32 = 128;

bitflags::bitflags! {
    /// `enum ibv_rx_hash_fields`: what is hashed. A frame that lacks it goes by what it has.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RssFields: u64 {
        /// Source address of IPv4.
        const SRC_IPV4 = 1 << 0;
        /// Destination address of IPv4.
        const DST_IPV4 = 1 << 1;
        /// Source address of IPv6.
        const SRC_IPV6 = 1 << 2;
        /// Destination address of IPv6.
        const DST_IPV6 = 1 << 3;
        /// Source port of TCP.
        const SRC_PORT_TCP = 1 << 4;
        /// Destination port of TCP.
        const DST_PORT_TCP = 1 << 5;
        /// Source port of UDP.
        const SRC_PORT_UDP = 1 << 6;
        /// Destination port of UDP.
        const DST_PORT_UDP = 1 << 7;
    }
}

/// Which of several receivers gets a frame.
#[derive(Clone, Debug)]
pub struct Rss<R> {
    key: [u8; RSS_KEY],
    fields: RssFields,
    /// As many as a power of two says.
    table: Vec<R>,
}

impl<R> Rss<R> {
    /// A table of receivers, of which the low bits of the hash choose one.
    ///
    /// # Errors
    /// EINVAL: a key of another length than [`RSS_KEY`], or a table whose length is not a power of two up to [`RSS_TABLE_MAX`].
    pub fn new(key: &[u8], fields: RssFields, table: Vec<R>) -> Result<Rss<R>, CoreError> {
        let key = key.try_into().map_err(|_| {
            CoreError::new(libc::EINVAL, format!("rx_hash_key_len is {}: the key has {RSS_KEY} bytes", key.len()))
        })?;
        check_table(table.len())?;
        Ok(Rss { key, fields, table })
    }

    /// All receivers; some of them more than once.
    pub fn receivers(&self) -> &[R] {
        &self.table
    }

    /// The receiver of a frame.
    pub fn choose(&self, frame: &[u8]) -> &R {
        &self.table[self.hash(frame) as usize & (self.table.len() - 1)]
    }

    /// Toeplitz hash of the chosen fields; 0 if the frame has none of them.
    fn hash(&self, frame: &[u8]) -> u32 {
        let Some(frame) = Frame::parse(frame) else { return 0 };
        let mut hash = Toeplitz { key: &self.key, at: 0, sum: 0 };
        let mut add = |field: RssFields, bytes: &[u8]| {
            if self.fields.contains(field) {
                hash.add(bytes);
            }
        };
        match &frame.ip {
            Some(Ip::V4(ip)) => {
                add(RssFields::SRC_IPV4, &ip.src);
                add(RssFields::DST_IPV4, &ip.dst);
            }
            Some(Ip::V6(ip)) => {
                add(RssFields::SRC_IPV6, &ip.src);
                add(RssFields::DST_IPV6, &ip.dst);
            }
            None => {}
        }
        for (proto, src, dst) in [
            (PROTO_TCP, RssFields::SRC_PORT_TCP, RssFields::DST_PORT_TCP),
            (PROTO_UDP, RssFields::SRC_PORT_UDP, RssFields::DST_PORT_UDP),
        ] {
            if let Some(ports) = frame.ports_of_whole(proto) {
                add(src, &ports.src.to_be_bytes());
                add(dst, &ports.dst.to_be_bytes());
            }
        }
        hash.sum
    }
}

/// Is this the length of a table?
///
/// # Errors
/// EINVAL: no.
pub fn check_table(len: usize) -> Result<(), CoreError> {
    if len.is_power_of_two() && len <= RSS_TABLE_MAX as usize {
        return Ok(());
    }
    Err(CoreError::new(
        libc::EINVAL,
        format!("log_ind_tbl_size: a table of {len} entries; there are powers of two up to {RSS_TABLE_MAX}"),
    ))
}

/// For each bit that is set, the 32 bits of the key that begin at its place are added (without carry).
struct Toeplitz<'a> {
    key: &'a [u8; RSS_KEY],
    /// Bits hashed so far.
    at: usize,
    sum: u32,
}

impl Toeplitz<'_> {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            for bit in (0..8).rev() {
                if byte >> bit & 1 != 0 {
                    self.sum ^= self.window();
                }
                self.at += 1;
            }
        }
    }

    fn window(&self) -> u32 {
        let (byte, shift) = (self.at / 8, self.at % 8);
        // The longest input, two addresses of IPv6 and ports, is 36 bytes: its last window ends with the key.
        let bits = (0..5).fold(0u64, |bits, i| bits << 8 | u64::from(self.key.get(byte + i).copied().unwrap_or(0)));
        (bits >> (8 - shift)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key and the hashes with which implementations of RSS are verified.
    const KEY: [u8; RSS_KEY] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
        0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
        0xbe, 0xac, 0x01, 0xfa,
    ];

    fn ipv4(src: [u8; 4], dst: [u8; 4], src_port: u16, dst_port: u16) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0]);
        frame.extend([src, dst].concat());
        frame.extend(src_port.to_be_bytes());
        frame.extend(dst_port.to_be_bytes());
        frame
    }

    fn hash(fields: RssFields, frame: &[u8]) -> u32 {
        Rss::new(&KEY, fields, vec![()]).expect("a good table").hash(frame)
    }

    #[test]
    fn hashes_are_those_that_implementations_are_verified_with() {
        let addresses = RssFields::SRC_IPV4 | RssFields::DST_IPV4;
        let all = addresses | RssFields::SRC_PORT_TCP | RssFields::DST_PORT_TCP;
        for (src, dst, ports, by_addresses, by_all) in [
            ([66, 9, 149, 187], [161, 142, 100, 80], (2794, 1766), 0x323e_8fc2, 0x51cc_c178),
            ([199, 92, 111, 2], [65, 69, 140, 83], (14230, 4739), 0xd718_262a, 0xc626_b0ea),
        ] {
            let frame = ipv4(src, dst, ports.0, ports.1);
            assert_eq!(hash(addresses, &frame), by_addresses);
            assert_eq!(hash(all, &frame), by_all);
            assert_eq!(hash(RssFields::SRC_PORT_UDP | RssFields::SRC_IPV6, &frame), 0, "it has none of these");
        }
        assert_eq!(hash(all, &[0; 5]), 0, "no frame");
    }

    /// A part of a datagram of UDP: `fragment` is that field of IPv4.
    fn ipv4_fragment(fragment: u16, payload: [u8; 8]) -> Vec<u8> {
        let mut frame = ipv4([66, 9, 149, 187], [161, 142, 100, 80], 0, 0);
        frame[20..22].copy_from_slice(&fragment.to_be_bytes());
        frame[23] = PROTO_UDP;
        frame.truncate(34);
        frame.extend(payload);
        frame
    }

    /// The same of IPv6: `fragment` is offset and flag of the extension header, None: there is none.
    fn ipv6_fragment(fragment: Option<u16>, payload: [u8; 8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 16, if fragment.is_some() { 44 } else { PROTO_UDP }, 64]);
        frame.extend((0..32).map(|i| 0x11 + 7 * i));
        if let Some(fragment) = fragment {
            frame.extend([PROTO_UDP, 0]);
            frame.extend(fragment.to_be_bytes());
            frame.extend([0, 0, 0, 9]);
        }
        frame.extend(payload);
        frame
    }

    #[test]
    fn all_fragments_of_a_datagram_go_to_one_queue() {
        const PORTS: [u8; 8] = [0x0a, 0xea, 0x06, 0xe6, 0, 0, 0, 0];
        const LATER: [u8; 8] = [0x5a; 8];
        let v4 = RssFields::SRC_IPV4 | RssFields::DST_IPV4;
        let v6 = RssFields::SRC_IPV6 | RssFields::DST_IPV6;
        let ports = RssFields::SRC_PORT_UDP | RssFields::DST_PORT_UDP;
        let fragments = [
            (v4, [ipv4_fragment(0x2000, PORTS), ipv4_fragment(0x2001, LATER), ipv4_fragment(0x0002, LATER)]),
            (v6, [1, 8 | 1, 16].map(|at| ipv6_fragment(Some(at), if at == 1 { PORTS } else { LATER }))),
        ];
        for (addresses, fragments) in fragments {
            let by_addresses = hash(addresses, &fragments[0]);
            assert_ne!(by_addresses, 0);
            for fragment in fragments {
                assert_eq!(hash(addresses | ports, &fragment), by_addresses, "{addresses:?}");
                assert_eq!(hash(ports, &fragment), 0, "{addresses:?}");
            }
        }
        // What is whole goes by its ports, also with a header of fragments (RFC 6946).
        let dont_fragment = 0x4000;
        for whole in [ipv4_fragment(0, PORTS), ipv4_fragment(dont_fragment, PORTS), ipv6_fragment(None, PORTS)] {
            assert_ne!(hash(ports, &whole), 0);
        }
        assert_eq!(hash(v6 | ports, &ipv6_fragment(Some(0), PORTS)), hash(v6 | ports, &ipv6_fragment(None, PORTS)));
    }

    #[test]
    fn low_bits_choose_and_bad_tables_are_refused() {
        let rss = Rss::new(&KEY, RssFields::SRC_IPV4, (0..8).collect()).expect("a good table");
        for last in 0..=255 {
            let frame = ipv4([10, 0, 0, last], [0; 4], 1, 2);
            assert_eq!(*rss.choose(&frame), rss.hash(&frame) & 7);
        }
        for table in [vec![], vec![1; 3], vec![1; 256]] {
            assert_eq!(Rss::new(&KEY, RssFields::SRC_IPV4, table).unwrap_err().errno, libc::EINVAL);
        }
        assert_eq!(Rss::new(&KEY[1..], RssFields::SRC_IPV4, vec![1]).unwrap_err().errno, libc::EINVAL);
    }
}
