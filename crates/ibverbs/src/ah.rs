//! Address handles.

use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::abi::{consts, ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_global_route, ibv_grh, ibv_pd, ibv_wc};
use crate::context::{ContextObject, ContextRef};
use crate::convert;
use crate::entry::{MinusOne, Pointer, Refusal, Status, Verb, verb};
use crate::handle::{Shared, handle, handle_number};
use crate::pd::PdObject;

/// `struct ibv_ah` and what is behind it.
#[repr(C)]
pub struct AhObject {
    c: Shared<ibv_ah>,
    pub(crate) ah: Arc<ferroce::Ah>,
    _context: ContextRef,
}

handle!(AhObject, ibv_ah, "ah");

/// Makes an address handle.
///
/// # Safety
///
/// `pd` is NULL or live.
unsafe fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Verb<*mut ibv_ah> {
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    let ah = domain.pd().create_ah(&convert::ah_attr(attr))?;
    let context = domain.context.clone();
    let c = ibv_ah { context: context.as_ptr(), pd, handle: handle_number() };
    AhObject::publish(|_| Ok(AhObject { c: Shared::new(c), ah, _context: context }))
}

/// The attributes of an address handle back to the sender of a received datagram.
fn reply_attr(gids: &[ferroce::GidEntry], wc: &ibv_wc, grh: Option<&ibv_grh>, port_num: u8) -> Verb<ibv_ah_attr> {
    let mut attr =
        ibv_ah_attr { dlid: wc.slid, sl: wc.sl, src_path_bits: wc.dlid_path_bits, port_num, ..ibv_ah_attr::default() };
    if wc.wc_flags & consts::WC_GRH == 0 {
        return Ok(attr);
    }
    let grh = grh.ok_or_else(|| Refusal::invalid("grh is NULL, but the completion says that there is one"))?;
    let header = Header::read(grh)?;
    let sgid_index = gids.iter().position(|gid| gid.gid == header.destination).ok_or_else(|| {
        Refusal::invalid("the datagram was sent to an address that is not in the GID table (any more)")
    })?;
    attr.is_global = 1;
    attr.grh = ibv_global_route {
        dgid: ibv_gid { raw: header.source },
        flow_label: header.flow_label,
        sgid_index: sgid_index as u8,
        hop_limit: 0xff,
        traffic_class: header.traffic_class,
    };
    Ok(attr)
}

/// What the 40 bytes in front of a UD payload tell.
struct Header {
    source: [u8; 16],
    destination: [u8; 16],
    traffic_class: u8,
    flow_label: u32,
}

impl Header {
    /// RoCE v2 over IPv6 has the IPv6 header there; over IPv4, the IPv4 header lies in the last 20 bytes (IBA annex A17).
    fn read(grh: &ibv_grh) -> Verb<Header> {
        let mut bytes = [0u8; size_of::<ibv_grh>()];
        bytes[..4].copy_from_slice(&grh.version_tclass_flow.to_ne_bytes());
        bytes[4..6].copy_from_slice(&grh.paylen.to_ne_bytes());
        bytes[6] = grh.next_hdr;
        bytes[7] = grh.hop_limit;
        bytes[8..24].copy_from_slice(&grh.sgid.raw);
        bytes[24..].copy_from_slice(&grh.dgid.raw);
        let ipv4 = &bytes[20..];
        if ipv4[0] == 0x45 && checksum(ipv4) == 0 {
            let address =
                |at: usize| Ipv4Addr::new(ipv4[at], ipv4[at + 1], ipv4[at + 2], ipv4[at + 3]).to_ipv6_mapped().octets();
            return Ok(Header { source: address(12), destination: address(16), traffic_class: ipv4[1], flow_label: 0 });
        }
        let first = u32::from_be(grh.version_tclass_flow);
        if first >> 28 != 6 {
            return Err(Refusal::invalid("grh holds neither an IPv4 nor an IPv6 header"));
        }
        Ok(Header {
            source: grh.sgid.raw,
            destination: grh.dgid.raw,
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0xf_ffff,
        })
    }
}

/// The Internet checksum: 0 over a header whose own checksum is right.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !(((folded & 0xffff) + (folded >> 16)) as u16)
}

