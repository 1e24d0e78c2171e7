//! Connections: programs speak RDMA-CM to the service, the service speaks communication management to other hosts.
//!
//! | file | part |
//! |---|---|
//! | `protocol` | messages between program and service |
//! | `host` | the one [`Cm`](ferroce_cm::Cm) of a service, whose ids belong to clients; event channels |
//! | `gsi` | queue pair 1: packets in and out |
//! | `client` | what librdmacm calls |
//! | `route` | what a program finds out by itself: device, source address and path |
//! | `neighbour` | likewise: whether anybody is at the address |
//!
//! A program opens *event channels*: each is a socket of which it holds one end; it is readable when an event waits, and obeys
//! O_NONBLOCK. Ids are made on a channel and owned by the client that made them. A client's ids end with it, and a channel's ids
//! with the last copy of its descriptor.
//!
//! A service that takes over after a crash knows no connections: channels end (ECONNRESET). Programs open new ones, adopt the
//! connections that they kept ([`client`]), and listen again; what was not established yet is lost, and its peers hear of it by
//! their retries.

pub mod client;
mod gsi;
mod host;
pub mod neighbour;
pub mod protocol;
pub mod route;

pub(crate) use gsi::{Gsi, Inbound};
pub(crate) use host::{Asker, Host, Outcome};
