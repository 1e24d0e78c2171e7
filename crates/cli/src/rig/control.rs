//! The side channel: JSON lines over TCP. It carries what RDMA needs before it can start, and the commands of a test.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest line accepted, in bytes: room for some thousand queue pairs.
const MAX_LINE: usize = 1 << 20;
/// How long a connection attempt may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// How long a client may take for its introduction, which it sends as soon as it has set up its end: others wait for their turn.
pub(crate) const INTRODUCTION_PATIENCE: Duration = Duration::from_secs(10);
/// Longest greeting accepted, in bytes: of those who send one, nobody is known yet.
const MAX_GREETING: usize = 4096;

/// What every greeting has, of whatever command and version.
#[derive(Serialize, Deserialize)]
struct Hello {
    hello: String,
}

/// The server's answer to a client that is not for it.
#[derive(Serialize, Deserialize)]
struct Refused {
    refused: String,
}

/// Whether a client is the one for this server: its greeting is the command and a version.
fn check_hello(client: &str, server: &str) -> Result<()> {
    let command = |hello: &str| hello.rsplit_once(' ').map(|(command, _)| command.to_owned());
    match (command(client), command(server)) {
        _ if client == server => Ok(()),
        (Some(client), Some(server)) if client != server && client.starts_with("ferroce ") => {
            bail!("the client is `{client}`, and this is `{server} server`: start `{client} server` for it")
        }
        _ => bail!("the client is another version: it says {client:?}, and this is {server:?}"),
    }
}

/// One end of the side channel.
pub(crate) struct Control {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
    /// As much of the next line as is there.
    line: Vec<u8>,
}

impl Control {
    /// Connects to a server.
    pub(crate) fn connect(host: &str, port: u16) -> Result<Control> {
        let addresses = (host, port)
            .to_socket_addrs()
            .with_context(|| format!("{host} is no address and no name that can be resolved"))?;
        let mut last = anyhow!("{host} has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_PATIENCE) {
                Ok(stream) => return Control::new(stream),
                Err(error) => {
                    last = anyhow!("no TCP connection to {address}: {error}; is `ferroce ... server` running there?")
                }
            }
        }
        Err(last)
    }

    /// Takes over a connection.
    pub(crate) fn new(stream: TcpStream) -> Result<Control> {
        stream.set_nodelay(true).context("cannot set TCP_NODELAY")?;
        let writer = stream.try_clone().context("cannot duplicate a socket")?;
        Ok(Control { reader: BufReader::new(stream), writer, line: Vec::new() })
    }

    /// Takes over a connection whose peer has yet to greet: only [`Control::try_greeting`] is of use until then.
    pub(super) fn nonblocking(stream: TcpStream) -> Result<Control> {
        stream.set_nonblocking(true).context("cannot make a socket non-blocking")?;
        Control::new(stream)
    }

    /// The connection, to wait for.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.writer
    }

    /// Another handle of the same connection, for a thread that listens.
    pub(crate) fn second(&self) -> Result<TcpStream> {
        self.writer.try_clone().context("cannot duplicate a socket")
    }

    /// Our address as the peer sees it, and the peer's.
    pub(crate) fn addresses(&self) -> Result<(IpAddr, IpAddr)> {
        let local = self.writer.local_addr().context("the side channel has no local address")?;
        let peer = self.writer.peer_addr().context("the side channel is not connected")?;
        Ok((local.ip().to_canonical(), peer.ip().to_canonical()))
    }

    /// Sends one message.
    pub(crate) fn send<T: Serialize>(&mut self, message: &T) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.writer.write_all(&line).context("the TCP side channel to the peer broke")
    }

    /// Receives one message. The peer may be anyone: an unexpected line is an error.
    pub(crate) fn recv<T: DeserializeOwned>(&mut self) -> Result<T> {
        while !self.read(MAX_LINE).map_err(broken)? {}
        message(&std::mem::take(&mut self.line))
    }

    /// Receives a message that the peer has no reason to think about for long: an error if it is not there in time.
    pub(crate) fn recv_within<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T> {
        let until = Instant::now() + patience;
        loop {
            // No time at all would be none to the system: as long as it likes.
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.writer.set_read_timeout(Some(left)).context("cannot limit the time of a socket")?;
            match self.read(MAX_LINE) {
                Ok(true) => break,
                Ok(false) if Instant::now() < until => {}
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(broken(error)),
                _ => bail!("it did not go on within {} seconds", patience.as_secs()),
            }
        }
        self.writer.set_read_timeout(None).context("cannot give a socket its time back")?;
        message(&std::mem::take(&mut self.line))
    }

    /// The first message, if all of it is there; the connection blocks from then on. `hello` is what a client for this server says;
    /// another one is told so.
    pub(super) fn try_greeting<T: DeserializeOwned>(&mut self, hello: &str) -> Result<Option<T>> {
        loop {
            match self.read(MAX_GREETING) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(broken(error)),
            }
        }
        self.writer.set_nonblocking(false).context("cannot make a socket blocking")?;
        let line = std::mem::take(&mut self.line);
        let client: Hello = message(&line)?;
        if let Err(error) = check_hello(&client.hello, hello) {
            // It may not listen any more.
            let _ = self.send(&Refused { refused: error.to_string() });
            return Err(error);
        }
        message(&line).map(Some)
    }

    /// Reads more of a line of at most so many bytes. True: there will be no more of it. It is empty at the end of the connection.
    fn read(&mut self, bytes_max: usize) -> std::io::Result<bool> {
        let there = match self.reader.fill_buf() {
            Ok([]) => return Ok(true),
            Ok(there) => there,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(false),
            Err(error) => return Err(error),
        };
        let end = there.iter().position(|byte| *byte == b'\n').map_or(there.len(), |at| at + 1);
        let len = end.min(bytes_max - self.line.len());
        self.line.extend_from_slice(&there[..len]);
        self.reader.consume(len);
        Ok(self.line.last() == Some(&b'\n') || self.line.len() == bytes_max)
    }
}

