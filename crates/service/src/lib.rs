//! The service that arbitrates between the processes of one network namespace, and its client.
//!
//! The service owns UDP port 4791. It leases *lanes*: a receive socket of the port's group, and
//! the QP numbers whose upper 10 bits name the lane. A BPF program in the kernel steers packets
//! to lanes, so that the service is not on the data path. See [`client::Client`] and [`server`].

pub mod client;
mod closing;
pub mod cm;
pub mod config;
pub mod devices;
mod doubt;
pub mod environment;
mod error;
mod group;
pub mod inspect;
pub mod keeper;
pub mod logging;
mod netlink;
mod owner;
mod probe;
pub mod protocol;
pub mod regular_file;
mod seqpacket;
pub mod server;
pub mod standing;
pub mod start;
mod steer;
mod store;
mod sys;

pub use error::ServiceError;

/// Why a service would not start where none runs, as far as that shows without starting one: a variable or the configuration says what
/// cannot be, or somebody else has the port.
pub fn obstacle() -> Option<ServiceError> {
    let variables = start::named().err().or_else(|| config::idle_s().err());
    variables.or_else(|| config::Config::load().err()).or_else(|| group::is_held(ferroce_wire::UDP_PORT))
}

/// Abstract Unix socket name at which the service of a network namespace listens.
pub const DEFAULT_NAME: &str = "ferroce-service-1";

/// Largest lane number; 0 is the service's own.
pub const LANE_MAX: u16 = 1023;
