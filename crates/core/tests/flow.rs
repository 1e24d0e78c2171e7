//! Flow steering against a model that knows what a frame was made of, and what becomes of frames that are any bytes.

use std::sync::Arc;

use ferroce_core::flow::{
    CounterKind, EthFilter, FlowAttr, FlowCounters, FlowKind, FlowRule, FlowSpec, FlowTable, Ipv4Filter, Ipv6Filter,
    MAX_FLOWS, Masked, PortFilter,
};
use proptest::prelude::*;

/// What a frame is made of.
#[derive(Clone, Debug)]
struct Parts {
    eth: EthFilter,
    tagged: bool,
    ip: Option<PartsIp>,
    l4: Option<(bool, PortFilter)>,
}

#[derive(Clone, Debug)]
enum PartsIp {
    V4(Ipv4Filter),
    /// With an extension header or not.
    V6(Ipv6Filter, bool),
}

fn proto(l4: Option<(bool, PortFilter)>) -> u8 {
    match l4 {
        Some((true, _)) => 6,
        Some((false, _)) => 17,
        None => 1,
    }
}

impl Parts {
    /// The frame; lengths and checksums are nobody's concern.
    fn bytes(&self) -> Vec<u8> {
        let mut frame = [self.eth.dst_mac, self.eth.src_mac].concat();
        if self.tagged {
            frame.extend([0x81, 0x00]);
            frame.extend(self.eth.vlan_tag.to_be_bytes());
        }
        frame.extend(self.eth.ether_type.to_be_bytes());
        match &self.ip {
            Some(PartsIp::V4(ip)) => {
                let fragment = u8::from(ip.flags & 2 != 0) << 6 | u8::from(ip.flags & 4 != 0) << 5;
                frame.extend([0x46, ip.tos, 0, 0, 0, 0, fragment, 0, ip.ttl, ip.proto, 0, 0]);
                frame.extend([ip.src, ip.dst, [1; 4]].concat());
            }
            Some(PartsIp::V6(ip, extended)) => {
                frame.extend((6 << 28 | u32::from(ip.traffic_class) << 20 | ip.flow_label).to_be_bytes());
                frame.extend([0, 0, ip.next_hdr, ip.hop_limit]);
                frame.extend([ip.src, ip.dst].concat());
                if *extended {
                    frame.extend([proto(self.l4), 1]);
                    frame.extend([0; 14]);
                }
            }
            None => {}
        }
        if let Some((_, ports)) = self.l4 {
            frame.extend(ports.src.to_be_bytes());
            frame.extend(ports.dst.to_be_bytes());
        }
        frame.extend([0xee; 20]);
        frame
    }

    /// Would the specification match? Number by number, bit by bit.
    fn fits(&self, spec: &FlowSpec) -> bool {
        match (spec, &self.ip, self.l4) {
            (FlowSpec::Eth(Masked { value, mask }), ..) => {
                fit(number(&value.dst_mac), number(&mask.dst_mac), number(&self.eth.dst_mac))
                    && fit(number(&value.src_mac), number(&mask.src_mac), number(&self.eth.src_mac))
                    && fit(value.ether_type, mask.ether_type, self.eth.ether_type)
                    && (mask.vlan_tag == 0 || self.tagged && fit(value.vlan_tag, mask.vlan_tag, self.eth.vlan_tag))
            }
            (FlowSpec::Ipv4(Masked { value, mask }), Some(PartsIp::V4(ip)), _) => {
                fit(number(&value.src), number(&mask.src), number(&ip.src))
                    && fit(number(&value.dst), number(&mask.dst), number(&ip.dst))
                    && fit(value.proto, mask.proto, ip.proto)
                    && fit(value.tos, mask.tos, ip.tos)
                    && fit(value.ttl, mask.ttl, ip.ttl)
                    && fit(value.flags, mask.flags, ip.flags)
            }
            (FlowSpec::Ipv6(Masked { value, mask }), Some(PartsIp::V6(ip, _)), _) => {
                fit(number(&value.src), number(&mask.src), number(&ip.src))
                    && fit(number(&value.dst), number(&mask.dst), number(&ip.dst))
                    && fit(value.flow_label, mask.flow_label, ip.flow_label)
                    && fit(value.next_hdr, mask.next_hdr, ip.next_hdr)
                    && fit(value.traffic_class, mask.traffic_class, ip.traffic_class)
                    && fit(value.hop_limit, mask.hop_limit, ip.hop_limit)
            }
            (FlowSpec::Tcp(ports), Some(_), Some((true, found)))
            | (FlowSpec::Udp(ports), Some(_), Some((false, found))) => {
                fit(ports.value.src, ports.mask.src, found.src) && fit(ports.value.dst, ports.mask.dst, found.dst)
            }
            (FlowSpec::Tag(_) | FlowSpec::Drop, ..) => true,
            _ => false,
        }
    }
}

