//! Captures of the wire, and what Wireshark's dissectors say of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use program_tests::failure::Failure;
use program_tests::interrupt;
use program_tests::process::Running;
use rustix::process::Signal;

/// Longest time until a capture runs, or has ended.
const SOON: Duration = Duration::from_secs(60);
/// A capture has all packets when its file has not grown for so long.
const QUIET: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// dumpcap at work on an interface of a network namespace.
pub struct Tap {
    dumpcap: Running,
    file: PathBuf,
}

impl Tap {
    /// Captures what has RoCE's UDP port, on the interface `name` of `netns`, into `file`; its output goes to files in `dir`.
    pub fn start(netns: &str, name: &str, file: &Path, dir: &Path) -> Result<Tap, Failure> {
        let _ = std::fs::remove_file(file);
        let mut command = Command::new("nsenter");
        command
            .args([&format!("--net=/run/netns/{netns}"), "--", "dumpcap", "-q", "-P", "-i", name])
            // A buffer in MiB that holds all that a line sends.
            .args(["-B", "256", "-f", "udp port 4791", "-w"])
            .arg(file);
        let mut dumpcap = Running::start("dumpcap", command, dir)?;
        let deadline = Instant::now() + SOON;
        // It makes the file when the interface is open and the filter set.
        while size(file) == 0 {
            if dumpcap.poll()?.is_some() {
                let finished = dumpcap.wait(Duration::ZERO)?;
                return Err(Failure::new("dumpcap does not capture").with(finished.report()));
            }
            if Instant::now() > deadline {
                return Err(Failure::new("dumpcap did not begin"));
            }
            interrupt::check()?;
            sleep(LOOK_AGAIN);
        }
        Ok(Tap { dumpcap, file: file.to_owned() })
    }

    /// Ends the capture, when all packets are in the file.
    pub fn stop(self) -> Result<(), Failure> {
        let mut last = (size(&self.file), Instant::now());
        while last.1.elapsed() < QUIET {
            interrupt::check()?;
            sleep(LOOK_AGAIN);
            let now = size(&self.file);
            if now != last.0 {
                last = (now, Instant::now());
            }
        }
        self.dumpcap.signal(Signal::INT);
        let finished = self.dumpcap.wait(SOON)?;
        finished.check_success()
    }
}

/// What tshark is asked of each frame: by the first three it is judged, by the others found again in another capture.
const FIELDS: &[&str] = &[
    "_ws.malformed",
    "_ws.expert.severity",
    "infiniband.bth.opcode",
    "_ws.col.Info",
    "ip.src",
    "ip.dst",
    "ip.id",
    "ipv6.src",
    "ipv6.dst",
    "udp.srcport",
    "udp.payload",
];

/// Dissectors that look into any payload and guess: ours is random, and some day one would recognise it, and find it malformed.
const GUESSES: &[&str] = &[
    "smcr_infiniband",
    "smb_direct_infiniband",
    "rpcrdma_infiniband",
    "nvme_rdma",
    "lnet_ib",
    "iser_infiniband",
    "eth_over_ib",
    "mellanox_eoib",
    "sdp_infiniband",
    "fc_infiniband",
];

/// Severities from this on are warnings and errors (a number of Wireshark's).
const WARNING: u64 = 0x60_0000;

/// A frame as tshark tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    /// Opcode of the BTH.
    opcode: u8,
    /// From where to where, and all its bytes behind the UDP header.
    identity: String,
}

/// Dissects a capture; a frame that is malformed, unknown, or none of InfiniBand's is an error.
fn dissect(file: &Path) -> Result<Vec<Frame>, Failure> {
    let mut command = Command::new("tshark");
    // rxe sends no UDP checksum over IPv6 either, as RFC 6935 allows a tunnel.
    command.args(["-n", "-o", "udp.ignore_ipv6_zero_checksum:TRUE", "-T", "fields", "-r"]).arg(file);
    GUESSES.iter().for_each(|guess| _ = command.args(["--disable-heuristic", guess]));
    FIELDS.iter().for_each(|field| _ = command.args(["-e", field]));
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::new(format!("cannot run tshark: {e}; is it installed?")))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Failure::new(format!("tshark cannot read {}", file.display())).with(why));
    }
    parse(&String::from_utf8_lossy(&output.stdout)).map_err(|failure| failure.with(file.display().to_string()))
}

