//! Flow steering: rules that say which Ethernet frames go to which queue pair (`ibv_create_flow(3)`). Pure: a rule is checked when it
//! is made, a frame is any bytes.
//!
//! Of several rules that match, the one with the lowest priority number has the frame, and of those of one priority the oldest. Rules
//! that say the same with the same priority share: each of their queue pairs gets a copy. A rule with `dont_trap` and a sniffer leave the
//! frame to others as well. A queue pair gets a frame once.

mod counters;
mod frame;
mod rss;

use std::cmp::Ordering;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::CoreError;
use counters::Counting;
use frame::{Frame, Ip};

pub use counters::{CounterKind, FlowCounters};
pub use rss::{RSS_KEY, RSS_TABLE_MAX, Rss, RssFields, check_table};

/// Rules of a device in a process: a frame is compared with each of them, at worst.
pub const MAX_FLOWS: usize = 4_096;

const ETHER_TYPE_IPV4: u16 = 0x0800;
const ETHER_TYPE_IPV6: u16 = 0x86dd;
const PROTO_TCP: u8 = 6;
const PROTO_UDP: u8 = 17;

/// What frames are for a rule: `enum ibv_flow_attr_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowKind {
    /// Those that match its specifications; all, if there are none.
    #[default]
    Normal,
    /// All that no normal rule, nor [`FlowKind::McDefault`], has.
    AllDefault,
    /// Those to multicast addresses that no normal rule has.
    McDefault,
    /// All, whoever else has them.
    Sniffer,
}

/// A value, and which of its bits count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Masked<T> {
    /// The bits wanted.
    pub value: T,
    /// 1: the bit counts.
    pub mask: T,
}

/// Fields of the Ethernet header. Numbers are in host byte order, here and below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EthFilter {
    /// Destination.
    pub dst_mac: [u8; 6],
    /// Source.
    pub src_mac: [u8; 6],
    /// EtherType behind the last VLAN tag.
    pub ether_type: u16,
    /// The last VLAN tag: priority (3 bits), CFI (1), VLAN (12). If any bit of it counts the frame must have one.
    pub vlan_tag: u16,
}

/// Fields of the IPv4 header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv4Filter {
    /// Source.
    pub src: [u8; 4],
    /// Destination.
    pub dst: [u8; 4],
    /// Protocol.
    pub proto: u8,
    /// Type of service.
    pub tos: u8,
    /// Time to live.
    pub ttl: u8,
    /// Bit 1: do not fragment; bit 2: more fragments (the kernel's `enum ib_ipv4_flags`).
    pub flags: u8,
}

/// Fields of the IPv6 header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv6Filter {
    /// Source.
    pub src: [u8; 16],
    /// Destination.
    pub dst: [u8; 16],
    /// Flow label: 20 bits.
    pub flow_label: u32,
    /// Next header, of the fixed header.
    pub next_hdr: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

/// Ports of TCP or UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortFilter {
    /// Destination.
    pub dst: u16,
    /// Source.
    pub src: u16,
}

/// One specification of a rule: what a header must be like, or what is done with the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSpec {
    /// The Ethernet header.
    Eth(Masked<EthFilter>),
    /// An IPv4 header; other frames do not match.
    Ipv4(Masked<Ipv4Filter>),
    /// An IPv6 header; other frames do not match.
    Ipv6(Masked<Ipv6Filter>),
    /// A TCP header; other frames and later fragments do not match.
    Tcp(Masked<PortFilter>),
    /// A UDP header; other frames and later fragments do not match.
    Udp(Masked<PortFilter>),
    /// The completion tells this number (`ibv_wc_read_flow_tag`).
    Tag(u32),
    /// Nobody gets the frame.
    Drop,
}

/// What a rule is made with: `struct ibv_flow_attr` with what follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowAttr {
    /// Which frames it is about.
    pub kind: FlowKind,
    /// 0 goes first.
    pub priority: u16,
    /// Leaves its frames to other rules as well (`IBV_FLOW_ATTR_FLAGS_DONT_TRAP`).
    pub dont_trap: bool,
    /// In any order; at most one of each layer and action.
    pub specs: Vec<FlowSpec>,
    /// Count its frames, those that it drops included.
    pub counters: Option<Arc<FlowCounters>>,
}

/// A rule that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRule {
    kind: FlowKind,
    priority: u16,
    dont_trap: bool,
    /// By layer.
    matches: SmallVec<[FlowSpec; 3]>,
    tag: u32,
    drop: bool,
    counting: Option<Counting>,
}