fn number(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte))
}

fn fit<N: Into<u128>>(value: N, mask: N, found: N) -> bool {
    let (value, mask, found) = (value.into(), mask.into(), found.into());
    (0..128).all(|bit| mask >> bit & 1 == 0 || value >> bit & 1 == found >> bit & 1)
}

/// Few values, so that rules match often.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![Just(0u8), Just(1), Just(3)]
}

prop_compose! {
    fn eth()(dst in [byte(), byte(), byte(), byte(), byte(), byte()], src in [byte(), byte(), byte(), byte(), byte(), byte()],
             ether_type in prop_oneof![Just(0x0800u16), Just(0x86dd), Just(0x0806)], tag in byte()) -> EthFilter {
        EthFilter { dst_mac: dst, src_mac: src, ether_type, vlan_tag: tag.into() }
    }
}

prop_compose! {
    fn ipv4()(src in [byte(), byte(), byte(), byte()], dst in [byte(), byte(), byte(), byte()],
              proto in prop_oneof![Just(6u8), Just(17), Just(1)], tos in byte(), ttl in byte(), flags in 0u8..4) -> Ipv4Filter {
        Ipv4Filter { src, dst, proto, tos, ttl, flags: flags << 1 }
    }
}

prop_compose! {
    fn ipv6()(src in byte(), dst in byte(), label in byte(), next_hdr in prop_oneof![Just(6u8), Just(17), Just(1)],
              traffic_class in any::<u8>(), hop_limit in byte()) -> Ipv6Filter {
        Ipv6Filter { src: [src; 16], dst: [dst; 16], flow_label: u32::from(label) << 17, next_hdr, traffic_class, hop_limit }
    }
}

prop_compose! {
    fn ports()(dst in byte(), src in byte()) -> PortFilter {
        PortFilter { dst: dst.into(), src: u16::from(src) << 8 }
    }
}

fn masked<T: Clone + std::fmt::Debug + Default, S: Strategy<Value = T> + 'static>(
    filter: impl Fn() -> S,
) -> impl Strategy<Value = Masked<T>> {
    (filter(), prop_oneof![Just(None), filter().prop_map(Some)])
        .prop_map(|(value, mask)| Masked { value, mask: mask.unwrap_or_default() })
}

fn parts() -> impl Strategy<Value = Parts> {
    let l4 = prop_oneof![Just(None), (any::<bool>(), ports()).prop_map(Some)];
    (eth(), any::<bool>(), 0..3, ipv4(), ipv6(), any::<bool>(), l4).prop_map(
        |(mut eth, tagged, family, mut v4, mut v6, extended, l4)| {
            v4.proto = proto(l4);
            v6.next_hdr = if extended { 60 } else { proto(l4) };
            let (ether_type, ip) = match family {
                0 => (0x0800, Some(PartsIp::V4(v4))),
                1 => (0x86dd, Some(PartsIp::V6(v6, extended))),
                _ => (0x0806, None),
            };
            eth.ether_type = ether_type;
            Parts { eth, tagged, l4: l4.filter(|_| ip.is_some()), ip }
        },
    )
}

