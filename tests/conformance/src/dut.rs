//! The tester's end of the conversation with `dut.c`.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Longest time that the program may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Compiles `dut.c` to `to`, against the system's verbs library.
pub fn compile(to: &Path) -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("dut.c");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(to)
        .arg(source)
        .arg("-libverbs")
        .stdin(Stdio::null())
        .output()
        .context("cannot run cc: is gcc installed?")?;
    ensure!(
        output.status.success(),
        "cannot compile dut.c (is libibverbs-dev installed?): {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// A connection to the program.
#[derive(Debug)]
pub struct Dut {
    reader: BufReader<TcpStream>,
    /// What the device calls itself.
    pub device: String,
}

/// A memory region of the DUT.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Its number in the conversation.
    pub id: u32,
    /// Address.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub byte_len: u32,
    pub imm: u32,
    pub flags: u32,
    pub src_qp: u32,
}

/// A memory window (type 2) of the DUT, bound.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Its number in the conversation.
    pub id: u32,
    /// Address of its first byte.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// A queue pair to make.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Setup {
    pub kind: Kind,
    pub mtu: u32,
    pub sq_psn: u32,
    pub rq_psn: u32,
    pub access: u32,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub rd_atomic: u8,
    pub dest_rd_atomic: u8,
    pub qkey: u32,
    /// Over IPv6.
    pub v6: bool,
}

/// Service type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Rc,
    Uc,
    Ud,
}

/// A send request.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Post {
    pub opcode: u32,
    pub flags: u32,
    pub region: u32,
    pub offset: i64,
    pub len: u32,
    pub remote: u64,
    /// rkey (also one to invalidate), or the Q_Key of a datagram.
    pub key: u32,
    pub imm: u32,
    pub compare_add: u64,
    pub swap: u64,
}