impl FlowRule {
    /// Checks what a program asks for.
    ///
    /// # Errors
    /// EINVAL: specifications that contradict each other, two of one layer, or any with a kind of rule that has none.
    pub fn new(attr: &FlowAttr) -> Result<FlowRule, CoreError> {
        let mut specs: SmallVec<[FlowSpec; 3]> = attr.specs.iter().copied().collect();
        specs.sort_by_key(FlowSpec::layer);
        if specs.windows(2).any(|pair| pair[0].layer() == pair[1].layer()) {
            return Err(invalid("two specifications are of one layer, or two actions the same"));
        }
        let is_match = |spec: &&FlowSpec| !matches!(spec, FlowSpec::Tag(_) | FlowSpec::Drop);
        let matches: SmallVec<[FlowSpec; 3]> = specs.iter().filter(is_match).copied().collect();
        let tag = specs.iter().find_map(|spec| if let FlowSpec::Tag(tag) = spec { Some(*tag) } else { None });
        let drop = specs.contains(&FlowSpec::Drop);
        if attr.kind != FlowKind::Normal && (attr.dont_trap || drop || !matches.is_empty()) {
            return Err(invalid(
                "type: only IBV_FLOW_ATTR_NORMAL has specifications of headers, DONT_TRAP and the action to drop",
            ));
        }
        if drop && (attr.dont_trap || tag.is_some()) {
            return Err(invalid("a frame that is dropped can neither be tagged nor left to other rules"));
        }
        check_layers(&matches)?;
        Ok(FlowRule {
            kind: attr.kind,
            priority: attr.priority,
            dont_trap: attr.dont_trap,
            matches,
            tag: tag.unwrap_or(0),
            drop,
            counting: attr.counters.as_ref().map(Counting::begin),
        })
    }

    /// Is the frame one that the rule is about?
    pub fn matches(&self, frame: &[u8]) -> bool {
        Frame::parse(frame).is_some_and(|frame| self.hits(&frame))
    }

    fn hits(&self, frame: &Frame) -> bool {
        match self.kind {
            FlowKind::Normal => self.matches.iter().all(|spec| spec.hits(frame)),
            FlowKind::AllDefault | FlowKind::Sniffer => true,
            FlowKind::McDefault => frame.dst_mac[0] & 1 != 0,
        }
    }

    /// Which of two rules is asked first.
    fn before(&self, other: &FlowRule) -> Ordering {
        let class = |rule: &FlowRule| match rule.kind {
            FlowKind::Sniffer => 0,
            FlowKind::Normal => 1,
            FlowKind::McDefault => 2,
            FlowKind::AllDefault => 3,
        };
        (class(self), self.priority).cmp(&(class(other), other.priority))
    }

    /// Do both have the same frames, at the same rank?
    fn shares_with(&self, other: &FlowRule) -> bool {
        (self.kind, self.priority) == (other.kind, other.priority) && self.matches == other.matches
    }
}

/// Do the layers fit together?
fn check_layers(specs: &[FlowSpec]) -> Result<(), CoreError> {
    for spec in specs {
        let ether_type = match spec {
            FlowSpec::Ipv4(_) => ETHER_TYPE_IPV4,
            FlowSpec::Ipv6(_) => ETHER_TYPE_IPV6,
            _ => continue,
        };
        let other = |spec: &FlowSpec| matches!(spec, FlowSpec::Eth(eth) if !agrees(eth.value.ether_type, eth.mask.ether_type, ether_type));
        if specs.iter().any(other) {
            return Err(invalid("ether_type of the Ethernet specification is not that of the IP specification"));
        }
    }
    for spec in specs {
        let proto = match spec {
            FlowSpec::Tcp(_) => PROTO_TCP,
            FlowSpec::Udp(_) => PROTO_UDP,
            _ => continue,
        };
        // Extension headers may come between in IPv6.
        let other =
            |spec: &FlowSpec| matches!(spec, FlowSpec::Ipv4(ip) if (ip.value.proto ^ proto) & ip.mask.proto != 0);
        if specs.iter().any(other) {
            return Err(invalid("proto of the IPv4 specification is not that of the TCP or UDP specification"));
        }
    }
    Ok(())
}

fn invalid(reason: &'static str) -> CoreError {
    CoreError::new(libc::EINVAL, reason)
}

impl FlowSpec {
    /// Specifications of one layer exclude each other.
    fn layer(&self) -> u8 {
        match self {
            FlowSpec::Eth(_) => 2,
            FlowSpec::Ipv4(_) | FlowSpec::Ipv6(_) => 3,
            FlowSpec::Tcp(_) | FlowSpec::Udp(_) => 4,
            FlowSpec::Tag(_) => 5,
            FlowSpec::Drop => 6,
        }
    }

    fn hits(&self, frame: &Frame) -> bool {
        match (self, &frame.ip) {
            (FlowSpec::Eth(eth), _) => eth.hits(frame),
            (FlowSpec::Ipv4(wanted), Some(Ip::V4(ip))) => wanted.hits(ip),
            (FlowSpec::Ipv6(wanted), Some(Ip::V6(ip))) => wanted.hits(ip),
            (FlowSpec::Tcp(ports), _) => frame.ports_of(PROTO_TCP).is_some_and(|found| ports.hits(&found)),
            (FlowSpec::Udp(ports), _) => frame.ports_of(PROTO_UDP).is_some_and(|found| ports.hits(&found)),
            (FlowSpec::Tag(_) | FlowSpec::Drop, _) => true,
            (FlowSpec::Ipv4(_) | FlowSpec::Ipv6(_), _) => false,
        }
    }
}

