//! Flow steering: rules from C to Ferroce's.

use std::sync::Arc;

use ferroce::flow::{
    EthFilter, FlowAttr, FlowCounters, FlowKind, FlowSpec, Ipv4Filter, Ipv6Filter, Masked, PortFilter,
};

use crate::abi::consts::{flow, flow_spec};
use crate::abi::{
    ibv_flow, ibv_flow_attr, ibv_flow_eth_filter, ibv_flow_ipv4_ext_filter, ibv_flow_ipv4_filter, ibv_flow_ipv6_filter,
    ibv_flow_spec_action_drop, ibv_flow_spec_action_tag, ibv_flow_spec_counter_action, ibv_flow_spec_hdr,
    ibv_flow_spec_of, ibv_flow_tcp_udp_filter, ibv_qp,
};
use crate::context::ContextRef;
use crate::counters::CountersObject;
use crate::entry::{Pointer, Refusal, Status, Verb, slot};
use crate::handle::{Shared, handle, handle_number};
use crate::qp::QpObject;

/// `struct ibv_flow` and what is behind it.
#[repr(C)]
pub(crate) struct FlowObject {
    c: Shared<ibv_flow>,
    flow: Arc<ferroce::Flow>,
    _context: ContextRef,
}

handle!(FlowObject, ibv_flow, "flow");

/// The rule in `attr` and the specifications behind it.
///
/// # Safety
///
/// Behind `attr` lie as many specifications as it says, each as long as it says itself.
unsafe fn rule(attr: *const ibv_flow_attr) -> Verb<FlowAttr> {
    // SAFETY: by the contract above.
    let head = unsafe { attr.read_unaligned() };
    if head.comp_mask != 0 {
        return Err(Refusal::invalid(format!("comp_mask {:#x} has unknown bits", head.comp_mask)));
    }
    if head.port != 1 {
        return Err(Refusal::invalid(format!("port is {}: the device has port 1 only", head.port)));
    }
    if head.flags & flow::EGRESS != 0 {
        return Err(Refusal::unsupported("flags: IBV_FLOW_ATTR_FLAGS_EGRESS: frames that are sent are not steered"));
    }
    if head.flags & !flow::DONT_TRAP != 0 {
        return Err(Refusal::invalid(format!("flags {:#x} are unknown", head.flags)));
    }
    let mut specs = Vec::with_capacity(head.num_of_specs.into());
    let mut counters = None;
    let mut at = attr.wrapping_add(1).cast::<u8>();
    for _ in 0..head.num_of_specs {
        // SAFETY: by the contract above a specification starts here.
        at = match unsafe { counting(at) }? {
            Some((found, size)) => {
                if counters.replace(found).is_some() {
                    return Err(Refusal::invalid("two specifications are IBV_FLOW_SPEC_ACTION_COUNT"));
                }
                at.wrapping_add(size.into())
            }
            None => {
                // SAFETY: as above.
                let (spec, size) = unsafe { specification(at) }?;
                specs.push(spec);
                at.wrapping_add(size.into())
            }
        };
    }
    let (priority, dont_trap) = (head.priority, head.flags & flow::DONT_TRAP != 0);
    Ok(FlowAttr { kind: kind(head.type_)?, priority, dont_trap, specs, counters })
}

/// `enum ibv_flow_attr_type`.
fn kind(number: u32) -> Verb<FlowKind> {
    match number {
        0 => Ok(FlowKind::Normal),
        1 => Ok(FlowKind::AllDefault),
        2 => Ok(FlowKind::McDefault),
        3 => Ok(FlowKind::Sniffer),
        other => Err(Refusal::invalid(format!("type {other} of the flow is unknown"))),
    }
}

