//! Honest traffic: what must go on while others misbehave. Between two queue pairs of this process, and with another process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ferroce::{
    Access, Buffer, Completion, ConnectOptions, Context, Cq, Endpoint, Mr, Qp, QpCreate, QpType, QueueCaps, RecvWr,
    SendData, SendFlags, SendOp, SendWr, Sge, WcStatus,
};
use serde::{Deserialize, Serialize};

use crate::source::{Seed, Source};

/// Bytes of each end's memory: the first half is written by the peer, the second is the end's own.
const MEMORY: usize = 1 << 17;
/// Longest message.
const MESSAGE: u32 = 40_000;
/// How long a request may take on a busy machine before something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// What one end tells the other.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Card {
    /// Queue pair number.
    pub qpn: u32,
    /// First PSN.
    pub psn: u32,
    /// GID.
    pub gid: [u8; 16],
    /// Address of the memory.
    pub addr: u64,
    /// Its key.
    pub rkey: u32,
}

/// A queue pair with memory.
#[derive(Debug)]
pub struct End {
    cq: Arc<Cq>,
    qp: Arc<Qp>,
    buffer: Arc<Buffer>,
    mr: Arc<Mr>,
    psn: u32,
}

impl End {
    /// A queue pair in RESET, with a protection domain and a completion queue of its own.
    ///
    /// # Errors
    /// A verb was refused.
    pub fn new(context: &Arc<Context>, psn: u32) -> Result<End> {
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(64, None, 0)?;
        let qp = pd.create_qp(&QpCreate {
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            srq: None,
            caps: QueueCaps { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 },
            qp_type: QpType::Rc,
            sq_sig_all: false,
            cookie: u64::MAX,
        })?;
        let buffer = Arc::new(Buffer::new(MEMORY));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mr = pd.reg_buffer(&buffer, access)?;
        Ok(End { cq, qp, buffer, mr, psn })
    }

    /// What the peer must know.
    ///
    /// # Errors
    /// The device has no GID.
    pub fn card(&self) -> Result<Card> {
        let Endpoint { qpn, psn, gid } = self.qp.endpoint(0, self.psn)?;
        Ok(Card { qpn, psn, gid, addr: self.buffer.addr(), rkey: self.mr.rkey() })
    }

    /// To RTS.
    ///
    /// # Errors
    /// A change of state was refused.
    pub fn connect(&self, peer: &Card, options: &ConnectOptions) -> Result<()> {
        let endpoint = Endpoint { qpn: peer.qpn, psn: peer.psn, gid: peer.gid };
        Ok(self.qp.connect(self.psn, &endpoint, options)?)
    }

    fn post(&self, op: SendOp, offset: usize, length: u32) -> Result<()> {
        let sge = Sge { addr: self.buffer.addr() + offset as u64, length, lkey: self.mr.lkey() };
        let data = SendData::Sges([sge].into_iter().collect());
        self.qp.post_send(SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, data, ud: None, xrc_srqn: None })?;
        self.qp.ring();
        Ok(())
    }

    /// Waits for one completion.
    fn wait(&self) -> Result<Completion> {
        let mut out = [Completion::UNUSED];
        let start = Instant::now();
        while self.cq.poll(&mut out)? == 0 {
            if start.elapsed() > PATIENCE {
                bail!("no completion within {PATIENCE:?}");
            }
        }
        Ok(out[0])
    }

    /// Runs one request to its successful end.
    fn run(&self, op: SendOp, offset: usize, length: u32) -> Result<()> {
        self.post(op.clone(), offset, length)?;
        let completion = self.wait()?;
        ensure!(completion.status == WcStatus::Success, "{op:?} of {length} bytes ended with {completion:?}");
        Ok(())
    }

    /// WRITEs bytes into the peer's memory, READs them back and compares; then counts by an atomic.
    ///
    /// # Errors
    /// Anything but success, or other bytes.
    pub fn round(&self, peer: &Card, source: &mut Seed) -> Result<()> {
        let length = 1 + source.below(MESSAGE);
        let offset = source.below((MEMORY / 2) as u32 - length) as usize;
        let mut sent = vec![0; length as usize];
        source.fill(&mut sent);
        let own = MEMORY / 2;
        self.buffer.write(own, &sent);
        let (raddr, rkey) = (peer.addr + offset as u64, peer.rkey);
        self.run(SendOp::Write { raddr, rkey }, own, length)?;
        self.buffer.write(own, &vec![0; length as usize]);
        self.run(SendOp::Read { raddr, rkey }, own, length)?;
        let mut back = vec![0; length as usize];
        self.buffer.read(own, &mut back);
        ensure!(back == sent, "{length} bytes came back changed");
        self.run(SendOp::FetchAdd { raddr: peer.addr + own as u64, rkey, add: 1 }, own, 8)
    }
}

