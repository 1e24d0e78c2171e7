//! `ferroce res` and `ferroce stat` about this very process, and about one that is stopped.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};

use ferroce::{
    Access, Buffer, Completion, ConnectOptions, Context, Cq, Mr, Pd, Qp, QpCreate, QpType, QueueCaps, SendData,
    SendFlags, SendOp, SendWr, Sge, WcStatus,
};
use ferroce_service::client::{Client, StartOptions};
use ferroce_service::inspect::Inspector;
use serde_json::Value;

/// The command, after the service was built beside it (a test of this package alone does not build it).
fn ferroce(args: &[&str]) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_ferroce"));
    Command::new(program)
        .env("FERROCE_SERVICE", service())
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("ferroce can be run")
}

fn service() -> &'static Path {
    static SERVICE: OnceLock<std::path::PathBuf> = OnceLock::new();
    SERVICE.get_or_init(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_ferroce"));
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "ferroce-service", "--bin", "ferroced"]);
        if program.parent().is_some_and(|dir| dir.ends_with("release")) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo can be run").success(), "ferroced can be built");
        program.with_file_name("ferroced")
    })
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = ferroce(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {:?}: {stderr}", output.status);
    serde_json::from_slice(&output.stdout).expect("stdout is JSON")
}

/// Objects of this process: two queue pairs of it, connected to each other.
struct Objects {
    _context: Arc<Context>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    mr: Arc<Mr>,
    buffer: Arc<Buffer>,
    qps: [Arc<Qp>; 2],
}

const BYTES: usize = 8192;

impl Objects {
    fn new() -> Objects {
        service();
        let device = ferroce::devices().expect("an interface").into_iter().next().expect("one at least");
        let context = device.open().expect("a service");
        let pd = context.alloc_pd().expect("a PD");
        let cq = context.create_cq(16, None, 0).expect("a CQ");
        let buffer = Arc::new(Buffer::new(BYTES));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = pd.reg_buffer(&buffer, access).expect("an MR");
        let caps = QueueCaps { max_send_wr: 8, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let (qp_type, sq_sig_all, cookie) = (QpType::Rc, true, 0);
        let qp = || {
            let (send_cq, recv_cq) = (Arc::clone(&cq), Arc::clone(&cq));
            pd.create_qp(&QpCreate { send_cq, recv_cq, srq: None, caps, qp_type, sq_sig_all, cookie }).expect("a QP")
        };
        let qps = [qp(), qp()];
        let [a, b] = [0, 1].map(|at: usize| qps[at].endpoint(0, 100).expect("a GID"));
        qps[0].connect(100, &b, &ConnectOptions::default()).expect("to RTS");
        qps[1].connect(100, &a, &ConnectOptions::default()).expect("to RTS");
        Objects { _context: context, pd, cq, mr, buffer, qps }
    }

    /// Writes all bytes to themselves, through both queue pairs.
    fn write(&self) {
        let (raddr, rkey) = (self.buffer.addr(), self.mr.rkey());
        let sge = Sge { addr: raddr, length: BYTES as u32, lkey: self.mr.lkey() };
        let data = SendData::Sges([sge].into_iter().collect());
        let op = SendOp::Write { raddr, rkey };
        self.qps[0]
            .post_send(SendWr { wr_id: 1, op, flags: SendFlags::empty(), data, ud: None, xrc_srqn: None })
            .expect("room");
        self.qps[0].ring();
        let mut completion = [Completion::UNUSED];
        while self.cq.poll(&mut completion).expect("no fork") == 0 {}
        assert_eq!(completion[0].status, WcStatus::Success);
    }
}

/// Rows of a kind, of this process.
fn own<'a>(found: &'a Value, kind: &str) -> Vec<&'a Value> {
    let rows = found[kind].as_array().unwrap_or_else(|| panic!("no {kind} in {found}"));
    rows.iter().filter(|row| row["pid"] == std::process::id()).collect()
}