fn specs() -> impl Strategy<Value = Vec<FlowSpec>> {
    let l2 = masked(eth).prop_map(FlowSpec::Eth);
    let l3 = prop_oneof![masked(ipv4).prop_map(FlowSpec::Ipv4), masked(ipv6).prop_map(FlowSpec::Ipv6)];
    let l4 = prop_oneof![masked(ports).prop_map(FlowSpec::Tcp), masked(ports).prop_map(FlowSpec::Udp)];
    (proptest::option::of(l2), proptest::option::of(l3), proptest::option::of(l4))
        .prop_map(|(l2, l3, l4)| [l4, l2, l3].into_iter().flatten().collect())
}

fn rule(specs: &[FlowSpec]) -> FlowRule {
    FlowRule::new(&FlowAttr { specs: specs.to_vec(), ..FlowAttr::default() }).expect("a good rule")
}

fn errno(attr: FlowAttr) -> i32 {
    FlowRule::new(&attr).expect_err("must be refused").errno
}

proptest! {
    #[test]
    fn a_rule_matches_as_the_model_says(parts in parts(), specs in specs()) {
        // What is refused contradicts itself: no frame could match.
        let fits = specs.iter().all(|spec| parts.fits(spec));
        match FlowRule::new(&FlowAttr { specs, ..FlowAttr::default() }) {
            Ok(rule) => prop_assert_eq!(rule.matches(&parts.bytes()), fits),
            Err(error) => prop_assert!(!fits, "{}", error),
        }
    }

    #[test]
    fn what_a_frame_has_matches_it(parts in parts()) {
        let ones = EthFilter { dst_mac: [255; 6], src_mac: [255; 6], ether_type: 0xffff, vlan_tag: if parts.tagged { 0xffff } else { 0 } };
        let mut specs = vec![FlowSpec::Eth(Masked { value: parts.eth, mask: ones })];
        match &parts.ip {
            Some(PartsIp::V4(ip)) => specs.push(FlowSpec::Ipv4(Masked {
                value: *ip,
                mask: Ipv4Filter { src: [255; 4], dst: [255; 4], proto: 255, tos: 255, ttl: 255, flags: 255 },
            })),
            Some(PartsIp::V6(ip, _)) => specs.push(FlowSpec::Ipv6(Masked {
                value: *ip,
                mask: Ipv6Filter {
                    src: [255; 16], dst: [255; 16], flow_label: !0, next_hdr: 255, traffic_class: 255, hop_limit: 255,
                },
            })),
            None => {}
        }
        if let Some((tcp, value)) = parts.l4 {
            let ports = Masked { value, mask: PortFilter { dst: 0xffff, src: 0xffff } };
            specs.push(if tcp { FlowSpec::Tcp(ports) } else { FlowSpec::Udp(ports) });
        }
        prop_assert!(rule(&specs).matches(&parts.bytes()));
    }

    #[test]
    fn any_bytes_are_a_frame(
        bytes in proptest::collection::vec(any::<u8>(), 0..120),
        parts in parts(),
        cut in 0usize..100,
        specs in specs(),
    ) {
        let Ok(rule) = FlowRule::new(&FlowAttr { specs, ..FlowAttr::default() }) else { return Ok(()) };
        let whole = parts.bytes();
        let short = &whole[..cut.min(whole.len())];
        // Neither may panic; what is no frame matches nothing.
        rule.matches(&bytes);
        prop_assert!(!rule.matches(short) || short.len() >= 14);
    }
}

const MULTICAST: [u8; 20] = [0x33; 20];
const UNICAST: [u8; 20] = [0x22; 20];

fn to(mac: u8) -> Vec<FlowSpec> {
    let filter = |byte| EthFilter { dst_mac: [byte; 6], ..EthFilter::default() };
    vec![FlowSpec::Eth(Masked { value: filter(mac), mask: filter(0xff) })]
}

fn table(rules: &[(FlowAttr, u8)]) -> FlowTable<u8> {
    let mut table = FlowTable::default();
    for (attr, receiver) in rules {
        table.insert(FlowRule::new(attr).expect("a good rule"), *receiver).expect("there is room");
    }
    table
}

fn normal(priority: u16, specs: Vec<FlowSpec>) -> FlowAttr {
    FlowAttr { priority, specs, ..FlowAttr::default() }
}

