//! The side channel: JSON lines over TCP. It carries what RDMA needs before it can start, and the commands of a test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest line accepted, in bytes: room for some thousand queue pairs.
const MAX_LINE: u64 = 1 << 20;
/// How long a connection attempt may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Whether a client is the one for this server: its greeting is the command and a version.
pub(crate) fn check_hello(client: &str, server: &str) -> Result<()> {
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
        Ok(Control { reader: BufReader::new(stream), writer })
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
        let mut line = Vec::new();
        let read = (&mut self.reader).take(MAX_LINE).read_until(b'\n', &mut line);
        match read.context("the TCP side channel to the peer broke")? {
            0 => bail!("the peer ended; its own messages say why"),
            _ if line.last() != Some(&b'\n') => bail!("the peer sent a line that is cut off or too long"),
            _ => serde_json::from_slice(&line).with_context(|| {
                let shown: String =
                    String::from_utf8_lossy(&line).chars().filter(|c| !c.is_control()).take(80).collect();
                format!("the peer sent something unexpected (another version?): {shown}")
            }),
        }
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
        let writer = std::thread::spawn(move || b.write_all(&vec![b'1'; MAX_LINE as usize + 1]));
        assert!(a.recv::<u64>().expect_err("has no end").to_string().contains("too long"));
        drop(a);
        // Whether the last bytes were still taken does not matter.
        let _ = writer.join().expect("does not panic");
    }

    #[test]
    fn a_peer_that_is_not_there_is_named() {
        // Not a port that was just given back: another test may have it by now.
        let Err(error) = Control::connect("127.0.0.1", 1) else { panic!("nobody listens") };
        assert!(error.to_string().contains("127.0.0.1:1:"), "{error}");
    }
}
