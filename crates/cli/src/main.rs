//! The `ferroce` command. `ferroce --help` is the manual.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "they panic on a closed pipe; see output::Out")]

mod devices;
mod layout;
mod output;
mod perf;
mod programs;
mod refusal;
mod res;
mod rig;
mod run;
mod stat;
mod status;
mod sysfs;
mod verify;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// RDMA for every machine.
///
/// Ferroce is the RDMA stack of a Linux host in user space: programs that speak verbs run unmodified without an RDMA
/// card, a kernel module or root. Packets are RoCEv2.
#[derive(Parser)]
#[command(
    name = "ferroce",
    version,
    after_help = "\
Examples:
  ferroce run -- ibv_devinfo               a stock program on Ferroce
  ferroce devices                          what such a program sees
  ferroce status                           who uses Ferroce on this host
  ferroce res                              its queue pairs, regions, queues and connections
  ferroce stat --watch                     what they count, and how fast it grows
  ferroce verify --self                    is every byte right?
  ferroce perf write-bw --self             how fast is it, and how fast is TCP?

Each command has its own --help with examples."
)]
struct Args {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    Run(run::RunArgs),
    Devices(devices::DevicesArgs),
    Status(status::StatusArgs),
    Res(res::ResArgs),
    Stat(stat::StatArgs),
    Perf(perf::PerfArgs),
    Verify(verify::VerifyArgs),
}

fn main() -> ExitCode {
    let args = Args::parse();
    output::show_warnings();
    let result = match &args.command {
        Cmd::Run(args) => run::run(args),
        Cmd::Devices(args) => devices::run(args),
        Cmd::Status(args) => status::run(args),
        Cmd::Res(args) => res::run(args),
        Cmd::Stat(args) => stat::run(args),
        Cmd::Perf(args) => perf::run(args),
        Cmd::Verify(args) => verify::run(args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) if error.downcast_ref::<output::Closed>().is_some_and(output::Closed::is_broken_pipe) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            output::complain(format_args!("{error:#}"));
            // 126 and 127 are about the command of `ferroce run`, as in env(1).
            ExitCode::from(125)
        }
    }
}
