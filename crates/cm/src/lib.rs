#![forbid(unsafe_code)]
//! Communication management of InfiniBand (IBA volume 1, chapter 12) and of RDMA-CM on top of it (annex A11), as one sans-IO state
//! machine for a whole host.
//!
//! Nothing here knows a clock, a socket, a thread or `unsafe`. Time is a number of nanoseconds passed in; management datagrams,
//! events and commands are values. The entry is [`Cm`], whose documentation says how a host drives it.
//!
//! | module | part |
//! |---|---|
//! | `cm` | [`Cm`]: ids and their owners, addresses, listeners, timers, what goes out |
//! | `connect` | commands that set up and take down connections |
//! | `receive` | what a management datagram does |
//! | `adopt` | connections that outlive their manager |
//! | `datagram` | service id resolution: SIDR_REQ and SIDR_REP |
//! | `conn`, `retry` | one connection; when it sends again and when it gives up |
//! | `state` | states, and the table of state and message |
//! | `ports` | port spaces |
//!
//! # Where the specification leaves a choice, or others do otherwise
//!
//! - **Sending again** starts after [`Timing::first_retry`] and doubles up to the response timeout; timeout and retry count of the
//!   specification only say when to give up. Kernels wait the whole timeout (4.3 s) from the first time on.
//! - **A duplicate** is answered with what answered the first: an MRA while the program has not decided, else the same REP, RTU, DREP
//!   or REJ. A rejection is remembered for two response timeouts, so that a lost REJ does not show the program a second request.
//! - **A REP or RTU for an unknown id** is rejected (invalid communication id), so that its sender neither waits nor stays connected
//!   alone; kernels drop it.
//! - **Given back after accept** (REP sent, no RTU yet): the peer gets a REJ, and a DREQ until it answers, since a REJ that is lost
//!   would leave it connected alone. Kernels send the REJ only. A DREQ that overtakes its REP therefore counts as a rejection.
//! - **No RTU**: the peer gets a REJ (timeout).
//! - **Peers are told apart by their address too**, not only by the CA GUID and numbers that they claim: nobody can end, reject or
//!   mark as stale what belongs to another address. GIDs and IP header of a REQ must be those of its packet.
//! - **A backlog that is full** drops requests, as TCP does; the peer asks again. Kernels reject.
//! - **A listener that has just gone**: requests for its port (in any port space) are dropped for 0.3 s. Programs that take turns listen anew at once,
//!   and a rejection would end their peers. Kernels reject, and are saved by being slow.
//! - **LAP** is refused: there is one path.

mod adopt;
mod cm;
mod config;
mod conn;
mod connect;
mod datagram;
mod error;
mod event;
mod limit;
mod param;
mod ports;
mod receive;
mod retry;
mod state;
mod stats;

pub use adopt::Established;
pub use cm::{Cm, IdInfo};
pub use config::{Config, Limits, Timing};
pub use error::{CmError, DropReason, errno};
pub use event::{ConnectRequest, Event, EventKind, PrivateData};
pub use limit::{Kinds, User, leaves_room, part_of_guests};
pub use param::{
    AcceptDatagramParam, AcceptParam, Arrival, BindOptions, ConnectParam, ConnectionParam, Path, QpParameters, QpType,
    ResolveParam, Transmit,
};
pub use state::State;
pub use stats::Stats;

/// A point in time or a span of it: nanoseconds of the host's monotonic clock.
pub type Nanos = u64;

/// Names an id of [`Cm`] (what librdmacm calls `rdma_cm_id`). Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmId(pub(crate) u64);

impl CmId {
    /// The number, for messages and tables.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The id of that number, which [`Cm`] then may or may not know.
    pub const fn from_number(number: u64) -> CmId {
        CmId(number)
    }
}

/// Whose an id is: a process, as its host numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// Whether an id makes connections or finds datagram queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// RC or UC: REQ, REP, RTU.
    Connected,
    /// UD: SIDR_REQ, SIDR_REP.
    Datagram,
}

/// The Q_Key of datagram queue pairs in port space UDP (`RDMA_UDP_QKEY`).
pub const UDP_QKEY: u32 = 0x0123_4567;

/// Bytes of private data that a program may give to connect.
pub const CONNECT_PRIVATE_DATA: usize = ferroce_wire::mad::REQ_PRIVATE_DATA_LEN - ferroce_wire::mad::IP_HEADER_LEN;
/// Bytes of private data that a program may give to accept.
pub const ACCEPT_PRIVATE_DATA: usize = ferroce_wire::mad::REP_PRIVATE_DATA_LEN;
/// Bytes of private data that a program may give to reject a connection.
pub const REJECT_PRIVATE_DATA: usize = ferroce_wire::mad::REJ_PRIVATE_DATA_LEN;
/// Bytes of private data that a program may give to resolve a service id.
pub const RESOLVE_PRIVATE_DATA: usize = ferroce_wire::mad::SIDR_REQ_PRIVATE_DATA_LEN - ferroce_wire::mad::IP_HEADER_LEN;
/// Bytes of private data that a program may give to answer or reject the resolution of a service id.
pub const ANSWER_PRIVATE_DATA: usize = ferroce_wire::mad::SIDR_REP_PRIVATE_DATA_LEN;