fn kind(kind: FlowKind) -> FlowAttr {
    FlowAttr { kind, ..FlowAttr::default() }
}

#[test]
fn the_lowest_priority_number_has_the_frame_and_the_oldest_of_one() {
    let all = Vec::new;
    let table = table(&[(normal(5, all()), 1), (normal(3, all()), 2), (normal(3, to(0x22)), 3), (normal(9, all()), 4)]);
    assert_eq!(table.steer(&UNICAST).to_vec(), [(2, 0)]);
}

#[test]
fn rules_that_say_the_same_share_and_nobody_gets_a_frame_twice() {
    let tagged = |tag| [to(0x22), vec![FlowSpec::Tag(tag)]].concat();
    let table = table(&[
        (normal(1, to(0x22)), 1),
        (normal(1, tagged(7)), 2),
        (normal(1, to(0x22)), 1),
        (normal(2, to(0x22)), 3),
    ]);
    assert_eq!(table.steer(&UNICAST).to_vec(), [(1, 0), (2, 7)]);
    assert!(table.steer(&MULTICAST).is_empty());
}

#[test]
fn sniffers_and_rules_that_do_not_trap_leave_the_frame_to_others() {
    let through = FlowAttr { dont_trap: true, ..normal(0, to(0x22)) };
    let table = table(&[(normal(1, to(0x22)), 1), (kind(FlowKind::Sniffer), 2), (through, 3)]);
    assert_eq!(table.steer(&UNICAST).to_vec(), [(2, 0), (3, 0), (1, 0)]);
    assert_eq!(table.steer(&MULTICAST).to_vec(), [(2, 0)]);
}

#[test]
fn defaults_get_what_nobody_else_has() {
    let rules = [(kind(FlowKind::AllDefault), 1), (kind(FlowKind::McDefault), 2), (normal(9, to(0x22)), 3)];
    let table = table(&rules);
    assert_eq!(table.steer(&UNICAST).to_vec(), [(3, 0)]);
    assert_eq!(table.steer(&MULTICAST).to_vec(), [(2, 0)]);
    assert_eq!(table.steer(&[0x44; 20]).to_vec(), [(1, 0)]);
    assert!(table.steer(&[0x44; 13]).is_empty(), "no frame");
}

#[test]
fn what_is_dropped_nobody_gets_but_sniffers() {
    let drop = normal(1, [to(0x22), vec![FlowSpec::Drop]].concat());
    let table = table(&[(drop, 1), (normal(2, to(0x22)), 2), (kind(FlowKind::Sniffer), 3)]);
    assert_eq!(table.steer(&UNICAST).to_vec(), [(3, 0)]);
}

#[test]
fn rules_go_and_there_is_a_limit() {
    let mut table = FlowTable::default();
    let first = table.insert(rule(&to(0x22)), 1).expect("there is room");
    for _ in 1..MAX_FLOWS {
        table.insert(rule(&to(0x44)), 2).expect("there is room");
    }
    assert_eq!(table.insert(rule(&[]), 3).unwrap_err().errno, libc::ENOMEM);
    assert!(table.remove(first) && !table.remove(first));
    assert!(table.steer(&UNICAST).is_empty());
    table.insert(rule(&[]), 3).expect("there is room again");
    assert_eq!(table.steer(&UNICAST).to_vec(), [(3, 0)]);
}