/// The counters of a flow, if that is the specification, and its length.
///
/// # Safety
///
/// As for [`specification`].
unsafe fn counting(at: *const u8) -> Verb<Option<(Arc<FlowCounters>, u16)>> {
    // SAFETY: by the contract above; all of them begin so.
    let head = unsafe { at.cast::<ibv_flow_spec_hdr>().read_unaligned() };
    if head.type_ != flow_spec::ACTION_COUNT {
        return Ok(None);
    }
    // SAFETY: by the contract above.
    let action = unsafe { sized::<ibv_flow_spec_counter_action>(at, head) }?;
    // SAFETY: the program has them from ibv_create_counters.
    let object = unsafe { CountersObject::of(action.counters) }?;
    Ok(Some((object.counters.clone(), head.size)))
}

/// One specification, and its length.
///
/// # Safety
///
/// At `at` lies a specification, as long as it says itself.
unsafe fn specification(at: *const u8) -> Verb<(FlowSpec, u16)> {
    // SAFETY: by the contract above; all of them begin so.
    let head = unsafe { at.cast::<ibv_flow_spec_hdr>().read_unaligned() };
    let spec = match head.type_ {
        // SAFETY: by the contract above, for each of them.
        flow_spec::ETH => FlowSpec::Eth(unsafe { masked(at, head, eth) }?),
        // SAFETY: as above.
        flow_spec::IPV4 => FlowSpec::Ipv4(unsafe { masked(at, head, ipv4) }?),
        // SAFETY: as above.
        flow_spec::IPV4_EXT => FlowSpec::Ipv4(unsafe { masked(at, head, ipv4_ext) }?),
        // SAFETY: as above.
        flow_spec::IPV6 => FlowSpec::Ipv6(unsafe { masked(at, head, ipv6) }?),
        // SAFETY: as above.
        flow_spec::TCP => FlowSpec::Tcp(unsafe { masked(at, head, ports) }?),
        // SAFETY: as above.
        flow_spec::UDP => FlowSpec::Udp(unsafe { masked(at, head, ports) }?),
        // SAFETY: as above.
        flow_spec::ACTION_TAG => FlowSpec::Tag(unsafe { sized::<ibv_flow_spec_action_tag>(at, head) }?.tag_id),
        flow_spec::ACTION_DROP => {
            // SAFETY: as above.
            unsafe { sized::<ibv_flow_spec_action_drop>(at, head) }?;
            FlowSpec::Drop
        }
        other => return Err(not_available(other)),
    };
    Ok((spec, head.size))
}

/// Of the rest, some are in verbs.h.
fn not_available(kind: u32) -> Refusal {
    const KNOWN: [u32; 5] = [0x34, 0x50, 0x51, 0x60, 0x1002];
    if kind & flow_spec::INNER != 0 || KNOWN.contains(&kind) {
        return Refusal::unsupported(format!(
            "specification of type {kind:#x}: only ETH, IPV4, IPV4_EXT, IPV6, TCP, UDP, ACTION_TAG, ACTION_DROP and ACTION_COUNT are available"
        ));
    }
    Refusal::invalid(format!("specification of type {kind:#x} is unknown"))
}

/// Reads a specification of a known kind.
///
/// # Safety
///
/// At `at` lie `head.size` bytes.
unsafe fn sized<T: Copy>(at: *const u8, head: ibv_flow_spec_hdr) -> Verb<T> {
    if usize::from(head.size) != size_of::<T>() {
        return Err(Refusal::invalid(format!(
            "specification of type {:#x} has size {}, which should be {}",
            head.type_,
            head.size,
            size_of::<T>()
        )));
    }
    // SAFETY: by the contract above, and the length was just checked; specifications may lie unaligned.
    Ok(unsafe { at.cast::<T>().read_unaligned() })
}

/// Reads a specification of a header.
///
/// # Safety
///
/// As for [`sized`].
unsafe fn masked<C: Copy, F>(at: *const u8, head: ibv_flow_spec_hdr, filter: fn(C) -> F) -> Verb<Masked<F>> {
    // SAFETY: by the contract above.
    let spec = unsafe { sized::<ibv_flow_spec_of<C>>(at, head) }?;
    Ok(Masked { value: filter(spec.val), mask: filter(spec.mask) })
}

