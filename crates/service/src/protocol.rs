//! Messages between program and service.
//!
//! One request and one reply are one datagram each of a SOCK_SEQPACKET Unix socket: JSON, `{"id": n, "body": ...}`, the
//! reply with the request's id. The first request is [`Request::Hello`]. Descriptors travel beside a message:
//!
//! | message | descriptors |
//! |---|---|
//! | `Hello` | a pidfd of the program (none where the kernel has none: then only the end of the connection is seen; and none where the service takes none, EPERM, because it has one from the kernel) |
//! | `Lane` | the receive sockets, then the lane's end of its relay |
//! | `Reclaim` | the receive socket of a lane that an earlier service lent |
//! | `Reclaimed` | the lane's end of its new relay |
//! | `Cm(Channel)` | the program's end of the event channel |
//!
//! Whoever sends other descriptors to the service, more of them, or in other messages, is disconnected.
//!
//! The relay is a SOCK_SEQPACKET socket pair that carries two kinds of messages in both directions: [`RelayHeader`] and a
//! packet, or a [`RingCall`], an offer of it with the descriptor of the ring's memory. When all copies of the lane's end
//! are closed, nobody has the lane's receive sockets any more: the lane is given back.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::cm::protocol::{CmReply, CmRequest};
use crate::config::Limits;

/// Version of this protocol; a service refuses others.
pub const VERSION: u32 = 5;

/// Longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// Longest reply, in bytes.
pub const REPLY_BYTES_MAX: usize = 128 * 1024;

/// Clients in one page of the status.
pub const STATUS_PAGE: usize = 64;

/// Ids in one page of the connection manager's.
pub const CM_ID_PAGE: usize = 256;

/// Bytes of a ring's memory, at most.
pub const RING_BYTES_MAX: i64 = 4 << 20;

/// Longest program name that is kept, in characters.
pub const PROGRAM_CHARS_MAX: usize = 64;

/// What a message carries besides its body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// Chosen by the requester, returned in the reply.
    pub id: u64,
    /// The message.
    pub body: T,
}

/// What a program asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// First of all. Answered by [`Reply::Welcome`].
    Hello {
        /// [`VERSION`] of the program.
        version: u32,
        /// Process id in the program's own pid namespace.
        pid: u32,
        /// What the program calls itself.
        program: String,
        /// It had another service, which has died, and brings along what it has.
        #[serde(default)]
        again: bool,
    },
    /// Answered by [`Reply::Lane`].
    LeaseLane,
    /// Answered by [`Reply::Released`].
    ReleaseLane {
        /// The lane.
        lane: u16,
    },
    /// The service that leased the lane has died, with its keeper; the program has its socket, and offers it to this one.
    /// Answered by [`Reply::Reclaimed`]; EBUSY: the lane or its lease is another program's by now.
    Reclaim {
        /// The lane.
        lane: u16,
        /// From [`Reply::Lane`].
        lease: u64,
    },
    /// Under which lease a lane of any program is. Answered by [`Reply::Leased`].
    Lease {
        /// The lane.
        lane: u16,
    },
    /// The lane's socket joins a multicast group (again: nothing happens). Answered by [`Reply::Joined`].
    JoinGroup {
        /// A lane of the program's.
        lane: u16,
        /// The group.
        group: IpAddr,
        /// On this interface.
        ifindex: u32,
    },
    /// It leaves the group (not a member: nothing happens). Answered by [`Reply::Left`].
    LeaveGroup {
        /// A lane of the program's.
        lane: u16,
        /// The group.
        group: IpAddr,
        /// On this interface.
        ifindex: u32,
    },
    /// Answered by [`Reply::Status`].
    Status {
        /// Where the last page ended ([`StatusPage::next`]); 0: from the start.
        from: u64,
    },
    /// The connection manager's ids, of the programs that [`Status::clients`] tells of. Answered by [`Reply::CmIds`].
    CmIds {
        /// Where the last page ended ([`CmIdPage::next`]); 0: from the start.
        from: u64,
    },
    /// About connections. Answered by [`Reply::Cm`].
    Cm(CmRequest),
}