/// Two queue pairs of this process: rounds until `stop`. Gives the number of rounds.
///
/// # Errors
/// Honest traffic failed.
pub fn within_process(context: &Arc<Context>, stop: &AtomicBool) -> Result<u64> {
    let (a, b) = (End::new(context, 0x1234)?, End::new(context, 0xabcdef)?);
    let (card_a, card_b) = (a.card()?, b.card()?);
    a.connect(&card_b, &ConnectOptions::default())?;
    b.connect(&card_a, &ConnectOptions::default())?;
    let mut source = Seed::new(7);
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        a.round(&card_b, &mut source)?;
        b.round(&card_a, &mut source)?;
        send_once(&a, &b, rounds)?;
        rounds += 1;
    }
    Ok(rounds)
}

/// One SEND from `a` to `b`.
fn send_once(a: &End, b: &End, round: u64) -> Result<()> {
    let sge = Sge { addr: b.buffer.addr(), length: 8, lkey: b.mr.lkey() };
    b.qp.post_recv(RecvWr { wr_id: round, sges: [sge].into_iter().collect() })?;
    a.buffer.write(MEMORY / 2, &round.to_ne_bytes());
    a.run(SendOp::Send, MEMORY / 2, 8)?;
    let completion = b.wait()?;
    ensure!(completion.status == WcStatus::Success && completion.wr_id == round, "{completion:?}");
    let mut got = [0; 8];
    b.buffer.read(0, &mut got);
    ensure!(u64::from_ne_bytes(got) == round, "message {round} came as {got:?}");
    Ok(())
}

/// A process with a queue pair and memory, which does nothing by itself.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    /// Its end closes the peer.
    stdin: Option<ChildStdin>,
    says: BufReader<ChildStdout>,
}

/// Name of the subcommand that [`Peer`] runs.
pub const PEER_COMMAND: &str = "peer";

impl Peer {
    /// Starts this program once more, as a peer, and connects `end` with it.
    ///
    /// # Errors
    /// It does not start, or says something else than it should.
    pub fn connect(end: &End) -> Result<(Peer, Card)> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(PEER_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the peer")?;
        let says = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        let mut peer = Peer { stdin: child.stdin.take(), says, child };
        tell(peer.stdin.as_mut().expect("stdin is a pipe"), &end.card()?)?;
        let card: Card = hear(&mut peer.says)?;
        // Packets are lost for want of room in the receive buffer, and the peer has to share the machine.
        end.connect(&card, &ConnectOptions { timeout: 20, ..ConnectOptions::default() })?;
        Ok((peer, card))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // It ends with its standard input; if not, it is no use waiting.
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.child.try_wait().is_ok_and(|status| status.is_none()) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The peer itself: takes a card, gives its own, and is there until its standard input ends.
///
/// # Errors
/// A verb was refused.
pub fn peer(context: &Arc<Context>) -> Result<()> {
    let mut stdin = std::io::stdin().lock();
    let card: Card = hear(&mut stdin)?;
    let end = End::new(context, 0x5a5a5a)?;
    end.connect(&card, &ConnectOptions::default())?;
    tell(&mut std::io::stdout().lock(), &end.card()?)?;
    // The card works while the program waits.
    while stdin.read_line(&mut String::new())? > 0 {}
    Ok(())
}

/// Says a line.
pub(crate) fn tell<T: Serialize>(to: &mut impl Write, what: &T) -> Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    to.write_all(line.as_bytes())?;
    Ok(to.flush()?)
}

/// Hears a line.
pub(crate) fn hear<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    ensure!(!line.is_empty(), "the other process ended without a word");
    serde_json::from_str(&line).with_context(|| format!("the other process said {line:?}"))
}

/// Rounds with a peer in another process until `stop`. Gives the number of rounds.
///
/// # Errors
/// Honest traffic failed.
pub fn with_peer(context: &Arc<Context>, stop: &AtomicBool) -> Result<u64> {
    let end = End::new(context, 0x00ff_fff0)?;
    let (_peer, card) = Peer::connect(&end)?;
    let mut source = Seed::new(8);
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        end.round(&card, &mut source)?;
        rounds += 1;
    }
    Ok(rounds)
}
