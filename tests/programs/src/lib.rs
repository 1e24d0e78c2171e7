//! Runs foreign verbs programs, unmodified, on Ferroce.
//!
//! The programs are Debian's ibverbs-utils and perftest, and C programs of this folder that use nothing but the C
//! interface; where asked for, Debian 13's perftest too, from a [`chroot`]. Each runs as an ordinary user without
//! privileges, with 64 KiB of lockable memory and an empty environment, in network namespaces that the harness makes
//! itself: as an ordinary person's two terminals, or two hosts and a cable.
//!
//! What is run is data: [`table`] has the places, the programs with their options, and the smoke set; [`scenario`] has
//! what needs a procedure of its own. `known.toml` lists what is known to fail.

pub mod chroot;
pub mod compile;
pub mod connection;
pub mod failure;
pub mod interrupt;
pub mod known;
pub mod launch;
pub mod line;
pub mod net;
pub mod parse;
pub mod place;
pub mod process;
pub mod run;
pub mod scenario;
pub mod table;