/// The tests look at the same process: one after the other.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn the_objects_of_a_program_are_shown_and_what_they_count() {
    let _turn = TURN.lock();
    let objects = Objects::new();
    objects.write();
    let pid = std::process::id().to_string();

    let found = json(&["res", "--json", "--pid", &pid]);
    let qps = own(&found, "qps");
    assert_eq!(qps.len(), 2, "{found}");
    let number = |qp: &Qp| Value::from(qp.qpn());
    let [a, b] = &objects.qps;
    let row = *qps.iter().find(|row| row["qpn"] == number(a)).expect("the first");
    assert_eq!((&row["remote_qpn"], &row["state"], &row["qp_type"]), (&number(b), &"RTS".into(), &"RC".into()));
    assert_eq!((&row["carrier"], &row["local"]), (&"self".into(), &row["remote"]), "{row}");
    let sent = BYTES.div_ceil(row["path_mtu"].as_u64().expect("an MTU") as usize) as u64;
    assert_eq!(row["sq_psn"], 100 + sent);
    assert_eq!((&row["una_psn"], &row["in_flight"]), (&row["sq_psn"], &0.into()));
    assert_eq!((&row["sends"], &row["max_send_wr"], &row["receives"]), (&0.into(), &8.into(), &0.into()));
    let [cq] = own(&found, "cqs")[..] else { panic!("one CQ: {found}") };
    assert_eq!((&row["send_cqn"], &row["recv_cqn"]), (&cq["cqn"], &cq["cqn"]));
    assert_eq!((&cq["waiting"], &cq["channel"]), (&0.into(), &false.into()));
    let [mr] = own(&found, "mrs")[..] else { panic!("one MR: {found}") };
    assert_eq!((&mr["key"], &mr["len"]), (&objects.mr.rkey().into(), &BYTES.into()));
    assert_eq!((&mr["access"], &mr["pdn"]), (&"local_write,remote_write".into(), &objects.pd.handle().into()));
    assert_eq!(own(&found, "pds").len(), 1);

    let counted = || {
        let found = json(&["stat", "--json", "--pid", &pid]);
        let [program] = own(&found, "programs")[..] else { panic!("one program: {found}") };
        let qps = program["qps"].as_array().expect("a list");
        let qp = qps.iter().find(|row| row["qpn"] == number(a)).expect("the first");
        let device = &program["devices"][0]["counters"];
        assert_eq!(device["rnr_wait_us"], 0, "{device}");
        [&qp["counters"]["sent_bytes"], &device["sent_bytes"], &found["devices"][0]["counters"]["rcvd_bytes"]]
            .map(|value| value.as_u64().unwrap_or_else(|| panic!("a number in {found}")))
    };
    assert_eq!(counted(), [BYTES as u64; 3]);
    objects.write();
    assert_eq!(counted(), [2 * BYTES as u64; 3]);

    let text = |args: &[&str]| String::from_utf8(ferroce(args).stdout).expect("UTF-8");
    let people = text(&["res", "qp", "--pid", &pid]);
    assert!(people.starts_with("qp 2  cm_id 0  mr 1  cq 1  srq 0  pd 1\n"), "{people}");
    assert!(people.contains(&format!("{:#08x}  RC", a.qpn())) && !people.contains("ACCESS"), "{people}");
    let people = text(&["stat", "--by", "qp", "--pid", &pid]);
    assert!(people.contains(&format!("qp {:#08x} RC RTS", a.qpn())) && people.contains("sent_bytes"), "{people}");

    let Objects { qps, .. } = objects;
    drop(qps);
    let found = json(&["res", "--json", "--pid", &pid]);
    assert_eq!(own(&found, "qps").len(), 0, "{found}");
    let found = json(&["stat", "--json", "--pid", &pid]);
    let [program] = own(&found, "programs")[..] else { panic!("one program: {found}") };
    assert_eq!(program["devices"][0]["counters"]["sent_bytes"], 2 * BYTES, "the device outlives its queue pairs");
}

/// (A process that is really stopped: `seen` in tests/programs.)
#[test]
fn a_program_that_does_not_answer_is_named_and_the_others_are_shown() {
    let _turn = TURN.lock();
    let objects = Objects::new();
    let options = StartOptions { program: "mute".into(), ..StartOptions::default() };
    let mute = Client::connect(&options).expect("the service runs");
    let lane = mute.lease_lane().expect("a lane");
    let inspector = Inspector::listen(lane.lane(), lane.id()).expect("a free name");
    let named = |found: &Value, what: &str| {
        let start = format!("pid {} (mute) {what}", std::process::id());
        found["silent"]
            .as_array()
            .expect("a list")
            .iter()
            .any(|line| line.as_str().is_some_and(|l| l.starts_with(&start)))
    };
    let found = json(&["res", "--json"]);
    assert!(named(&found, "did not answer"), "{found}");
    assert!(!own(&found, "qps").is_empty(), "{found}");
    drop(inspector);
    let found = json(&["stat", "--json"]);
    assert!(named(&found, "has ended, or is of a release"), "{found}");
    drop(objects);
}
