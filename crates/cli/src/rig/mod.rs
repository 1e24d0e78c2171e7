//! What `perf` and `verify` share: two processes, a TCP side channel, registered memory, connected queue pairs.

mod control;
mod endpoint;
mod memory;
mod partner;
mod place;
mod reception;

pub(crate) use control::{Control, INTRODUCTION_PATIENCE, listen};
pub(crate) use endpoint::{Choice, Endpoint, Peer, PeerQp, QKEY, Settings, status_error};
pub(crate) use memory::Registered;
pub(crate) use partner::Partner;
pub(crate) use place::Place;
pub(crate) use reception::{Client, Reception};
