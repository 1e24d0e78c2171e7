//! `ferroce perf`: how fast, and TCP beside it.

mod load;
mod plan;
mod report;
mod tcp;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Result, bail};
use ferroce::{Qp, QpType};

use self::load::Load;
use self::plan::{
    Asked, Extent, Greeting, HELLO, Introduction, MAX_SIZE, Measure, Ready, Step, Test, Verb, parse_size,
};
use self::report::{Figures, Outcome, Setting};
use crate::output::{Out, complain};
use crate::rig::{
    Client, Control, Endpoint, INTRODUCTION_PATIENCE, Partner, Peer, PeerQp, Place, Reception, Registered, Settings,
    listen,
};

/// Most queue pairs of one test.
const MAX_QPS: u32 = 1024;

/// Measure bandwidth and latency between two processes, and TCP doing the same.
///
/// Start `ferroce perf server` at one end and a test at the other, or let --self start both here. Each line is followed
/// by the same exchange over TCP, between the same addresses: a TCP that spins where RDMA polls, a TCP that sleeps where
/// RDMA waits for events (--events). Latency is one way (half of a round trip) for send and write, the whole operation
/// for read and atomic.
#[derive(clap::Args)]
#[command(after_help = "\
Tests:
  send-bw write-bw read-bw atomic-bw send-lat write-lat read-lat atomic-lat all

Examples:
  ferroce perf all --self                              everything, on this machine
  ferroce perf server                                  (one machine)
  ferroce perf write-bw 192.0.2.7 --all                (another) 2 B to 8 MiB
  ferroce perf send-lat 192.0.2.7 --sizes 2,4K --iters 100000
  ferroce perf read-bw --self --qps 16 --duration 5 --json")]
pub(crate) struct PerfArgs {
    /// What to do: server, all, or the name of a test (see below)
    #[arg(value_name = "TEST")]
    asked: Asked,
    /// Where the server runs
    host: Option<String>,
    #[command(flatten)]
    place: Place,
    /// Message sizes, such as 2,4K,64K,1M [default: 64K for bandwidth, 2 for latency]
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<u32>,
    /// All powers of two from 2 B to 8 MiB
    #[arg(long, conflicts_with = "sizes")]
    all: bool,
    /// Queue pairs (bandwidth tests use all of them, latency tests one)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_QPS)))]
    qps: u32,
    /// Requests in flight on each queue pair
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(4..=8192))]
    depth: u32,
    /// Seconds for each line
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds)]
    duration: f64,
    /// Messages for each line, instead of a duration
    #[arg(long, conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Sleep until completions come, instead of polling
    #[arg(long)]
    events: bool,
    /// Largest payload sent inline, in bytes
    #[arg(long, default_value_t = 220, value_parser = clap::value_parser!(u32).range(0..=1024))]
    inline: u32,
    /// Path MTU in bytes [default: the largest that both ends can do]
    #[arg(long)]
    mtu: Option<u32>,
    /// Do not measure TCP
    #[arg(long)]
    no_tcp: bool,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected 0.01 to 3600 seconds".into())
}

pub(crate) fn run(args: &PerfArgs) -> Result<u8> {
    match &args.asked {
        Asked::Server => serve(args),
        Asked::Tests(tests) => measure(args, tests),
    }
}

/// Serves one client after the other.
fn serve(args: &PerfArgs) -> Result<u8> {
    let listener = listen(args.place.port)?;
    Out::new().line(Partner::greeting(listener.local_addr()?.port()))?;
    let mut reception = Reception::open(listener, HELLO)?;
    loop {
        let client = reception.next()?;
        let from = client.from;
        let result = serve_client(args, client);
        if args.place.once {
            return result.map(|()| 0);
        }
        if let Err(error) = result {
            complain(format_args!("client {from}: {error:#}"));
        }
    }
}

fn serve_client(args: &PerfArgs, client: Client<Greeting>) -> Result<()> {
    let Client { greeting, mut control, .. } = client;
    if greeting.half > MAX_SIZE || greeting.qps > MAX_QPS || greeting.settings.depth > 8192 || greeting.half == 0 {
        bail!("the client asks for more than a test needs");
    }
    let end = End::open(args, &mut control, &greeting)?;
    let tcp = tcp::listen(control.addresses()?.0)?;
    control.send(&end.introduction(tcp.local_addr()?.port(), 0))?;
    let client: Introduction = control.recv_within(INTRODUCTION_PATIENCE)?;
    end.connect(&client.peer, client.path_mtu)?;
    let mut load = end.load(&greeting, &client.peer);
    loop {
        match control.recv()? {
            Step::Rdma { test, size } => {
                if size > greeting.half || size == 0 {
                    bail!("the client asks for a message larger than its memory");
                }
                load.clear_mark(size);
                load.post_receives()?;
                control.send(&Ready)?;
                load.serve(test, size)?;
            }
            Step::Tcp { request, response, polling } => {
                if request.max(response) > MAX_SIZE {
                    bail!("the client asks for a TCP message that is too large");
                }
                control.send(&Ready)?;
                tcp::serve(&tcp, request, response, polling)?;
            }
            Step::End => return Ok(()),
        }
    }
}