impl Dut {
    /// Connects, and opens the device that has these addresses, one of IPv4 and one of IPv6.
    pub fn connect(control: SocketAddr, [v4, v6]: [IpAddr; 2]) -> Result<Dut> {
        // The program was told to listen, but it may be slow to start.
        let deadline = Instant::now() + ANSWER_LIMIT;
        let stream = loop {
            match TcpStream::connect_timeout(&control, Duration::from_secs(5)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(error)
                        .with_context(|| format!("cannot connect to the program under test at {control}"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let mut dut = Dut { reader: BufReader::new(stream), device: String::new() };
        let words = dut.ask(&format!("open {v4} {v6}"))?;
        dut.device = words.split(' ').next().unwrap_or_default().to_owned();
        Ok(dut)
    }

    fn ask(&mut self, command: &str) -> Result<String> {
        let mut answer = String::new();
        self.reader.get_mut().write_all(format!("{command}\n").as_bytes()).context("the program under test is gone")?;
        self.reader.read_line(&mut answer).with_context(|| format!("no answer to `{command}`"))?;
        let answer = answer.trim();
        match answer.strip_prefix("ok") {
            Some(words) => Ok(words.trim().to_owned()),
            None if answer.is_empty() => bail!("the program under test ended at `{command}`"),
            None => bail!("`{command}`: {}", answer.trim_start_matches("err ")),
        }
    }

    /// Destroys all that was made.
    pub fn reset(&mut self) -> Result<()> {
        self.ask("reset").map(drop)
    }

    /// Registers fresh zero bytes in protection domain `pd`, 0 (that of the queue pairs) or 1.
    pub fn region(&mut self, id: u32, size: usize, access: u32, pd: u32) -> Result<Region> {
        let words = self.ask(&format!("mr {id} {size} {access} {pd}"))?;
        let numbers = numbers(&words)?;
        ensure!(numbers.len() == 3, "odd answer {words:?}");
        Ok(Region { id, addr: numbers[0], rkey: numbers[2] as u32 })
    }

    /// Deregisters; the memory stays.
    pub fn deregister(&mut self, region: Region) -> Result<()> {
        self.ask(&format!("dereg {}", region.id)).map(drop)
    }

    /// Writes into a region's memory, or beside it.
    pub fn put(&mut self, region: Region, offset: i64, bytes: &[u8]) -> Result<()> {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.ask(&format!("put {} {offset} {hex}", region.id)).map(drop)
    }

    /// Reads a region's memory, or what is beside it.
    pub fn get(&mut self, region: Region, offset: i64, len: usize) -> Result<Vec<u8>> {
        let hex = self.ask(&format!("get {} {offset} {len}", region.id))?;
        ensure!(hex.len() == 2 * len, "odd answer of {} digits", hex.len());
        hex.as_bytes().chunks(2).map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
    }

    /// Makes a queue pair to the tester's `peer_qpn` and takes it to RTS; gives its number.
    pub fn queue_pair(&mut self, id: u32, peer: IpAddr, peer_qpn: u32, setup: &Setup) -> Result<u32> {
        let kind = match setup.kind {
            Kind::Rc => "rc",
            Kind::Uc => "uc",
            Kind::Ud => "ud",
        };
        let Setup { mtu, sq_psn, rq_psn, access, min_rnr_timer, timeout, retry_cnt, rnr_retry, .. } = setup;
        let Setup { rd_atomic, dest_rd_atomic, qkey, .. } = setup;
        let words = self.ask(&format!(
            "qp {id} {kind} {peer} {peer_qpn} {mtu} {sq_psn} {rq_psn} {access} {min_rnr_timer} {timeout} {retry_cnt} \
             {rnr_retry} {rd_atomic} {dest_rd_atomic} {qkey}"
        ))?;
        words.parse().with_context(|| format!("odd answer {words:?}"))
    }

    /// Posts the binding of window `id` to part of a region, for a queue pair; its completion is still to come. A window that is not
    /// there yet is made; one that is gets its next key.
    pub fn bind(
        &mut self,
        id: u32,
        (qp, wr_id): (u32, u64),
        region: Region,
        offset: u64,
        len: u32,
        access: u32,
    ) -> Result<Window> {
        let words = self.ask(&format!("bind {qp} {wr_id} {id} {} {offset} {len} {access}", region.id))?;
        let rkey = words.parse().with_context(|| format!("odd answer {words:?}"))?;
        Ok(Window { id, addr: region.addr + offset, rkey })
    }

    /// State of a queue pair, an `ibv_qp_state`.
    pub fn state(&mut self, qp: u32) -> Result<u32> {
        self.ask(&format!("state {qp}"))?.parse().context("odd answer")
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, qp: u32, wr_id: u64, region: Region, offset: i64, len: u32) -> Result<()> {
        self.ask(&format!("recv {qp} {wr_id} {} {offset} {len}", region.id)).map(drop)
    }

    /// Posts a send request.
    pub fn post_send(&mut self, qp: u32, wr_id: u64, post: &Post) -> Result<()> {
        let Post { opcode, flags, region, offset, len, remote, key, imm, compare_add, swap } = post;
        self.ask(&format!(
            "send {qp} {wr_id} {opcode} {flags} {region} {offset} {len} {remote} {key} {imm} {compare_add} {swap}"
        ))
        .map(drop)
    }

    /// Waits for `count` completions; gives fewer if they do not come in time.
    pub fn wait(&mut self, qp: u32, count: usize, limit: Duration) -> Result<Vec<Wc>> {
        let words = self.ask(&format!("wait {qp} {count} {}", limit.as_millis()))?;
        words.split_whitespace().map(completion).collect()
    }
}

fn numbers(words: &str) -> Result<Vec<u64>> {
    words.split_whitespace().map(|word| word.parse().with_context(|| format!("odd answer {words:?}"))).collect()
}

fn completion(word: &str) -> Result<Wc> {
    let fields = numbers(&word.replace(':', " "))?;
    let &[wr_id, status, opcode, byte_len, imm, flags, src_qp] = fields.as_slice() else {
        bail!("odd completion {word:?}")
    };
    let [status, opcode, byte_len, imm, flags, src_qp] =
        [status, opcode, byte_len, imm, flags, src_qp].map(|n| n as u32);
    Ok(Wc { wr_id, status, opcode, byte_len, imm, flags, src_qp })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_read() {
        let wc = completion("7:0:128:100:5:3:17").expect("is one");
        assert_eq!((wc.wr_id, wc.byte_len, wc.src_qp), (7, 100, 17));
        completion("7:0").expect_err("is too short");
    }
}
