//! RDMA verbs for every machine: no card, no kernel module, no root.
//!
//! The objects are those of verbs: a [`Device`] is opened to a [`Context`], which makes [`Pd`]s and [`Cq`]s; a PD makes [`Mr`]s,
//! [`Qp`]s, [`Srq`]s and [`Ah`]s. Whole Ethernet frames go through queue pairs of type RAW_PACKET, to which [`Flow`]s steer what comes in, or
//! over [`Wq`]s, over which they are spread. Everything is shared by `Arc` and may be used from any thread.
//!
//! Packets are RoCEv2 on UDP port 4791, so that the peer may be another Ferroce, Linux's rdma_rxe or a hardware card.

mod context;
mod counters_file;
mod cq;
mod device;
mod error;
mod fork;
mod groups;
mod inspect;
mod library;
mod link;
mod mw;
mod objects;
mod pair;
mod pd;
mod qp;
mod reach;
mod relay;
mod route;
mod settings;
mod srq;
mod steering;
mod watch;
mod wq;
mod xrc;

pub use context::{Context, service, settle_before_exit};
pub use cq::{Cq, EventsDelivered};
pub use device::{Device, GidEntry, PortAttr, device_named, device_of, devices};
pub use error::{Error, Result};
pub use ferroce_core::mem::{Fault, page_size};
pub use ferroce_core::{
    AsyncEvent, Buffer, CompChannel, Mapping, RawRegion, TagChange, TagOp, TaggedRecv, WindowKind, flow, limits, sync,
};
pub use ferroce_engine::{Attendance, Counters, QueueCaps};
pub use ferroce_service::standing::know_stderr;
pub use ferroce_service::{ServiceError, client::Client, cm, environment};
pub use ferroce_transport::{
    Access, Completion, FlushRange, MwBind, PathAddr, Placement, QpAttr, QpAttrMask, QpEvent, QpState, QpType, RecvWr,
    SendData, SendFlags, SendOp, SendWr, Sge, UdDest, WcFlags, WcOpcode, WcStatus,
};
pub use ferroce_wire::Psn;
pub use fork::{after_fork_in_child, after_fork_in_parent, before_fork, prepare};
pub use mw::Mw;
pub use pair::{ConnectOptions, Endpoint};
pub use pd::{Ah, AhAttr, DMABUF_ACCESS, Mr, Pd, address_of};
pub use qp::{InitiatorCreate, Qp, QpCreate, QpModify};
pub use reach::{Verdict, cancel as cancel_wait, wait_for_neighbour};
pub use settings::{Setting, settings};
pub use srq::{Srq, SrqCreate, TagSrqCreate};
pub use steering::Flow;
pub use wq::{RwqTable, SpreadCreate, Wq, WqCreate, WqState};
pub use xrc::{Xrcd, XrcdOpen};