/// What the service answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`.
    Welcome {
        /// [`VERSION`] of the service.
        version: u32,
        /// Process id of the service, in its own pid namespace.
        pid: u32,
        /// Effective user id of the service, in its own user namespace.
        uid: u32,
    },
    /// To `LeaseLane`.
    Lane {
        /// 1..=1023
        lane: u16,
        /// Random.
        seed: u64,
        /// Names this lease; see [`Reply::Leased`].
        lease: u64,
    },
    /// To `ReleaseLane`.
    Released {
        /// The lane.
        lane: u16,
    },
    /// To `Reclaim`: the lane is leased as it was.
    Reclaimed {
        /// The lane.
        lane: u16,
    },
    /// To `Lease`. A lane number is leased again after its program has ended; this number is not.
    Leased {
        /// The lane.
        lane: u16,
        /// Random, not 0; the same as long as the lease lasts, also when the service restarts. 0: nobody leases the lane.
        lease: u64,
    },
    /// To `JoinGroup`.
    Joined,
    /// To `LeaveGroup`.
    Left,
    /// To `Status`.
    Status(StatusPage),
    /// To `CmIds`.
    CmIds(CmIdPage),
    /// To `Cm`.
    Cm(CmReply),
    /// With id 0 and without a request: the service crashed, another one took over. Requests without an answer are to be
    /// sent again.
    Restarted,
    /// To any request.
    Error {
        /// As in `errno`.
        errno: i32,
        /// What, why, what to do.
        what: String,
    },
}

/// A part of [`Status`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusPage {
    /// With at most [`STATUS_PAGE`] clients.
    pub status: Status,
    /// What to ask for next; None: this was the last page.
    pub next: Option<u64>,
}

/// What the service holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the service, in its own pid namespace.
    pub pid: u32,
    /// Process id of its keeper, in the same pid namespace; 0: it has none, or lost it.
    #[serde(default)]
    pub keeper: u32,
    /// Effective user id of the service, in its own user namespace.
    pub uid: u32,
    /// UDP port of the group.
    pub port: u16,
    /// Seconds since the service started.
    pub uptime_s: u64,
    /// How often it crashed since, and was taken over without loss.
    #[serde(default)]
    pub restarts: u32,
    /// The programs that are connected, the asking one included. Only the service's user and root are told of other users'.
    pub clients: Vec<ClientStatus>,
    /// Sockets of the group, the service's own and spare ones included; 0: the port is not open.
    pub sockets: u32,
    /// Sockets of returned lanes that some process still holds (a forked child).
    pub lingering: u32,
    /// Packets that the service touched.
    pub counters: Counters,
    /// How much programs may have.
    #[serde(default)]
    pub limits: Limits,
}

/// What one program holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process id as the service's pid namespace shows it (0: from a foreign pid namespace).
    pub pid: u32,
    /// User id as the service's user namespace shows it.
    pub uid: u32,
    /// What the program calls itself.
    pub program: String,
    /// Seconds since it connected.
    pub age_s: u64,
    /// Its lanes, ascending.
    pub lanes: Vec<u16>,
    /// Multicast groups that these joined.
    #[serde(default)]
    pub groups: u32,
    /// Its event channels (RDMA-CM).
    #[serde(default)]
    pub channels: u32,
    /// All its ids (RDMA-CM).
    #[serde(default)]
    pub ids: u32,
    /// Ids on which it listens for connections (RDMA-CM).
    #[serde(default)]
    pub listeners: u32,
    /// Connections that are being made (RDMA-CM).
    #[serde(default)]
    pub pending: u32,
    /// Descriptors that the service holds for it: its connection, lanes (also those given back whose relay is open still), and event
    /// channels.
    #[serde(default)]
    pub descriptors: u32,
}

/// Some of the connection manager's ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmIdPage {
    /// At most [`CM_ID_PAGE`].
    pub ids: Vec<CmIdStatus>,
    /// What to ask for next; None: this was the last page.
    pub next: Option<u64>,
}

/// An id of the connection manager (`struct rdma_cm_id`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmIdStatus {
    /// Its number.
    pub id: u64,
    /// Process id of its program, as in [`ClientStatus`]; 0 also if the program gave it up and it lingers.
    pub pid: u32,
    /// `TCP`, `UDP`, `IPOIB` or `IB`.
    pub space: String,
    /// `connected` or `datagram`.
    pub service: String,
    /// `IDLE`, `LISTEN` to `TIMEWAIT`: the names of IBA 12.9.7.
    pub state: String,
    /// Its address.
    pub local: Option<SocketAddr>,
    /// The peer's.
    pub peer: Option<SocketAddr>,
    /// The queue pair.
    pub qpn: Option<u32>,
    /// The peer's.
    pub remote_qpn: Option<u32>,
    /// Of a listener: requests that wait.
    pub waiting: u64,
}

