//! Headers of tag matching, with which the payload of a SEND begins: what cards, and libibverbs' `tm_types.h`, agree on.

/// What a message with a tag matching header is: `enum ibv_tmh_op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TmOp(pub u8);

impl TmOp {
    /// Not for matching: the header is the first byte only.
    pub const NO_TAG: TmOp = TmOp(0);
    /// A rendezvous request: an [`Rvh`] follows, which tells where the receiver reads the data.
    pub const RNDV: TmOp = TmOp(1);
    /// The data of a rendezvous request was read.
    pub const FIN: TmOp = TmOp(2);
    /// The data follows.
    pub const EAGER: TmOp = TmOp(3);
}

/// Tag matching header: `struct ibv_tmh`.
///
/// | byte | content |
/// |---|---|
/// | 0 | operation |
/// | 1 to 3 | reserved: zero; not looked at |
/// | 4 to 7 | the sender's own data |
/// | 8 to 15 | tag |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tmh {
    /// Operation.
    pub op: TmOp,
    /// The sender's own data.
    pub app_ctx: u32,
    /// Tag.
    pub tag: u64,
}

/// Bytes of a [`Tmh`].
pub const TMH_LEN: usize = 16;

impl Tmh {
    /// Reads the beginning of a message. `None`: it is too short.
    pub fn parse(message: &[u8]) -> Option<Tmh> {
        let ([op, _, _, _, c0, c1, c2, c3], rest) = message.split_first_chunk()?;
        let (tag, _) = rest.split_first_chunk()?;
        Some(Tmh { op: TmOp(*op), app_ctx: u32::from_be_bytes([*c0, *c1, *c2, *c3]), tag: u64::from_be_bytes(*tag) })
    }

    /// Its bytes.
    pub const fn bytes(&self) -> [u8; TMH_LEN] {
        let [c0, c1, c2, c3] = self.app_ctx.to_be_bytes();
        let [t0, t1, t2, t3, t4, t5, t6, t7] = self.tag.to_be_bytes();
        [self.op.0, 0, 0, 0, c0, c1, c2, c3, t0, t1, t2, t3, t4, t5, t6, t7]
    }
}

/// Rendezvous header: `struct ibv_rvh`. Where the data of a rendezvous request is: address, key and length, as a READ names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rvh {
    /// Address.
    pub va: u64,
    /// Key.
    pub rkey: u32,
    /// Bytes.
    pub len: u32,
}

/// Bytes of an [`Rvh`].
pub const RVH_LEN: usize = 16;

impl Rvh {
    /// Reads what follows the [`Tmh`] of a rendezvous request. `None`: it is too short.
    pub fn parse(bytes: &[u8]) -> Option<Rvh> {
        let (va, rest) = bytes.split_first_chunk()?;
        let (rkey, rest) = rest.split_first_chunk()?;
        let (len, _) = rest.split_first_chunk()?;
        Some(Rvh { va: u64::from_be_bytes(*va), rkey: u32::from_be_bytes(*rkey), len: u32::from_be_bytes(*len) })
    }

    /// Its bytes.
    pub const fn bytes(&self) -> [u8; RVH_LEN] {
        let [v0, v1, v2, v3, v4, v5, v6, v7] = self.va.to_be_bytes();
        let [k0, k1, k2, k3] = self.rkey.to_be_bytes();
        let [l0, l1, l2, l3] = self.len.to_be_bytes();
        [v0, v1, v2, v3, v4, v5, v6, v7, k0, k1, k2, k3, l0, l1, l2, l3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_lie_as_tm_types_h_has_them() {
        let tmh = Tmh { op: TmOp::RNDV, app_ctx: 0x0102_0304, tag: 0x1112_1314_1516_1718 };
        let bytes = [1, 0, 0, 0, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
        assert_eq!(tmh.bytes(), bytes);
        assert_eq!(Tmh::parse(&bytes), Some(tmh));
        let rvh = Rvh { va: 0x2122_2324_2526_2728, rkey: 0x3132_3334, len: 0x4142_4344 };
        let bytes = [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34, 0x41, 0x42, 0x43, 0x44];
        assert_eq!(rvh.bytes(), bytes);
        assert_eq!(Rvh::parse(&bytes), Some(rvh));
    }

    #[test]
    fn what_is_too_short_is_no_header_and_unknown_operations_survive() {
        let bytes = [0xee; 20];
        assert!((0..TMH_LEN).all(|len| Tmh::parse(&bytes[..len]).is_none()));
        assert!((0..RVH_LEN).all(|len| Rvh::parse(&bytes[..len]).is_none()));
        assert_eq!(Tmh::parse(&bytes).map(|tmh| tmh.op), Some(TmOp(0xee)));
    }
}
