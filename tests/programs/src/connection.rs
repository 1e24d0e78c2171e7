//! How programs of rdmacm-utils are called, and what they print.

use crate::failure::Failure;
use crate::process::Finished;

/// What rping says on stderr when all is well. At its end it closes its event channel without waiting for the thread that reads it.
const REMARKS: &[&str] =
    &["DISCONNECT EVENT...", "wait for RDMA_READ_ADV state 10", "rdma_get_cm_event: Bad file descriptor"];

/// The program of the other end.
pub fn server(client: &'static str) -> &'static str {
    match client {
        "rdma_client" => "rdma_server",
        "rdma_xclient" => "rdma_xserver",
        both => both,
    }
}

/// Arguments of one end, whose own address is `address`; `to` makes it the client.
pub fn arguments(program: &str, options: &str, port: u16, address: &str, to: Option<&str>) -> Vec<String> {
    let port = port.to_string();
    let mut args: Vec<&str> = match (program, to) {
        ("rping", None) => vec!["-s", "-a", address, "-p", &port],
        ("rping", Some(to)) => vec!["-c", "-a", to, "-p", &port],
        ("rstream" | "riostream", None) => vec!["-b", address, "-p", &port],
        // Its ends find each other by the group that the options name.
        ("mckey", None) => vec!["-b", address],
        ("mckey", Some(_)) => vec!["-s", "-b", address],
        ("ucmatose" | "udaddy", None) => vec!["-b", address],
        ("ucmatose" | "udaddy", Some(to)) => vec!["-s", to],
        (_, None) => vec!["-p", &port],
        (_, Some(to)) => vec!["-s", to, "-p", &port],
    };
    args.extend(options.split_whitespace());
    args.into_iter().map(str::to_owned).collect()
}

/// What an end prints when all went well. `name` is that of the process.
fn result(program: &str, options: &str, name: &str) -> String {
    let is_client = name.starts_with("client");
    match program {
        // The last of its tests.
        "rstream" | "riostream" if options.contains("-S all") => "6m_bw".to_owned(),
        "rstream" | "riostream" if options.split_whitespace().any(|word| word == "-S") => "custom".to_owned(),
        "rstream" | "riostream" => "1m_bw".to_owned(),
        "rping" if is_client => "ping data: rdma-ping-4".to_owned(),
        "rping" => "server ping data: rdma-ping-4".to_owned(),
        "ucmatose" | "udaddy" | "mckey" => "return status 0".to_owned(),
        client if is_client => format!("{client}: end 0"),
        "rdma_client" => "rdma_server: end 0".to_owned(),
        _ => "rdma_xserver: end 0".to_owned(),
    }
}

/// Judges what one end printed. Its exit code was 0.
pub fn judge(program: &str, options: &str, finished: &Finished) -> Result<(), Failure> {
    finished.check_stderr(REMARKS)?;
    let text = result(program, options, &finished.name);
    if finished.stdout.contains(&text) {
        return Ok(());
    }
    Err(Failure::new(format!("{} did not print {text:?}", finished.name)).with(finished.report()))
}
