use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;

use super::*;

const SOON: Duration = Duration::from_secs(20);

/// A lease that nobody else has.
fn lease() -> u64 {
    rand::random()
}

fn snapshot() -> Snapshot {
    let mut qps = Listed::default();
    (0..ROWS_MAX as u32 + 3).for_each(|qpn| qps.push(QpRow { qpn, ..QpRow::default() }));
    Snapshot { version: VERSION, pid: 7, qps, ..Snapshot::default() }
}

/// Answers anything, once, under the name of a lane.
fn liar(lease: u64, answer: Vec<u8>) -> std::thread::JoinHandle<()> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name(9, lease)).expect("a name");
    let listener = UnixListener::bind_addr(&address).expect("the name is free");
    std::thread::spawn(move || {
        let (mut asker, _) = listener.accept().expect("somebody asks");
        // Who has read enough goes away.
        let _ = asker.write_all(&answer);
    })
}

#[test]
fn a_long_answer_arrives_whole() {
    let lease = lease();
    let inspector = Inspector::listen(9, lease).expect("a free name");
    let asked = std::thread::spawn(move || ask(9, lease, SOON));
    while !asked.is_finished() {
        inspector.answer(snapshot).expect("the asker reads");
        std::thread::yield_now();
    }
    let answer = asked.join().expect("no panic").expect("an answer");
    assert_eq!(answer, snapshot());
    assert_eq!((answer.qps.rows.len(), answer.qps.left_out()), (ROWS_MAX, 3));
}

#[test]
fn who_does_not_answer_is_given_up() {
    let lease = lease();
    let _silent = Inspector::listen(9, lease).expect("a free name");
    let error = ask(9, lease, Duration::from_millis(50)).expect_err("nobody answers");
    assert_eq!(error.errno(), libc::ETIMEDOUT, "{error}");
}

#[test]
fn who_does_not_listen_any_more_is_not_waited_for() {
    let lease = lease();
    drop(Inspector::listen(9, lease).expect("a free name"));
    assert_eq!(ask(9, lease, SOON).expect_err("it is gone").errno(), libc::ECONNREFUSED);
}

#[test]
fn an_asker_that_does_not_read_is_given_up() {
    let lease = lease();
    let inspector = Inspector::listen(9, lease).expect("a free name");
    let deaf = connect(&name(9, lease), Instant::now() + SOON).expect("it listens");
    let error = inspector.answer(snapshot).expect_err("more than a socket holds");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    drop(deaf);
}

#[test]
fn answers_that_are_none_are_errors() {
    let text = |text: &str| text.as_bytes().to_vec();
    let other = serde_json::to_vec(&Snapshot { version: VERSION + 1, ..snapshot() }).expect("can be JSON");
    let cut = {
        let whole = serde_json::to_vec(&snapshot()).expect("can be JSON");
        whole[..whole.len() / 2].to_vec()
    };
    let deep = [text(r#"{"version":1,"devices":"#), vec![b'['; 1 << 20]].concat();
    let endless = vec![b' '; ANSWER_BYTES_MAX + (1 << 20)];
    for (answer, errno) in [
        (text(""), libc::EPROTO),
        (text("not JSON"), libc::EPROTO),
        (text(r#"{"version":1}"#), libc::EPROTO),
        (text(r#"{"version":-1}"#), libc::EPROTO),
        (vec![0xff; 5000], libc::EPROTO),
        (other, libc::EPROTO),
        (cut, libc::EPROTO),
        (deep, libc::EPROTO),
        (endless, libc::EMSGSIZE),
    ] {
        let (lease, start) = (lease(), answer.len().min(30));
        let shown = String::from_utf8_lossy(&answer[..start]).into_owned();
        let liar = liar(lease, answer);
        let error = ask(9, lease, SOON).expect_err("no answer");
        assert_eq!(error.errno(), errno, "{shown:?}: {error}");
        liar.join().expect("no panic");
    }
}

#[test]
fn the_own_user_and_root_may_ask() {
    let own = rustix::process::geteuid().as_raw();
    assert!(may_ask(own) && may_ask(0) && !may_ask(own + 1));
}
