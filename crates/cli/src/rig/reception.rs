//! Who connects to a server: the greetings of several are waited for at once, so that one who says nothing holds up nobody.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;

use super::Control;
use crate::output::complain;

/// How long a client may take for its greeting.
const GREETING_PATIENCE: Duration = Duration::from_secs(10);
/// Connections whose greeting is waited for at once. One more puts the one out that has waited longest.
const GUESTS_MAX: usize = 64;

/// A server's door.
pub(crate) struct Reception {
    listener: TcpListener,
    /// What a client for this server says.
    hello: &'static str,
    patience: Duration,
    /// Those that have connected and not yet greeted, the first one first.
    guests: VecDeque<Guest>,
}

struct Guest {
    from: SocketAddr,
    control: Control,
    until: Instant,
}

/// A client that has greeted.
pub(crate) struct Client<G> {
    pub(crate) from: SocketAddr,
    pub(crate) greeting: G,
    pub(crate) control: Control,
}

impl Reception {
    /// Clients of `listener` are for this server if they say `hello`.
    ///
    /// # Errors
    /// The listener cannot be made non-blocking.
    pub(crate) fn open(listener: TcpListener, hello: &'static str) -> Result<Reception> {
        listener.set_nonblocking(true).context("cannot make the listener non-blocking")?;
        Ok(Reception { listener, hello, patience: GREETING_PATIENCE, guests: VecDeque::new() })
    }

    /// Waits for the next client that is for this server. Others are complained about.
    ///
    /// # Errors
    /// No connection can be accepted any more.
    pub(crate) fn next<G: DeserializeOwned>(&mut self) -> Result<Client<G>> {
        loop {
            if let Some(client) = self.greeted() {
                return Ok(client);
            }
            if !self.admit()? {
                self.wait()?;
            }
        }
    }

    /// Lets in who has connected, as many as there are places; at least one, so that those who say nothing keep nobody out. False:
    /// nobody was there.
    fn admit(&mut self) -> Result<bool> {
        let mut admitted = false;
        for _ in 0..(GUESTS_MAX - self.guests.len()).max(1) {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(admitted),
                // It is gone already.
                Err(error) if [ErrorKind::ConnectionAborted, ErrorKind::Interrupted].contains(&error.kind()) => {
                    continue;
                }
                Err(error) => return Err(error).context("cannot accept a TCP connection"),
            };
            admitted = true;
            if self.guests.len() == GUESTS_MAX
                && let Some(longest) = self.guests.pop_front()
            {
                longest.complain(&anyhow!("it did not say yet what it wants, and others want its place"));
            }
            match Control::nonblocking(stream) {
                Ok(control) => self.guests.push_back(Guest { from, control, until: Instant::now() + self.patience }),
                Err(error) => complain(format_args!("client {from}: {error:#}")),
            }
        }
        Ok(admitted)
    }

    /// The first one that has greeted well; others that have said something else, or nothing for too long, are gone after this.
    fn greeted<G: DeserializeOwned>(&mut self) -> Option<Client<G>> {
        let mut at = 0;
        while let Some(guest) = self.guests.get_mut(at) {
            let greeting = match guest.control.try_greeting(self.hello) {
                // What it said while another one was served counts, however long that took.
                Ok(None) if Instant::now() < guest.until => {
                    at += 1;
                    continue;
                }
                Ok(None) => Err(anyhow!("it did not say in time what it wants")),
                Ok(Some(greeting)) => Ok(greeting),
                Err(error) => Err(error),
            };
            let guest = self.guests.remove(at).expect("was there just now");
            match greeting {
                Ok(greeting) => return Some(Client { from: guest.from, greeting, control: guest.control }),
                Err(error) => guest.complain(&error),
            }
        }
        None
    }

    /// Sleeps until somebody connects or says something, or has been silent for too long.
    fn wait(&self) -> Result<()> {
        let next = self.guests.iter().map(|guest| guest.until).min();
        let left = next.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec::try_from(left).expect("patience is short"));
        let sockets = self.guests.iter().map(|guest| guest.control.socket());
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno).context("cannot wait for clients"),
        }
    }
}

