//! Refused commands and dropped datagrams.

use std::net::SocketAddr;

use ferroce_wire::mad::{IpHeaderError, MadError, RejReason};

use crate::{CmId, State};

/// Error numbers of Linux that librdmacm's callers see.
#[allow(missing_docs)]
pub mod errno {
    pub const ENOMEM: i32 = 12;
    pub const EBUSY: i32 = 16;
    pub const EINVAL: i32 = 22;
    pub const EADDRINUSE: i32 = 98;
    pub const EADDRNOTAVAIL: i32 = 99;
    pub const ETIMEDOUT: i32 = 110;
}

/// Why a command was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CmError {
    /// The id does not exist, or was destroyed.
    #[error("there is no id {}", .0.number())]
    NoSuchId(CmId),
    /// The command does not fit the id's state.
    #[error("{command} is not possible in state {state}")]
    State {
        /// The command.
        command: &'static str,
        /// The state that the id is in.
        state: State,
    },
    /// The command is for connections and the id for datagrams, or the other way round.
    #[error("{command} does not fit the queue pair type of the id")]
    Service {
        /// The command.
        command: &'static str,
    },
    /// An id is bound once.
    #[error("the id is bound already")]
    Bound,
    /// Listening needs a port.
    #[error("the id is not bound to an address: rdma_bind_addr comes before rdma_listen")]
    NotBound,
    /// Another id has the same address and port.
    #[error("{0} is in use by another id of the port space")]
    AddressInUse(SocketAddr),
    /// Another id has the port at every address, or this one wants it there.
    #[error("{0} collides with another id of the port space: one of the two, or both, is bound to every address")]
    AddressNotAvailable(SocketAddr),
    /// All ports from 32768 to 60999 are taken.
    #[error("no port is free in the port space")]
    NoPort,
    /// More private data than the message has room for.
    #[error("{len} bytes of private data are more than the {max} that {command} carries")]
    PrivateData {
        /// The command.
        command: &'static str,
        /// Bytes given.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// A value that the message cannot carry.
    #[error("{name} of {value:#x} is out of range")]
    Value {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: u64,
    },
    /// The queue pair is in a connection, or was in one with that peer moments ago (timewait).
    #[error("queue pair {qpn:#x} has a connection, or had one with that peer until moments ago")]
    QpBusy {
        /// The queue pair.
        qpn: u32,
    },
    /// A limit is reached.
    #[error("no more than {limit} {what}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
}

impl CmError {
    /// The error number that the call of librdmacm ends with.
    pub fn errno(&self) -> i32 {
        match self {
            CmError::AddressInUse(_) => errno::EADDRINUSE,
            CmError::AddressNotAvailable(_) | CmError::NoPort => errno::EADDRNOTAVAIL,
            CmError::QpBusy { .. } => errno::EBUSY,
            CmError::Limit { .. } => errno::ENOMEM,
            _ => errno::EINVAL,
        }
    }
}

/// Why a management datagram did nothing, or nothing but an answer. None is an error of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DropReason {
    /// No MAD of communication management.
    #[error(transparent)]
    Malformed(#[from] MadError),
    /// It came before; if an answer was due, it was sent again.
    #[error("duplicate {message} in state {state}")]
    Duplicate {
        /// The message.
        message: &'static str,
        /// The state of its connection.
        state: State,
    },
    /// It has no meaning in the connection's state.
    #[error("{message} in state {state}")]
    Stray {
        /// The message.
        message: &'static str,
        /// The state of its connection.
        state: State,
    },
    /// Its ids belong to no connection.
    #[error("{message} for an unknown communication id")]
    UnknownId {
        /// The message.
        message: &'static str,
    },
    /// The connection exists, but with another address.
    #[error("{message} from another address than the connection's peer")]
    WrongPeer {
        /// The message.
        message: &'static str,
    },
    /// A field does not fit the connection.
    #[error("{message} with a wrong {field}")]
    Field {
        /// The message.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// Answered with a REJ.
    #[error("rejected: {0}")]
    Rejected(RejReason),
    /// Answered with a REJ or SIDR_REP: what should be an IP header is none.
    #[error("rejected: {0}")]
    IpHeader(#[from] IpHeaderError),
    /// Answered with a SIDR_REP: nobody listens.
    #[error("nobody resolves that service id")]
    NotResolved,
    /// The listener has just gone, or programs are just bringing theirs along: there may be one in a moment.
    #[error("the listener has just gone, or is about to come")]
    Closing,
    /// The listener has as many requests waiting as it may have.
    #[error("the listener's backlog is full")]
    BacklogFull,
    /// The peer has as many requests waiting at the listener as it may have.
    #[error("the peer has too many requests waiting at the listener")]
    PeerLimit,
    /// The listener's owner has as many ids as it may have.
    #[error("the listener's owner has too many ids")]
    OwnerLimit,
    /// The programs of the listener's user have as many ids as they may have.
    #[error("the user of the listener's owner has too many ids")]
    UserLimit,
    /// There are as many ids as there may be.
    #[error("too many ids")]
    IdLimit,
}