/// The client.
fn measure(args: &PerfArgs, tests: &[Test]) -> Result<u8> {
    if args.events
        && tests.iter().any(|test| test.verb == Verb::Write && test.measure == Measure::Latency)
        && tests.len() == 1
    {
        bail!("write-lat waits for a byte in memory and cannot sleep: leave out --events, or use send-lat");
    }
    let (mut control, _partner) = args.place.reach("perf", args.host.as_deref())?;
    let largest = tests.iter().flat_map(|test| sizes(args, *test)).max().unwrap_or(1);
    let greeting = Greeting {
        hello: HELLO.into(),
        settings: Settings { depth: args.depth, events: args.events, inline: args.inline },
        qps: args.qps,
        half: largest.next_multiple_of(8),
    };
    control.send(&greeting)?;
    let server: Introduction = control.recv()?;
    let end = End::open(args, &mut control, &greeting)?;
    let path_mtu = args.mtu.unwrap_or_else(|| end.endpoint.mtu().min(server.peer.mtu));
    end.connect(&server.peer, path_mtu)?;
    control.send(&end.introduction(0, path_mtu))?;
    let setting = Setting {
        client: end.endpoint.describe(),
        server: server.describe.clone(),
        path_mtu,
        queue_pairs: args.qps,
        mode: if args.events { "events" } else { "polling" },
    };
    let mut out = Out::new();
    if !args.json {
        out.line(report::heading(&setting))?;
    }
    let tcp_peer =
        (!args.no_tcp).then(|| SocketAddr::new(control.addresses().map_or(server.peer.addr, |a| a.1), server.tcp_port));
    let mut load = end.load(&greeting, &server.peer);
    let mut results = Vec::new();
    for test in tests {
        if args.events && test.verb == Verb::Write && test.measure == Measure::Latency {
            continue;
        }
        for size in sizes(args, *test) {
            results.push(one_line(args, &mut control, &mut load, *test, size, tcp_peer)?);
        }
    }
    control.send(&Step::End)?;
    if args.json {
        report::json(&mut out, &setting, &results)?;
        return Ok(0);
    }
    for measure in [Measure::Bandwidth, Measure::Latency] {
        if results.iter().any(|outcome| outcome.test.measure == measure) {
            report::table(measure, &results).print(&mut out)?;
        }
    }
    Ok(0)
}

fn one_line(
    args: &PerfArgs,
    control: &mut Control,
    load: &mut Load<'_>,
    test: Test,
    size: u32,
    tcp_peer: Option<SocketAddr>,
) -> Result<Outcome> {
    let extent = args.iters.map_or(Extent::Seconds(args.duration), Extent::Messages);
    load.post_receives()?;
    control.send(&Step::Rdma { test, size })?;
    control.recv::<Ready>()?;
    let rdma = load.measure(test, size, extent)?;
    let tcp = match tcp_peer {
        Some(peer) => Some(measure_tcp(control, peer, test, size, !args.events, extent)?),
        None => None,
    };
    Ok(Outcome { test, bytes: size, rdma, tcp })
}

fn measure_tcp(
    control: &mut Control,
    peer: SocketAddr,
    test: Test,
    size: u32,
    polling: bool,
    extent: Extent,
) -> Result<Figures> {
    let (request, response) = match test.measure {
        Measure::Bandwidth => (size, 0),
        Measure::Latency => test.tcp_exchange(size),
    };
    control.send(&Step::Tcp { request, response, polling })?;
    control.recv::<Ready>()?;
    match test.measure {
        Measure::Bandwidth => tcp::bandwidth(peer, size, extent),
        Measure::Latency => tcp::latency(peer, request, response, polling, extent, test.is_ping_pong()),
    }
}

fn sizes(args: &PerfArgs, test: Test) -> Vec<u32> {
    match test.verb {
        Verb::Atomic => vec![8],
        _ if args.all => (1..=MAX_SIZE.ilog2()).map(|power| 1 << power).collect(),
        _ if args.sizes.is_empty() => vec![test.default_size()],
        _ => args.sizes.clone(),
    }
}

/// What both ends set up alike.
struct End {
    endpoint: Endpoint,
    qps: Vec<Arc<Qp>>,
    memory: Registered,
    psn: u32,
}

impl End {
    fn open(args: &PerfArgs, control: &mut Control, greeting: &Greeting) -> Result<End> {
        let endpoint = Endpoint::open(&args.place.choice(), control, greeting.qps, greeting.settings)?;
        let qps = (0..greeting.qps).map(|_| endpoint.create_qp(QpType::Rc)).collect::<Result<Vec<_>>>()?;
        let memory = Registered::new(&endpoint.pd, 2 * greeting.half as usize)?;
        // Any start will do; different processes had better not share it, so that stray packets are told apart.
        let psn = std::process::id() & 0xff_ffff;
        Ok(End { endpoint, qps, memory, psn })
    }

    fn introduction(&self, tcp_port: u16, path_mtu: u32) -> Introduction {
        let peer = Peer {
            addr: self.endpoint.addr(),
            mtu: self.endpoint.mtu(),
            qps: self.qps.iter().map(|qp| PeerQp { qpn: qp.qpn(), psn: self.psn }).collect(),
            area: self.memory.area(),
        };
        Introduction { peer, describe: self.endpoint.describe(), tcp_port, path_mtu }
    }

    /// Connects all queue pairs.
    fn connect(&self, peer: &Peer, path_mtu: u32) -> Result<()> {
        if peer.qps.len() != self.qps.len() {
            bail!("the peer has {} queue pairs, not {}", peer.qps.len(), self.qps.len());
        }
        for (qp, remote) in self.qps.iter().zip(&peer.qps) {
            self.endpoint.connect(qp, self.psn, peer, *remote, path_mtu)?;
        }
        Ok(())
    }

    fn load<'a>(&'a self, greeting: &Greeting, peer: &'a Peer) -> Load<'a> {
        Load {
            endpoint: &self.endpoint,
            qps: &self.qps,
            memory: &self.memory,
            peer,
            depth: greeting.settings.depth,
            half: greeting.half,
            inline: greeting.settings.inline,
            receives: vec![0; self.qps.len()],
        }
    }
}