impl Guest {
    fn complain(&self, error: &anyhow::Error) {
        complain(format_args!("client {}: {error:#}", self.from));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use serde_json::Value;

    use super::*;

    const GREETING: &[u8] = b"{\"hello\":\"ferroce x 1\"}\n";

    fn reception() -> (Reception, impl Fn() -> TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
        let address = listener.local_addr().expect("is bound");
        let connect = move || TcpStream::connect(address).expect("can connect");
        (Reception::open(listener, "ferroce x 1").expect("can be made non-blocking"), connect)
    }

    fn is_closed(mut stream: TcpStream) -> bool {
        stream.read(&mut [0; 16]).is_ok_and(|read| read == 0)
    }

    /// One silent connection kept all others waiting for ten seconds, and the next one for ten more.
    #[test]
    fn the_silent_hold_up_nobody() {
        let (mut reception, connect) = reception();
        // Nothing in this test waits for it.
        reception.patience = Duration::from_secs(100_000);
        let mut silent = [connect(), connect(), connect()];
        silent[1].write_all(b"{\"hello\":").expect("can send");
        let mut honest = connect();
        honest.write_all(GREETING).expect("can send");
        let client = reception.next::<Value>().expect("it has greeted");
        assert_eq!(client.from, honest.local_addr().expect("is connected"));
        assert_eq!(client.greeting["hello"], "ferroce x 1");
        // Whoever says the rest later is served later.
        silent[1].write_all(b"\"ferroce x 1\"}\n[2]\n").expect("can send");
        let mut client = reception.next::<Value>().expect("it has greeted");
        assert_eq!(client.from, silent[1].local_addr().expect("is connected"));
        assert_eq!(client.control.recv::<Vec<u32>>().expect("what followed at once is not lost"), [2]);
    }

    #[test]
    fn a_test_may_be_silent_for_long_after_the_greeting() {
        let (mut reception, connect) = reception();
        let mut honest = connect();
        honest.write_all(GREETING).expect("can send");
        let mut client = reception.next::<Value>().expect("it has greeted");
        let answer = std::thread::spawn(move || client.control.recv::<Vec<u32>>());
        honest.write_all(b"[").expect("can send");
        honest.write_all(b"3]\n").expect("can send");
        assert_eq!(answer.join().expect("does not panic").expect("it blocks until all is there"), [3]);
    }

    #[test]
    fn who_does_not_greet_in_time_is_given_up() {
        let (mut reception, connect) = reception();
        reception.patience = Duration::ZERO;
        let (silent, mut half) = (connect(), connect());
        half.write_all(b"[1").expect("can send");
        reception.admit().expect("can accept");
        assert_eq!(reception.guests.len(), 2);
        assert!(reception.greeted::<Value>().is_none());
        assert!(is_closed(silent) && reception.guests.is_empty());
        // What was said counts, however late it is read.
        let mut honest = connect();
        honest.write_all(GREETING).expect("can send");
        reception.admit().expect("can accept");
        poll(&mut [PollFd::new(reception.guests[0].control.socket(), PollFlags::IN)], None).expect("can wait");
        assert!(reception.greeted::<Value>().is_some());
    }

    #[test]
    fn more_silent_ones_than_there_are_places_keep_nobody_out() {
        let (mut reception, connect) = reception();
        reception.patience = Duration::from_secs(100_000);
        let mut silent: VecDeque<TcpStream> = (0..GUESTS_MAX).map(|_| connect()).collect();
        reception.admit().expect("can accept");
        assert_eq!(reception.guests.len(), GUESTS_MAX);
        let mut honest = connect();
        honest.write_all(GREETING).expect("can send");
        reception.next::<Value>().expect("it has greeted");
        assert_eq!(reception.guests.len(), GUESTS_MAX - 1);
        assert!(is_closed(silent.pop_front().expect("there are many")), "the first one made room");
    }

    #[test]
    fn a_greeting_without_end_is_refused() {
        let (mut reception, connect) = reception();
        let mut endless = connect();
        let writer = std::thread::spawn(move || while endless.write_all(&[b'1'; 4096]).is_ok() {});
        while !reception.admit().expect("can accept") {
            reception.wait().expect("can wait");
        }
        while !reception.guests.is_empty() {
            reception.wait().expect("can wait");
            assert!(reception.greeted::<Value>().is_none());
        }
        writer.join().expect("its connection has ended");
    }
}