#[test]
fn rules_that_cannot_be_are_refused() {
    let eth = |ether_type| {
        let filter = |ether_type| EthFilter { ether_type, ..EthFilter::default() };
        FlowSpec::Eth(Masked { value: filter(ether_type), mask: filter(0xffff) })
    };
    let ipv4 = |proto, mask| {
        let filter = |proto| Ipv4Filter { proto, ..Ipv4Filter::default() };
        FlowSpec::Ipv4(Masked { value: filter(proto), mask: filter(mask) })
    };
    let (ipv6, tcp, udp) =
        (FlowSpec::Ipv6(Masked::default()), FlowSpec::Tcp(Masked::default()), FlowSpec::Udp(Masked::default()));
    for specs in [
        vec![eth(0x0800), eth(0x0800)],
        vec![ipv4(0, 0), ipv6],
        vec![tcp, udp],
        vec![eth(0x0806), ipv4(0, 0)],
        vec![ipv6, eth(0x0800)],
        vec![ipv4(17, 0xff), tcp],
        vec![FlowSpec::Tag(1), FlowSpec::Tag(2)],
        vec![FlowSpec::Tag(1), FlowSpec::Drop],
    ] {
        assert_eq!(errno(normal(0, specs.clone())), libc::EINVAL, "{specs:?}");
    }
    for specs in [vec![eth(0x0800), ipv4(6, 0xff), tcp], vec![eth(0x86dd), ipv6, udp], vec![ipv4(17, 0), tcp], vec![]] {
        FlowRule::new(&normal(0, specs)).expect("fits together");
    }
    for of_kind in [FlowKind::AllDefault, FlowKind::McDefault, FlowKind::Sniffer] {
        FlowRule::new(&FlowAttr { specs: vec![FlowSpec::Tag(1)], ..kind(of_kind) }).expect("may be tagged");
        assert_eq!(errno(FlowAttr { specs: to(0x22), ..kind(of_kind) }), libc::EINVAL);
        assert_eq!(errno(FlowAttr { dont_trap: true, ..kind(of_kind) }), libc::EINVAL);
        assert_eq!(errno(FlowAttr { specs: vec![FlowSpec::Drop], ..kind(of_kind) }), libc::EINVAL);
    }
    let both = FlowAttr { dont_trap: true, specs: vec![FlowSpec::Drop], ..FlowAttr::default() };
    assert_eq!(errno(both), libc::EINVAL);
}

fn counted(counters: &FlowCounters) -> (u64, u64) {
    let mut values = [7; 3];
    counters.read(&mut values).unwrap();
    assert_eq!(values[1], 0, "nothing was attached there");
    (values[0], values[2])
}

#[test]
fn counters_add_up_the_frames_of_all_flows_that_have_them() {
    let counters = Arc::new(FlowCounters::new());
    counters.attach(CounterKind::Packets, 0).unwrap();
    counters.attach(CounterKind::Bytes, 2).unwrap();
    let all = FlowAttr { counters: Some(Arc::clone(&counters)), ..FlowAttr::default() };
    let mut table = FlowTable::default();
    assert_eq!(counters.flows(), 0);
    let first = table.insert(FlowRule::new(&FlowAttr { dont_trap: true, ..all.clone() }).unwrap(), 1u16).unwrap();
    table
        .insert(FlowRule::new(&FlowAttr { priority: 1, specs: vec![FlowSpec::Drop], ..all.clone() }).unwrap(), 2)
        .unwrap();
    assert_eq!(counters.flows(), 2);
    assert_eq!(counters.attach(CounterKind::Bytes, 1).unwrap_err().errno, libc::EBUSY);
    assert_eq!(table.steer(&[0x55; 60]).len(), 1);
    assert_eq!(counted(&counters), (2, 120), "one left it, the other dropped it");
    assert!(table.remove(first));
    assert!(table.steer(&[0x55; 100]).is_empty());
    assert_eq!(counted(&counters), (3, 220));
    table.remove_receiver(2);
    assert_eq!(counters.flows(), 0);
    table.steer(&[0x55; 100]);
    assert_eq!(counted(&counters), (3, 220));
}

#[test]
fn counters_at_one_place_are_added_up_and_places_must_be_there() {
    let counters = Arc::new(FlowCounters::new());
    counters.attach(CounterKind::Packets, 1).unwrap();
    counters.attach(CounterKind::Bytes, 1).unwrap();
    let mut table = FlowTable::default();
    let attr = FlowAttr { counters: Some(Arc::clone(&counters)), ..FlowAttr::default() };
    table.insert(FlowRule::new(&attr).unwrap(), 1u16).unwrap();
    table.steer(&[0; 64]);
    let mut values = [9; 2];
    counters.read(&mut values).unwrap();
    assert_eq!(values, [0, 65]);
    assert_eq!(counters.read(&mut values[..1]).unwrap_err().errno, libc::EINVAL);
}