fn eth(c: ibv_flow_eth_filter) -> EthFilter {
    let (ether_type, vlan_tag) = (u16::from_be(c.ether_type), u16::from_be(c.vlan_tag));
    EthFilter { dst_mac: c.dst_mac, src_mac: c.src_mac, ether_type, vlan_tag }
}

fn ipv4(c: ibv_flow_ipv4_filter) -> Ipv4Filter {
    Ipv4Filter { src: c.src_ip.to_ne_bytes(), dst: c.dst_ip.to_ne_bytes(), ..Ipv4Filter::default() }
}

fn ipv4_ext(c: ibv_flow_ipv4_ext_filter) -> Ipv4Filter {
    let addresses = ipv4(ibv_flow_ipv4_filter { src_ip: c.src_ip, dst_ip: c.dst_ip });
    Ipv4Filter { proto: c.proto, tos: c.tos, ttl: c.ttl, flags: c.flags, ..addresses }
}

fn ipv6(c: ibv_flow_ipv6_filter) -> Ipv6Filter {
    Ipv6Filter {
        src: c.src_ip,
        dst: c.dst_ip,
        flow_label: u32::from_be(c.flow_label),
        next_hdr: c.next_hdr,
        traffic_class: c.traffic_class,
        hop_limit: c.hop_limit,
    }
}

fn ports(c: ibv_flow_tcp_udp_filter) -> PortFilter {
    PortFilter { dst: u16::from_be(c.dst_port), src: u16::from_be(c.src_port) }
}

