//! Runs stock verbs programs between Ferroce and Linux's `rdma_rxe`, an implementation that nobody here wrote.
//!
//! The kernel is Debian's, in a virtual machine that QEMU emulates (no KVM is needed). Its network card is a tap device
//! in a network namespace that the bench makes itself; Ferroce runs in that namespace, on the tap. In the guest runs this
//! same executable as `/init` ([`agent`]): it starts programs and hands back what they print, over a virtio serial port,
//! so that the network under test carries nothing of the bench's own. One boot serves many lines.
//!
//! What is run is data: [`table`]. A failure is told as one of the guest, the network, a program or the protocol:
//! [`trouble`].

pub mod agent;
pub mod capture;
pub mod compile;
pub mod counted;
pub mod cpio;
pub mod ends;
pub mod guest;
pub mod image;
pub mod kernel;
pub mod line;
pub mod modules;
pub mod needs;
pub mod remote;
pub mod run;
pub mod table;
pub mod trouble;
pub mod world;
