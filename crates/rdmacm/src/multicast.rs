//! Multicast. RoCE has no subnet administrator to ask: a group is joined by attaching the id's queue pair to it, which makes the host
//! join on the interface. The event says how to send to the group; the queue pair is attached when the program takes the event.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use ferroce_abi::cm::ferroce_cm_path;
use ferroce_abi::{ibv_ah_attr, ibv_gid, ibv_global_route};
use libc::{sockaddr, sockaddr_in, sockaddr_in6};

use crate::abi::{UDP_QKEY, event, rdma_cm_id, rdma_cm_join_mc_attr_ex, rdma_event_param, rdma_ud_param, sockaddr_ib};
use crate::entry::{Call, Refusal, check, given, rdma};
use crate::id::IdObject;
use crate::{addr, qp, verbs};

/// The number of no queue pair: datagrams to groups go there.
const MULTICAST_QPN: u32 = 0xff_ffff;
/// Programs do not say how far a group reaches; the kernel's RDMA-CM takes the same.
const HOP_LIMIT: u8 = 64;
/// Groups that one id is in, at most.
const JOINS_PER_ID_MAX: usize = 64;

/// The bits of `rdma_cm_join_mc_attr_ex.comp_mask`.
const ATTR_ADDRESS: u32 = 1;
const ATTR_FLAGS: u32 = 2;
/// `rdma_cm_join_mc_attr_ex.join_flags`.
const FULL_MEMBER: u32 = 0;
const SEND_ONLY: u32 = 1;

/// A group that an id joined.
pub(crate) struct Join {
    /// Names it within the id.
    number: u64,
    group: ibv_gid,
    /// The program's: it comes back in the event.
    context: usize,
    send_only: bool,
    /// The queue pair is attached by this join.
    attached: bool,
}

/// The GID of a multicast address. `AF_IB` brings one as it is.
fn group(addr: *const sockaddr) -> Call<ibv_gid> {
    // SAFETY: the program's, by the contract of the functions of C.
    let raw = match c_int::from(unsafe { given(addr, "the address") }?.sa_family) {
        // SAFETY: an address of this family; alignment is not relied on.
        libc::AF_INET => unsafe {
            let sin = addr.cast::<sockaddr_in>().read_unaligned();
            u128::from(u32::from_be(sin.sin_addr.s_addr)) | 0xffff << 32
        },
        // SAFETY: as above.
        libc::AF_INET6 => unsafe {
            u128::from_be_bytes(addr.cast::<sockaddr_in6>().read_unaligned().sin6_addr.s6_addr)
        },
        // SAFETY: as above.
        sockaddr_ib::FAMILY => unsafe { u128::from_be_bytes(addr.cast::<sockaddr_ib>().read_unaligned().sib_addr) },
        other => return Err(Refusal::invalid(format!("address family {other} has no multicast groups"))),
    };
    let is_v4 = raw >> 28 == 0xffff << 4 | 0xe;
    if !is_v4 && raw >> 120 != 0xff {
        return Err(Refusal::invalid(
            "not a multicast address: those of IPv4 begin with 224 to 239, those of IPv6 with ff",
        ));
    }
    Ok(ibv_gid { raw: raw.to_be_bytes() })
}

fn join(id: &IdObject, addr: *const sockaddr, context: *mut c_void, send_only: bool) -> Call<c_int> {
    let group = group(addr)?;
    if !id.is_datagram() {
        return Err(Refusal::invalid("the id is not for datagrams; use RDMA_PS_UDP or RDMA_PS_IPOIB"));
    }
    // SAFETY: a field that is the library's during calls about the id.
    if unsafe { (*id.as_ptr()).verbs.is_null() } {
        return Err(Refusal::invalid("the id has no device yet; call rdma_bind_addr or rdma_resolve_addr before"));
    }
    let number = {
        let mut inner = id.inner();
        if inner.joins.len() >= JOINS_PER_ID_MAX {
            return Err(Refusal::new(libc::ENOMEM, format!("the id is in {JOINS_PER_ID_MAX} groups already")));
        }
        let number = inner.next_join;
        inner.next_join += 1;
        inner.joins.push(Join { number, group, context: context as usize, send_only, attached: false });
        number
    };
    id.raise_joined(number);
    id.complete()
}

/// The path of an id's own address: what sending to a group needs of it.
fn source(id: &IdObject) -> Call<ferroce_cm_path> {
    let mut path = MaybeUninit::<ferroce_cm_path>::uninit();
    // SAFETY: the field is the library's during calls about the id; room for a path, which is written when the call succeeds.
    unsafe {
        let local = addr::plain(&(*id.as_ptr()).route.addr.src);
        check(verbs::ferroce_cm_locate(local, path.as_mut_ptr()))?;
        Ok(path.assume_init())
    }
}