fn parse(text: &str) -> Result<Vec<Frame>, Failure> {
    let mut frames = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let fail = |what: &str| Err(Failure::new(format!("frame {number} {what}")).with(line.to_owned()));
        let mut fields = line.split('\t');
        let mut next = || fields.next().unwrap_or_default();
        let (malformed, severity, opcode, info) = (next(), next(), next(), next());
        if !malformed.is_empty() {
            return fail("is malformed");
        }
        if severity.split(',').filter_map(|word| word.parse::<u64>().ok()).any(|severity| severity >= WARNING) {
            return fail("is not in order");
        }
        let Ok(opcode) = opcode.parse() else { return fail("is not InfiniBand's") };
        if info.contains("Unknown") {
            return fail("is unknown");
        }
        frames.push(Frame { opcode, identity: fields.collect::<Vec<_>>().join(" ") });
    }
    Ok(frames)
}

/// Judges the captures that Ferroce wrote of a line beside that of the tap: all frames are dissected, the opcodes `wanted` are
/// among them, and what Ferroce captured passed the tap so.
pub fn judge(ferroce: &[PathBuf], tap: &Path, wanted: &[u8]) -> Result<(), Failure> {
    let mut frames = Vec::new();
    for file in ferroce {
        frames.extend(dissect(file)?);
    }
    compare(&frames, &dissect(tap)?, wanted)
}

fn compare(ferroce: &[Frame], tap: &[Frame], wanted: &[u8]) -> Result<(), Failure> {
    for (who, frames) in [("Ferroce", ferroce), ("the tap", tap)] {
        let opcodes: BTreeSet<u8> = frames.iter().map(|frame| frame.opcode).collect();
        let absent: Vec<_> = wanted.iter().filter(|opcode| !opcodes.contains(opcode)).collect();
        if !absent.is_empty() {
            let count = frames.len();
            return Err(Failure::new(format!("{count} frames captured by {who} lack the opcodes {absent:?}")));
        }
    }
    let mut left: BTreeMap<&str, u32> = BTreeMap::new();
    for frame in tap {
        *left.entry(&frame.identity).or_default() += 1;
    }
    for (frame, number) in ferroce.iter().zip(1..) {
        match left.get_mut(frame.identity.as_str()) {
            Some(count @ 1..) => *count -= 1,
            Some(0) | None => {
                let failure = Failure::new(format!("frame {number} of Ferroce's capture did not pass the tap so"));
                return Err(failure.with(frame.identity.clone()));
            }
        }
    }
    Ok(())
}

fn size(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |metadata| metadata.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\t\t17\tRC Acknowledge QP=0x12\t10.88.0.1\t10.88.0.2\t0x0000\t\t\t50000\t1100ffff\n";

    #[test]
    fn frames_that_are_not_in_order_are_told() {
        let frames = parse(GOOD).expect("is in order");
        assert_eq!(frames[0].opcode, 17);
        assert!(frames[0].identity.starts_with("10.88.0.1 10.88.0.2 0x0000"), "{}", frames[0].identity);
        let with = |from: &str, to: &str| parse(&format!("{GOOD}{}", GOOD.replacen(from, to, 1)));
        let told = |result: Result<Vec<Frame>, Failure>| result.expect_err("is not in order").what().to_owned();
        assert_eq!(told(with("\t\t17", "[Malformed Packet: UDP]\t8388608\t17")), "frame 2 is malformed");
        assert_eq!(told(with("\t\t17", "\t2097152,8388608\t17")), "frame 2 is not in order");
        assert_eq!(told(with("\t\t17", "\t\t")), "frame 2 is not InfiniBand's");
        assert_eq!(told(with("Acknowledge", "Unknown OpCode")), "frame 2 is unknown");
        with("\t\t17", "\t2097152\t17").expect("a remark is no fault");
    }

    #[test]
    fn captures_are_compared() {
        let frames = |list: &[(u8, &str)]| -> Vec<Frame> {
            list.iter().map(|(opcode, identity)| Frame { opcode: *opcode, identity: (*identity).to_owned() }).collect()
        };
        let tap = frames(&[(4, "a"), (17, "b"), (17, "b"), (17, "late")]);
        compare(&frames(&[(17, "b"), (4, "a"), (17, "b")]), &tap, &[4, 17]).expect("the tap has more");
        let failure = compare(&frames(&[(4, "a"), (4, "a")]), &tap, &[4]).expect_err("it passed once");
        assert_eq!(failure.what(), "frame 2 of Ferroce's capture did not pass the tap so");
        compare(&frames(&[(4, "c")]), &tap, &[4]).expect_err("it did not pass");
        let failure = compare(&frames(&[(4, "a")]), &tap, &[4, 17]).expect_err("has no 17");
        assert_eq!(failure.what(), "1 frames captured by Ferroce lack the opcodes [17]");
    }
}