verb! {
    /// `ibv_create_ah(3)`.
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> Pointer<ibv_ah> {
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: by the contract of the verb; not NULL, so it points to a structure of the caller.
        unsafe { create(pd, &attr.read()) }
    }

    /// `ibv_init_ah_from_wc(3)`.
    fn ibv_init_ah_from_wc(
        context: *mut ibv_context,
        port_num: u8,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        ah_attr: *mut ibv_ah_attr,
    ) -> MinusOne {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if wc.is_null() || ah_attr.is_null() {
            return Err(Refusal::invalid("wc or ah_attr is NULL"));
        }
        // SAFETY: not NULL, so they point to structures of the caller. A GRH need not be aligned in a receive buffer.
        unsafe {
            let grh = (!grh.is_null()).then(|| grh.read_unaligned());
            ah_attr.write(reply_attr(&context.device().gids(), &wc.read(), grh.as_ref(), port_num)?);
        }
        Ok(0)
    }

    /// `ibv_create_ah_from_wc(3)`.
    fn ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port_num: u8) -> Pointer<ibv_ah> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { PdObject::of(pd) }?.context.clone();
        if wc.is_null() {
            return Err(Refusal::invalid("wc is NULL"));
        }
        // SAFETY: as in `ibv_init_ah_from_wc`.
        unsafe {
            let grh = (!grh.is_null()).then(|| grh.read_unaligned());
            create(pd, &reply_attr(&context.device().gids(), &wc.read(), grh.as_ref(), port_num)?)
        }
    }

    /// `ibv_destroy_ah(3)`.
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { AhObject::of(ah) }?;
        // SAFETY: requests that were posted hold the path themselves; the program has no use for the pointer any more.
        drop(unsafe { AhObject::reclaim(ah) });
        Ok(())
    }

    /// Used by providers and old connection managers to fill in a MAC address; here packets find their way by IP.
    fn ibv_resolve_eth_l2_from_gid(
        context: *mut ibv_context,
        attr: *mut ibv_ah_attr,
        _mac: *mut [u8; 6],
        _vid: *mut u16,
    ) -> MinusOne {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        Err(Refusal::unsupported("link layer addresses are the kernel's business: packets leave through its routing"))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn mapped(address: [u8; 4]) -> [u8; 16] {
        Ipv4Addr::from(address).to_ipv6_mapped().octets()
    }

    fn wc() -> ibv_wc {
        ibv_wc {
            wr_id: 0,
            status: 0,
            opcode: 128,
            vendor_err: 0,
            byte_len: 44,
            imm_data: 0,
            qp_num: 17,
            src_qp: 18,
            wc_flags: consts::WC_GRH,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        }
    }

    fn grh(bytes: &[u8; 40]) -> ibv_grh {
        // SAFETY: plain numbers of the same size.
        unsafe { bytes.as_ptr().cast::<ibv_grh>().read_unaligned() }
    }

    fn gids() -> Vec<ferroce::GidEntry> {
        let of = |gid: [u8; 16]| ferroce::GidEntry { gid, addr: ferroce::address_of(&gid) };
        vec![of(mapped([10, 0, 0, 1])), of(Ipv6Addr::LOCALHOST.octets())]
    }

    /// From 10.0.0.2 to 10.0.0.1, TOS 0x68, with a right checksum.
    fn ipv4() -> [u8; 40] {
        let mut bytes = [0xa5u8; 40];
        let header = &mut bytes[20..];
        header.copy_from_slice(&[0x45, 0x68, 0, 60, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
        let sum = checksum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    #[test]
    fn the_way_back_over_ipv4() {
        let attr = reply_attr(&gids(), &wc(), Some(&grh(&ipv4())), 1).unwrap();
        assert_eq!((attr.is_global, attr.port_num, attr.grh.sgid_index, attr.grh.traffic_class), (1, 1, 0, 0x68));
        assert_eq!(attr.grh.dgid.raw, mapped([10, 0, 0, 2]));
    }

    #[test]
    fn the_way_back_over_ipv6() {
        let mut bytes = [0u8; 40];
        bytes[..4].copy_from_slice(&0x6123_4567u32.to_be_bytes());
        bytes[8..24].copy_from_slice(&[9; 16]);
        bytes[24..].copy_from_slice(&Ipv6Addr::LOCALHOST.octets());
        let attr = reply_attr(&gids(), &wc(), Some(&grh(&bytes)), 1).unwrap();
        assert_eq!((attr.grh.sgid_index, attr.grh.traffic_class, attr.grh.flow_label), (1, 0x12, 0x34567));
        assert_eq!(attr.grh.dgid.raw, [9; 16]);
    }

    #[test]
    fn rubbish_and_strangers_are_refused() {
        let mut broken = ipv4();
        broken[39] ^= 1;
        assert_eq!(reply_attr(&gids(), &wc(), Some(&grh(&broken)), 1).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(reply_attr(&gids()[1..], &wc(), Some(&grh(&ipv4())), 1).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(reply_attr(&gids(), &wc(), None, 1).unwrap_err().errno(), libc::EINVAL);
        let without = ibv_wc { wc_flags: 0, ..wc() };
        assert_eq!(reply_attr(&gids(), &without, None, 1).unwrap().is_global, 0);
    }
}