fn broken(error: std::io::Error) -> anyhow::Error {
    anyhow::Error::new(error).context("the TCP side channel to the peer broke")
}

/// What a line says.
fn message<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    match line.last() {
        None => bail!("the peer ended; its own messages say why"),
        Some(b'\n') => serde_json::from_slice(line).map_err(|error| match serde_json::from_slice(line) {
            Ok(Refused { refused }) => anyhow!("the server says: {refused}"),
            Err(_) => {
                let shown: String =
                    String::from_utf8_lossy(line).chars().filter(|c| !c.is_control()).take(80).collect();
                anyhow::Error::new(error)
                    .context(format!("the peer sent something unexpected (another version?): {shown}"))
            }
        }),
        Some(_) => bail!("the peer sent a line that is cut off or too long"),
    }
}

/// Listens for clients on all addresses, IPv6 and IPv4.
pub(crate) fn listen(port: u16) -> Result<TcpListener> {
    let any: [SocketAddr; 2] = [([0u16; 8], port).into(), ([0u8; 4], port).into()];
    TcpListener::bind(&any[..]).with_context(|| {
        format!("cannot listen on TCP port {port}: choose another with --port (and tell it the client)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
        let stream = TcpStream::connect(listener.local_addr().expect("is bound")).expect("can connect");
        let (other, _) = listener.accept().expect("can accept");
        (Control::new(stream).expect("can set up"), other)
    }

    #[test]
    fn a_client_of_another_command_or_version_is_told_apart() {
        check_hello("ferroce perf 1", "ferroce perf 1").expect("the same");
        let told = |client: &str| check_hello(client, "ferroce verify 1").expect_err("not the same").to_string();
        assert!(told("ferroce perf 1").contains("start `ferroce perf server`"));
        assert!(told("ferroce verify 2").contains("another version"));
        assert!(told("\u{7}").contains("another version"));
    }

    /// Their greetings have nothing in common but `hello`.
    #[test]
    fn a_client_of_another_command_is_told_which_server_it_needs() {
        let (mut server, client) = pair();
        let mut client = Control::new(client).expect("can set up");
        client.send(&serde_json::json!({ "hello": "ferroce verify 1", "other": 7 })).expect("can send");
        let error = server.try_greeting::<(u32, u32)>("ferroce perf 1").expect_err("not for it");
        assert!(error.to_string().contains("start `ferroce verify server`"), "{error}");
        let told = client.recv::<Vec<u32>>().expect_err("it is refused").to_string();
        assert!(told.starts_with("the server says: ") && told.contains("start `ferroce verify server`"), "{told}");
    }

    #[test]
    fn messages_arrive_in_order() {
        let (mut a, b) = pair();
        let mut b = Control::new(b).expect("can set up");
        a.send(&(1, "one")).expect("can send");
        a.send(&[2]).expect("can send");
        assert_eq!(b.recv::<(u32, String)>().expect("can receive"), (1, "one".into()));
        assert_eq!(b.recv::<Vec<u32>>().expect("can receive"), [2]);
    }

    #[test]
    fn hostile_lines_are_errors() {
        for (bytes, word) in
            [(&b"HTTP/1.1\r\n"[..], "unexpected"), (b"{}\n", "unexpected"), (b"[1", "cut off"), (b"", "ended")]
        {
            let (mut a, mut b) = pair();
            b.write_all(bytes).expect("can send");
            drop(b);
            let error = a.recv::<Vec<u32>>().expect_err("is no list of numbers");
            assert!(format!("{error:#}").contains(word), "{error:#}");
        }
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let (mut a, mut b) = pair();
        let writer = std::thread::spawn(move || b.write_all(&vec![b'1'; MAX_LINE + 1]));
        assert!(a.recv::<u64>().expect_err("has no end").to_string().contains("too long"));
        drop(a);
        // Whether the last bytes were still taken does not matter.
        let _ = writer.join().expect("does not panic");
    }

    /// A client that greeted and said no more held a server for ever.
    #[test]
    fn what_does_not_come_in_time_is_an_error() {
        for said in [&b""[..], b"[1"] {
            let (mut a, mut b) = pair();
            b.write_all(said).expect("can send");
            let error = a.recv_within::<Vec<u32>>(Duration::from_millis(1)).expect_err("there is no whole line");
            assert!(error.to_string().contains("did not go on"), "{error:#}");
        }
    }

    #[test]
    fn what_comes_in_time_leaves_all_time_for_the_rest() {
        let (mut a, mut b) = pair();
        b.write_all(b"[1]\n").expect("can send");
        assert_eq!(a.recv_within::<Vec<u32>>(Duration::from_secs(100_000)).expect("it is there"), [1]);
        assert_eq!(a.socket().read_timeout().expect("can be asked"), None);
    }

    #[test]
    fn a_peer_that_is_not_there_is_named() {
        // Not a port that was just given back: another test may have it by now.
        let Err(error) = Control::connect("127.0.0.1", 1) else { panic!("nobody listens") };
        assert!(error.to_string().contains("127.0.0.1:1:"), "{error}");
    }
}