/// Packets that the service touched: `strays` and `relay_in` came in; each of them is counted once in `relay_out`, in
/// `management` or in one of the drops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Arrived at lane 0.
    pub strays: u64,
    /// Handed in by lanes, messages about rings included.
    pub relay_in: u64,
    /// Forwarded to the right lane.
    pub relay_out: u64,
    /// Packets, of those that arrived at lane 0 or were handed in, whose own lane is leased: steering was not right.
    #[serde(default)]
    pub astray: u64,
    /// How often the order of the sockets was found out by probing, by the service's present process.
    #[serde(default)]
    pub probings: u64,
    /// For queue pair 1: the connection manager's.
    #[serde(default)]
    pub management: u64,
    /// Too short to hold a QP number, or without a usable header.
    pub drop_short: u64,
    /// Strays whose ICRC was wrong.
    #[serde(default)]
    pub drop_icrc: u64,
    /// For a lane that nobody leases, or not under the lease that was named.
    pub drop_no_lane: u64,
    /// The right lane's relay was full or gone.
    pub drop_full: u64,
    /// A lane handed in a packet for itself.
    pub drop_loop: u64,
    /// Offers of rings beyond what may be on their way.
    #[serde(default)]
    pub drop_limit: u64,
}

/// Encodes a message.
///
/// # Panics
/// Never for the messages of this module.
pub fn encode<T: Serialize>(id: u64, body: T) -> Vec<u8> {
    serde_json::to_vec(&Envelope { id, body }).expect("messages have string keys and no failing serializer")
}

/// Decodes a message of either direction.
///
/// # Errors
/// The text says what is wrong with it.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<Envelope<T>, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// What precedes a packet on the relay, 40 bytes: kind 1, 1 reserved byte, UDP source port (network order), 4 reserved
/// bytes, IP source, IP destination (16 bytes each; IPv4 as `::ffff:a.b.c.d`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayHeader {
    /// IP source and UDP source port.
    pub src: SocketAddr,
    /// IP destination.
    pub dst: IpAddr,
}

impl RelayHeader {
    /// Bytes of the header.
    pub const LEN: usize = 40;
    const KIND: u8 = 1;

    /// The bytes that precede a packet.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = Self::KIND;
        bytes[2..4].copy_from_slice(&self.src.port().to_be_bytes());
        bytes[8..24].copy_from_slice(&mapped(self.src.ip()));
        bytes[24..40].copy_from_slice(&mapped(self.dst));
        bytes
    }

    /// Header and packet of a relay message; None: not one.
    pub fn decode(bytes: &[u8]) -> Option<(RelayHeader, &[u8])> {
        let (header, packet) = bytes.split_first_chunk::<{ Self::LEN }>()?;
        if header[0] != Self::KIND {
            return None;
        }
        let port = u16::from_be_bytes([header[2], header[3]]);
        let ip = |at: usize| {
            let octets: [u8; 16] = header[at..at + 16].try_into().expect("16 bytes");
            Ipv6Addr::from(octets).to_canonical()
        };
        Some((RelayHeader { src: SocketAddr::new(ip(8), port), dst: ip(24) }, packet))
    }
}

/// What two lanes tell each other about a ring between them: packets then go through memory that both map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingStep {
    /// A ring is offered; its memory comes as the message's only descriptor.
    Offer,
    /// The offer with this id was taken.
    Accept,
}

/// A message of the relay about a ring, 40 bytes: kind (2 offer, 3 accept), 1 reserved byte, lane, 4 reserved bytes, lease,
/// id of the ring (network order), name of the sender's wake socket (16 bytes).
///
/// The service passes it on if the lane is leased under that very lease, and puts the sender's lane and lease in their
/// place: nobody can speak for another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCall {
    /// What it says.
    pub step: RingStep,
    /// To the service: the lane that it is for. From the service: the lane that it comes from.
    pub lane: u16,
    /// That lane's lease.
    pub lease: u64,
    /// Names the ring; chosen at random by who offers it.
    pub id: u64,
    /// What the sender's wake socket is called.
    pub wake: [u8; 16],
}

impl RingCall {
    /// Bytes of the message.
    pub const LEN: usize = 40;