/// The program takes the event of a join: attaches the queue pair, and gives the event's code, status and parameters. None: the group was
/// left meanwhile.
pub(crate) fn joined(id: &IdObject, number: u64) -> Option<(u32, c_int, rdma_event_param)> {
    let (group, context, send_only, traffic_class) = {
        let inner = id.inner();
        let join = inner.joins.iter().find(|join| join.number == number)?;
        (join.group, join.context, join.send_only, inner.tos)
    };
    let mut ud = rdma_ud_param {
        private_data: context as *const c_void,
        private_data_len: 0,
        ah_attr: ibv_ah_attr::default(),
        qp_num: MULTICAST_QPN,
        qkey: UDP_QKEY,
    };
    let outcome = source(id).and_then(|path| {
        ud.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: group,
                flow_label: 0,
                sgid_index: path.sgid_index as u8,
                hop_limit: HOP_LIMIT,
                traffic_class,
            },
            is_global: 1,
            port_num: 1,
            ..ibv_ah_attr::default()
        };
        if send_only { Ok(()) } else { attach(id, number, &group) }
    });
    let (code, status) = match outcome {
        Ok(()) => (event::MULTICAST_JOIN, 0),
        Err(refusal) => (event::MULTICAST_ERROR, -refusal.errno()),
    };
    Some((code, status, rdma_event_param { ud }))
}

fn attach(id: &IdObject, number: u64, group: &ibv_gid) -> Call<()> {
    let qp = qp::qp_of(id);
    if qp.is_null() {
        // The program attaches queue pairs itself.
        return Ok(());
    }
    // SAFETY: a live queue pair and a GID of ours.
    check(unsafe { verbs::ibv_attach_mcast(qp, group, 0) })?;
    if let Some(join) = id.inner().joins.iter_mut().find(|join| join.number == number) {
        join.attached = true;
    }
    Ok(())
}

fn leave(id: &IdObject, addr: *const sockaddr) -> Call<c_int> {
    let group = group(addr)?;
    let (join, last) = {
        let mut inner = id.inner();
        let at = inner.joins.iter().rposition(|join| join.group.raw == group.raw);
        let at = at.ok_or_else(|| Refusal::new(libc::EADDRNOTAVAIL, "the id did not join that group"))?;
        let join = inner.joins.remove(at);
        (join, !inner.joins.iter().any(|other| other.attached && other.group.raw == group.raw))
    };
    let qp = qp::qp_of(id);
    if join.attached && last && !qp.is_null() {
        // SAFETY: a live queue pair and a GID of ours. The program may have detached it itself.
        unsafe { verbs::ibv_detach_mcast(qp, &raw const group, 0) };
    }
    Ok(0)
}

rdma! {
    /// `rdma_join_multicast(3)`.
    fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int {
        // SAFETY: by the contract of the function.
        join(unsafe { IdObject::of(id) }?, addr, context, false)
    }

    /// `rdma_join_multicast_ex(3)`.
    fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id,
        attr: *mut rdma_cm_join_mc_attr_ex,
        context: *mut c_void,
    ) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let attr = unsafe { given(attr, "mc_join_attr") }?;
        if attr.comp_mask & !(ATTR_ADDRESS | ATTR_FLAGS) != 0 {
            return Err(Refusal::new(libc::ENOTSUP, "mc_join_attr.comp_mask has unknown bits"));
        }
        if attr.comp_mask != ATTR_ADDRESS | ATTR_FLAGS {
            return Err(Refusal::invalid("mc_join_attr.comp_mask: the address and the flags are needed"));
        }
        if !matches!(attr.join_flags, FULL_MEMBER | SEND_ONLY) {
            return Err(Refusal::invalid(format!("mc_join_attr.join_flags {} is unknown", attr.join_flags)));
        }
        join(object, attr.addr, context, attr.join_flags == SEND_ONLY)
    }

    /// `rdma_leave_multicast(3)`.
    fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
        // SAFETY: by the contract of the function.
        leave(unsafe { IdObject::of(id) }?, addr)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn v4(octets: [u8; 4]) -> sockaddr_in {
        sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: 0,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(octets) },
            sin_zero: [0; 8],
        }
    }

    fn gid_of<T>(addr: &T) -> Result<[u8; 16], c_int> {
        group(ptr::from_ref(addr).cast()).map(|gid| gid.raw).map_err(|refusal| refusal.errno())
    }

    #[test]
    fn groups_of_each_family() {
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
        assert_eq!(gid_of(&v4([239, 1, 2, 3])), Ok(mapped));
        for (octets, good) in [([223, 255, 255, 255], false), ([224, 0, 0, 0], true), ([240, 0, 0, 0], false)] {
            assert_eq!(gid_of(&v4(octets)).is_ok(), good, "{octets:?}");
        }
        let v6 = |first| {
            let mut s6_addr = [1; 16];
            s6_addr[0] = first;
            let address = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr },
                sin6_scope_id: 0,
            };
            gid_of(&address).map(|gid| gid == s6_addr)
        };
        assert_eq!((v6(0xff), v6(0xfe)), (Ok(true), Err(libc::EINVAL)));
        let raw = sockaddr_ib { sib_family: sockaddr_ib::FAMILY as u16, sib_addr: mapped, ..sockaddr_ib::default() };
        assert_eq!(gid_of(&raw), Ok(mapped));
        let mut other = v4([239, 1, 2, 3]);
        other.sin_family = libc::AF_UNIX as u16;
        assert_eq!(gid_of(&other), Err(libc::EINVAL));
    }
}
