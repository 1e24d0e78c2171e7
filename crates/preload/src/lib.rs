//! `libferroce-sysfs.so`, preloaded by `ferroce run --sysfs`: a program that looks for RDMA devices in the file system finds Ferroce's.
//!
//! Functions of the C library that take a path are replaced. A path below `/sys/class/infiniband`, `/sys/class/infiniband_verbs` or
//! `/dev/infiniband` is looked up in the folder that `FERROCE_SYSFS` names (made by `ferroce run`); every other path, and every other
//! argument, goes on as it is. Nothing here allocates, locks or fails by itself, so that the functions stay as safe in signal handlers
//! and between fork and exec as they were.
//!
//! Programs that make system calls without the C library (static ones, Go's) do not come by here.

#![allow(unsafe_code, reason = "functions of the C library, with their raw pointers; each block has a proof")]

pub mod hooks;
mod real;
mod redirect;
