//! Plays one end of RoCEv2 by hand and judges the other end by the specification.
//!
//! The device under test (DUT) is Ferroce in a network namespace of its own, or the rxe of a Linux kernel in QEMU. Both are
//! driven alike: a small verbs program (`dut.c`) makes queue pairs and posts as it is told over TCP ([`dut`]), and the tester
//! sits on the other end of the DUT's interface with a packet socket ([`wire`]), where it makes every frame by itself, with
//! sequence numbers and ICRC of its own choice ([`frame`]).
//!
//! What is tested is data: [`cases`]. A verdict is **follows** or **departs**, with what was seen ([`report`]). Silence is shown
//! by the next answer, not by waiting: after a packet that must be dropped comes one that must be answered, and the first
//! packet heard must be that answer. Times are judged from below only, so a loaded machine changes no verdict.

pub mod bench;
pub mod cases;
pub mod dut;
pub mod frame;
pub mod place;
pub mod report;
pub mod wire;
