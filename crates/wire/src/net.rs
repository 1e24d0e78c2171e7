//! What IP and UDP say about a packet.

use core::net::IpAddr;

/// IP and UDP facts of a received packet, as far as the receiver knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetHeader {
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// TOS or traffic class (0 if unknown).
    pub tclass: u8,
    /// TTL or hop limit (64 if unknown).
    pub hop_limit: u8,
    /// UDP payload bytes: BTH to ICRC.
    pub udp_len: u16,
}