    /// The message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = match self.step {
            RingStep::Offer => 2,
            RingStep::Accept => 3,
        };
        bytes[2..4].copy_from_slice(&self.lane.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.lease.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_be_bytes());
        bytes[24..40].copy_from_slice(&self.wake);
        bytes
    }

    /// What a message says; None: not one.
    pub fn decode(bytes: &[u8]) -> Option<RingCall> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let step = match bytes[0] {
            2 => RingStep::Offer,
            3 => RingStep::Accept,
            _ => return None,
        };
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Some(RingCall {
            step,
            lane: u16::from_be_bytes([bytes[2], bytes[3]]),
            lease: number(8),
            id: number(16),
            wake: bytes[24..40].try_into().expect("16 bytes"),
        })
    }
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_look_as_documented() {
        assert_eq!(encode(7, Request::LeaseLane), br#"{"id":7,"body":"LeaseLane"}"#);
        let released = encode(8, Reply::Released { lane: 3 });
        assert_eq!(released, br#"{"id":8,"body":{"Released":{"lane":3}}}"#);
        assert_eq!(decode::<Reply>(&released).unwrap().body, Reply::Released { lane: 3 });
    }

    #[test]
    fn the_longest_page_fits_a_reply() {
        let client = ClientStatus {
            pid: u32::MAX,
            uid: u32::MAX,
            program: "\u{10ffff}".repeat(PROGRAM_CHARS_MAX),
            age_s: u64::MAX,
            lanes: vec![1000; crate::server::LANES_PER_CLIENT_MAX as usize],
            groups: u32::MAX,
            channels: u32::MAX,
            ids: u32::MAX,
            listeners: u32::MAX,
            pending: u32::MAX,
            descriptors: u32::MAX,
        };
        let status = Status { clients: vec![client; STATUS_PAGE], ..Status::default() };
        let page = encode(u64::MAX, Reply::Status(StatusPage { status, next: Some(u64::MAX) }));
        assert!(page.len() < REPLY_BYTES_MAX, "{}", page.len());
    }

    #[test]
    fn the_longest_page_of_ids_fits_a_reply() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535".parse().unwrap();
        let id = CmIdStatus {
            id: u64::MAX,
            pid: u32::MAX,
            space: "IPOIB".into(),
            service: "connected".into(),
            state: ferroce_cm::State::MraReqRcvd.to_string(),
            local: Some(address),
            peer: Some(address),
            qpn: Some(u32::MAX),
            remote_qpn: Some(u32::MAX),
            waiting: u64::MAX,
        };
        let page = CmIdPage { ids: vec![id; CM_ID_PAGE], next: Some(u64::MAX) };
        let page = encode(u64::MAX, Reply::CmIds(page));
        assert!(page.len() < REPLY_BYTES_MAX, "{}", page.len());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<Request>(&bytes).map_err(|text| assert!(!text.is_empty()));
            if let Some((header, packet)) = RelayHeader::decode(&bytes) {
                let again = [&header.encode()[..], packet].concat();
                prop_assert_eq!(RelayHeader::decode(&again), Some((header, packet)));
                prop_assert_eq!(RingCall::decode(&bytes), None);
            }
        }

        #[test]
        fn ring_calls_survive(offer: bool, lane: u16, lease: u64, id: u64, wake: [u8; 16], other in 4u8..) {
            let step = if offer { RingStep::Offer } else { RingStep::Accept };
            let call = RingCall { step, lane, lease, id, wake };
            let mut bytes = call.encode();
            prop_assert_eq!(RingCall::decode(&bytes), Some(call));
            prop_assert_eq!(RelayHeader::decode(&bytes), None);
            prop_assert_eq!(RingCall::decode(&bytes[1..]), None);
            bytes[0] = other;
            prop_assert_eq!(RingCall::decode(&bytes), None);
        }

        #[test]
        fn relay_headers_survive(src: [u8; 16], dst: [u8; 4], port: u16, bytes in proptest::collection::vec(any::<u8>(), 0..50)) {
            let header = RelayHeader {
                src: SocketAddr::new(Ipv6Addr::from(src).to_canonical(), port),
                dst: IpAddr::from(dst),
            };
            let message = [&header.encode()[..], &bytes].concat();
            prop_assert_eq!(RelayHeader::decode(&message), Some((header, &bytes[..])));
        }
    }
}
