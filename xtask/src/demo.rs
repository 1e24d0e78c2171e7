//! `cargo xtask demo`: the README's first command.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::process::{installed, print, run, show};
use crate::{dist, pair};

/// Stock programs worth showing: name, Debian package, options of both ends, option of the port.
const STOCK: &[(&str, &str, &[&str], &str)] = &[
    ("ibv_rc_pingpong", "ibverbs-utils", &["-g", "0"], "-p"),
    ("ib_write_bw", "perftest", &["-x", "0", "-s", "65536", "-n", "5000"], "-p"),
    ("ib_send_lat", "perftest", &["-x", "0", "-n", "5000"], "-p"),
];

/// Builds all and shows it at work. Fails if anything that is shown fails.
pub(crate) fn demo(root: &Path) -> Result<()> {
    let out = dist::build(root)?;
    let ferroce = out.join("bin/ferroce");

    title("The RDMA devices of this machine");
    run(Command::new(&ferroce).arg("devices"))?;

    title("Two processes: SEND, WRITE, READ, atomics; every byte checked at both ends");
    run(Command::new(&ferroce).args(["verify", "--self"]))?;

    title("How fast, and TCP between the same addresses");
    run(Command::new(&ferroce).args(["perf", "all", "--self", "--duration", "0.5"]))?;

    for (program, package, options, port) in STOCK {
        if installed(program) {
            title(&format!("Debian's own {program}, unmodified, in two processes"));
            stock(&ferroce, program, options, port)?;
        } else {
            title(&format!("Debian's own {program} is not installed (apt-get install {package})"));
        }
    }
    title("That was Ferroce. Now a program of yours");
    println!("{} run -- ibv_devinfo -v", ferroce.display());
    Ok(())
}

fn title(text: &str) {
    // Standard output and standard error meet on a terminal only; a title belongs to what comes after it.
    print(format_args!("\n== {text}"));
}

/// Runs a server and a client of one stock program.
fn stock(ferroce: &Path, program: &str, options: &[&str], port_option: &str) -> Result<()> {
    let port = pair::free_port()?;
    let call = |host: &[&str]| {
        let mut command = Command::new(ferroce);
        command.args(["run", "--", program]).args(options).args([port_option, &port.to_string()]).args(host);
        command
    };
    print(format_args!("$ {}", show(&call(&["localhost"]))));
    pair::run(&mut call(&[]), &mut call(&["localhost"]), port)
}
