//! TCP doing the same as the test beside it, over the same addresses.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result};

use super::plan::{Extent, Progress};
use super::report::{Figures, Latency};

/// Messages before the first one that counts.
const WARM_UP: u64 = 50;
/// What the receiver of a stream reads at a time, in bytes.
const READ_SIZE: usize = 256 << 10;
/// Empty looks in a row before a spinning end yields the processor: the same as `Cq::poll`.
const LOOKS_BEFORE_YIELD: u32 = 64;

/// A socket that spins (against RDMA that polls) or sleeps (against RDMA that waits for events).
struct Stream {
    stream: TcpStream,
    polling: bool,
}

impl Stream {
    fn new(stream: TcpStream, polling: bool) -> Result<Stream> {
        stream.set_nodelay(true).context("cannot set TCP_NODELAY")?;
        stream.set_nonblocking(polling).context("cannot set O_NONBLOCK")?;
        Ok(Stream { stream, polling })
    }

    fn spin<T>(&mut self, mut attempt: impl FnMut(&mut TcpStream) -> io::Result<T>) -> io::Result<T> {
        let mut looks = 0;
        loop {
            match attempt(&mut self.stream) {
                Err(error) if self.polling && error.kind() == ErrorKind::WouldBlock => {
                    looks += 1;
                    if looks > LOOKS_BEFORE_YIELD {
                        std::thread::yield_now();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = self.spin(|stream| stream.write(bytes))?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Fills the buffer; false if the peer closed before the first byte.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.spin(|stream| stream.read(&mut buffer[filled..]))? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => filled += read,
            }
        }
        Ok(true)
    }
}

/// The server's part of one step.
pub(super) fn serve(listener: &TcpListener, request: u32, response: u32, polling: bool) -> Result<()> {
    let (stream, _) = listener.accept().context("cannot accept a TCP connection")?;
    if response == 0 {
        return swallow(stream).context("the TCP stream to compare with broke");
    }
    let mut stream = Stream::new(stream, polling)?;
    let (mut request, response) = (vec![0; request as usize], vec![0; response as usize]);
    while stream.receive(&mut request).context("the TCP connection to compare with broke")? {
        stream.send(&response).context("the TCP connection to compare with broke")?;
    }
    Ok(())
}

fn swallow(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; READ_SIZE];
    while stream.read(&mut buffer)? > 0 {}
    stream.write_all(&[0])
}

/// Round trips of `request` and `response` bytes.
pub(super) fn latency(
    peer: SocketAddr,
    request: u32,
    response: u32,
    polling: bool,
    extent: Extent,
    halve: bool,
) -> Result<Figures> {
    let mut stream = Stream::new(connect(peer)?, polling)?;
    let (request, mut response) = (vec![0; request as usize], vec![0; response as usize]);
    let mut round_trip = || -> Result<()> {
        stream.send(&request)?;
        stream.receive(&mut response)?;
        Ok(())
    };
    for _ in 0..WARM_UP {
        round_trip().context("the TCP connection to compare with broke")?;
    }
    let mut latency = Latency::default();
    let progress = Progress::start(extent);
    while progress.more(latency.count(), 1) > 0 {
        let begun = Instant::now();
        round_trip().context("the TCP connection to compare with broke")?;
        latency.add(begun.elapsed(), halve);
    }
    Ok(Figures::latency(latency, progress.elapsed()))
}

/// One stream of writes of `size` bytes.
pub(super) fn bandwidth(peer: SocketAddr, size: u32, extent: Extent) -> Result<Figures> {
    let mut stream = connect(peer)?;
    let buffer = vec![0; size as usize];
    let mut messages = 0;
    let progress = Progress::start(extent);
    while progress.more(messages, 1) > 0 {
        stream.write_all(&buffer).context("the TCP stream to compare with broke")?;
        messages += 1;
    }
    stream.shutdown(Shutdown::Write).context("the TCP stream to compare with broke")?;
    // The peer answers when it has read everything.
    stream.read_exact(&mut [0]).context("the TCP stream to compare with broke")?;
    Ok(Figures::bandwidth(messages, size, progress.elapsed()))
}

fn connect(peer: SocketAddr) -> Result<TcpStream> {
    TcpStream::connect(peer).with_context(|| format!("no TCP connection to {peer} to compare with"))
}

/// Takes the connections to compare with, on any free port.
pub(super) fn listen(local: IpAddr) -> Result<TcpListener> {
    TcpListener::bind((local, 0)).with_context(|| format!("cannot listen on {local}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_server<T>(response: u32, polling: bool, client: impl FnOnce(SocketAddr) -> T) -> T {
        let listener = listen(IpAddr::from([127, 0, 0, 1])).expect("loopback is up");
        let addr = listener.local_addr().expect("is bound");
        let server = std::thread::spawn(move || serve(&listener, 16, response, polling));
        let result = client(addr);
        server.join().expect("does not panic").expect("serves to the end");
        result
    }

    #[test]
    fn round_trips_are_counted() {
        for polling in [false, true] {
            let figures =
                with_server(100, polling, |addr| latency(addr, 16, 100, polling, Extent::Messages(20), false));
            assert_eq!(figures.expect("works").messages, 20);
        }
    }

    #[test]
    fn a_stream_is_read_to_its_end() {
        let figures = with_server(0, false, |addr| bandwidth(addr, 1000, Extent::Messages(30))).expect("works");
        assert_eq!(figures.messages, 30);
    }
}
