//! The objects of verbs that have no wire of their own: memory keys, completion queues and channels, receive queues, asynchronous
//! events, limits, flow steering; and the one door to the program's memory.
//!
//! What Linux spreads over `ib_core` and a card's microcode sits here as plain data structures, shared between the program's
//! threads and the engine's lanes. But for flow steering, nothing here knows packets, sockets or clocks. `unsafe` is confined to [`mem`].

pub mod channel;
pub mod cq;
pub mod error;
pub mod event;
pub mod flow;
pub mod keys;
pub mod limits;
pub mod mem;
pub mod recv_queue;
pub mod srq;
pub mod sync;
pub mod tags;
pub mod xrc;

mod event_fd;

pub use channel::CompChannel;
pub use cq::Cq;
pub use error::CoreError;
pub use event::{AsyncEvent, AsyncQueue, EventSource, PortEvent, SrqEvent};
pub use keys::{EntryKind, KeyTable, MrKey, Reregister, WindowKind};
pub use limits::DeviceAttr;
pub use mem::{Buffer, Mapping, RawRegion};
pub use recv_queue::RecvQueue;
pub use srq::Srq;
pub use tags::{TagChange, TagList, TagOp, TaggedRecv};
pub use xrc::{XrcDomain, XrcSrq};