slot! {
    /// `ibv_create_flow(3)`.
    fn create_flow as "ibv_create_flow" (qp: *mut ibv_qp, attr: *mut ibv_flow_attr) -> Pointer<ibv_flow> {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("flow_attr is NULL"));
        }
        // SAFETY: by the contract of the verb; not NULL.
        let flow = object.qp.create_flow(&unsafe { rule(attr) }?)?;
        let context = object.context().clone();
        let c = ibv_flow { comp_mask: 0, context: context.as_ptr(), handle: handle_number() };
        FlowObject::publish(|_| Ok(FlowObject { c: Shared::new(c), flow, _context: context }))
    }

    /// `ibv_destroy_flow(3)`.
    fn destroy_flow as "ibv_destroy_flow" (flow: *mut ibv_flow) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { FlowObject::of(flow) }?.flow.destroy()?;
        // SAFETY: the flow is gone, so the program has no use for the pointer any more.
        drop(unsafe { FlowObject::reclaim(flow) });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rule as C programs lay it out.
    fn laid_out(attr: ibv_flow_attr, specs: &[Vec<u8>]) -> Vec<u8> {
        let head = ibv_flow_attr { num_of_specs: specs.len() as u8, ..attr };
        [bytes(head)].into_iter().chain(specs.iter().cloned()).collect::<Vec<_>>().concat()
    }

    fn bytes<T: Copy>(value: T) -> Vec<u8> {
        // SAFETY: the structures of this test are plain numbers, made from zeroed memory; their padding is read as it is.
        unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) }.to_vec()
    }

    fn spec<T: Copy>(type_: u32, val: T, mask: T) -> Vec<u8> {
        let size = size_of::<ibv_flow_spec_of<T>>();
        let mut place = vec![0u8; size];
        let whole = ibv_flow_spec_of { type_, size: size as u16, val, mask };
        // SAFETY: `place` has the structure's length.
        unsafe { place.as_mut_ptr().cast::<ibv_flow_spec_of<T>>().write_unaligned(whole) };
        place
    }

    fn parse(bytes: &[u8]) -> Verb<FlowAttr> {
        // SAFETY: the bytes were laid out as C programs do it.
        unsafe { rule(bytes.as_ptr().cast()) }
    }

    fn attr() -> ibv_flow_attr {
        ibv_flow_attr { port: 1, priority: 3, ..ibv_flow_attr::default() }
    }

    #[test]
    fn specifications_are_read_one_after_the_other() {
        let eth_filter = |ether_type: u16, tag: u16| ibv_flow_eth_filter {
            dst_mac: [1; 6],
            src_mac: [2; 6],
            ether_type: ether_type.to_be(),
            vlan_tag: tag.to_be(),
        };
        let udp = |dst: u16, src: u16| ibv_flow_tcp_udp_filter { dst_port: dst.to_be(), src_port: src.to_be() };
        let mut tag = spec(flow_spec::ACTION_TAG, 0u8, 0u8);
        tag.resize(12, 0);
        tag[4..6].copy_from_slice(&12u16.to_ne_bytes());
        tag[8..].copy_from_slice(&77u32.to_ne_bytes());
        let ip = ibv_flow_ipv4_ext_filter {
            src_ip: u32::from_ne_bytes([10, 0, 0, 1]),
            dst_ip: u32::from_ne_bytes([10, 0, 0, 2]),
            proto: 17,
            tos: 1,
            ttl: 64,
            flags: 2,
        };
        let bytes = laid_out(
            ibv_flow_attr { flags: flow::DONT_TRAP, ..attr() },
            &[
                spec(flow_spec::ETH, eth_filter(0x0800, 5), eth_filter(0xffff, 0xfff)),
                spec(flow_spec::IPV4_EXT, ip, ibv_flow_ipv4_ext_filter::default()),
                spec(flow_spec::UDP, udp(4791, 7), udp(0xffff, 0)),
                tag,
            ],
        );
        let eth = |ether_type, vlan_tag| EthFilter { dst_mac: [1; 6], src_mac: [2; 6], ether_type, vlan_tag };
        let found = parse(&bytes).expect("a good rule");
        let value = Ipv4Filter { src: [10, 0, 0, 1], dst: [10, 0, 0, 2], proto: 17, tos: 1, ttl: 64, flags: 2 };
        let specs = vec![
            FlowSpec::Eth(Masked { value: eth(0x0800, 5), mask: eth(0xffff, 0xfff) }),
            FlowSpec::Ipv4(Masked { value, mask: Ipv4Filter::default() }),
            FlowSpec::Udp(Masked { value: PortFilter { dst: 4791, src: 7 }, mask: PortFilter { dst: 0xffff, src: 0 } }),
            FlowSpec::Tag(77),
        ];
        assert_eq!(found, FlowAttr { kind: FlowKind::Normal, priority: 3, dont_trap: true, specs, counters: None });
    }

    #[test]
    fn what_is_wrong_or_not_there_has_its_errno() {
        let errno = |bytes: Vec<u8>| parse(&bytes).expect_err("must be refused").errno();
        assert_eq!(errno(laid_out(ibv_flow_attr { port: 2, ..attr() }, &[])), libc::EINVAL);
        assert_eq!(errno(laid_out(ibv_flow_attr { comp_mask: 1, ..attr() }, &[])), libc::EINVAL);
        assert_eq!(errno(laid_out(ibv_flow_attr { type_: 4, ..attr() }, &[])), libc::EINVAL);
        assert_eq!(errno(laid_out(ibv_flow_attr { flags: 1, ..attr() }, &[])), libc::EINVAL);
        assert_eq!(errno(laid_out(ibv_flow_attr { flags: 4, ..attr() }, &[])), libc::EOPNOTSUPP);
        let odd = |type_| spec(type_, ibv_flow_ipv4_filter::default(), ibv_flow_ipv4_filter::default());
        assert_eq!(errno(laid_out(attr(), &[odd(flow_spec::ETH)])), libc::EINVAL, "its size is another's");
        assert_eq!(errno(laid_out(attr(), &[odd(flow_spec::IPV4 | flow_spec::INNER)])), libc::EOPNOTSUPP);
        assert_eq!(errno(laid_out(attr(), &[odd(0x50)])), libc::EOPNOTSUPP);
        assert_eq!(errno(laid_out(attr(), &[odd(0x99)])), libc::EINVAL);
        assert!(parse(&laid_out(attr(), &[odd(flow_spec::IPV4)])).is_ok());
    }
}