/// Do the bits that count agree?
fn agrees(value: u16, mask: u16, field: u16) -> bool {
    (value ^ field) & mask == 0
}

fn bytes_agree(value: &[u8], mask: &[u8], field: &[u8]) -> bool {
    value.iter().zip(mask).zip(field).all(|((value, mask), field)| (value ^ field) & mask == 0)
}

/// Do all of the named fields agree?
macro_rules! all_agree {
    ($masked:expr, $found:expr, bytes: [$($bytes:ident),*], numbers: [$($number:ident),*]) => {{
        let (Masked { value, mask }, found) = ($masked, $found);
        $(bytes_agree(&value.$bytes, &mask.$bytes, &found.$bytes) &&)*
        $((value.$number ^ found.$number) & mask.$number == 0 &&)*
        true
    }};
}

impl Masked<EthFilter> {
    fn hits(&self, frame: &Frame) -> bool {
        let tagged = self.mask.vlan_tag == 0
            || frame.vlan_tag.is_some_and(|tag| agrees(self.value.vlan_tag, self.mask.vlan_tag, tag));
        tagged && all_agree!(self, frame, bytes: [dst_mac, src_mac], numbers: [ether_type])
    }
}

impl Masked<Ipv4Filter> {
    fn hits(&self, ip: &Ipv4Filter) -> bool {
        all_agree!(self, ip, bytes: [src, dst], numbers: [proto, tos, ttl, flags])
    }
}

impl Masked<Ipv6Filter> {
    fn hits(&self, ip: &Ipv6Filter) -> bool {
        all_agree!(self, ip, bytes: [src, dst], numbers: [flow_label, next_hdr, traffic_class, hop_limit])
    }
}

impl Masked<PortFilter> {
    fn hits(&self, ports: &PortFilter) -> bool {
        all_agree!(self, ports, bytes: [], numbers: [dst, src])
    }
}

/// Names a rule of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowId(u64);

/// Who gets a frame, each with the tag of the rule.
pub type Receivers<R> = SmallVec<[(R, u32); 2]>;

/// The rules of a device, and whom each steers to.
#[derive(Debug)]
pub struct FlowTable<R> {
    /// In the order in which they are asked.
    rules: Vec<(FlowId, FlowRule, R)>,
    next: u64,
}

impl<R> Default for FlowTable<R> {
    fn default() -> Self {
        FlowTable { rules: Vec::new(), next: 0 }
    }
}

impl<R: Copy + PartialEq> FlowTable<R> {
    /// Adds a rule.
    ///
    /// # Errors
    /// ENOMEM: there are [`MAX_FLOWS`].
    pub fn insert(&mut self, rule: FlowRule, receiver: R) -> Result<FlowId, CoreError> {
        if self.rules.len() >= MAX_FLOWS {
            return Err(CoreError::new(libc::ENOMEM, format!("the device has {MAX_FLOWS} flows already")));
        }
        let id = FlowId(self.next);
        self.next += 1;
        let place = self.rules.partition_point(|(_, known, _)| known.before(&rule) != Ordering::Greater);
        self.rules.insert(place, (id, rule, receiver));
        Ok(id)
    }

    /// Takes a rule away; false: there is none of this name.
    pub fn remove(&mut self, id: FlowId) -> bool {
        let before = self.rules.len();
        self.rules.retain(|(known, ..)| *known != id);
        self.rules.len() < before
    }

    /// Takes away all rules that steer to a receiver.
    pub fn remove_receiver(&mut self, receiver: R) {
        self.rules.retain(|(.., known)| *known != receiver);
    }

    /// There are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Who gets a frame.
    pub fn steer(&self, frame: &[u8]) -> Receivers<R> {
        let mut receivers = Receivers::new();
        let length = frame.len();
        let Some(frame) = Frame::parse(frame) else { return receivers };
        let mut trapped: Option<&FlowRule> = None;
        for (_, rule, receiver) in &self.rules {
            let is_next = trapped.is_none_or(|first| rule.shares_with(first));
            if !is_next || !rule.hits(&frame) {
                continue;
            }
            if let Some(counting) = &rule.counting {
                counting.count(length);
            }
            if rule.drop {
                // Sniffers and rules before it that do not trap have their copies.
                return receivers;
            }
            if !receivers.iter().any(|(known, _)| known == receiver) {
                receivers.push((*receiver, rule.tag));
            }
            if !rule.dont_trap && rule.kind != FlowKind::Sniffer {
                trapped.get_or_insert(rule);
            }
        }
        receivers
    }
}
