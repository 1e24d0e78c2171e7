//! Why a connection did not come about, in words: the event says it by a number.

use std::ffi::c_int;
use std::fmt;
use std::net::SocketAddr;

use crate::abi::event;
use crate::connect::REJECT_CONSUMER;

/// Reasons of a REJ (IBA 12.6.7.2).
const REJECT_SERVICE: c_int = 8;
const REJECT_STALE: c_int = 10;

/// The status of UNREACHABLE where the service of this host crashed before the connection was made.
pub(crate) const SERVICE_ENDED: c_int = -libc::ECONNRESET;

/// Who asked for the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// This end.
    Active,
    /// The peer.
    Passive,
}

/// Who is at the other end, for people.
struct Peer(Option<SocketAddr>);

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("the peer"),
        }
    }
}

/// What an event tells of a failure: an error number, and a sentence for the log. None: of none.
pub(crate) fn failed(code: u32, status: c_int, side: Side, peer: Option<SocketAddr>) -> Option<(c_int, String)> {
    let peer = Peer(peer);
    match code {
        event::REJECTED => Some((libc::ECONNREFUSED, rejected(status, side, &peer))),
        event::UNREACHABLE => Some((status.abs(), unreachable(status, side, &peer))),
        event::CONNECT_ERROR => Some((status.abs(), format!("the connection with {peer} failed while it was made"))),
        _ => None,
    }
}

fn unreachable(status: c_int, side: Side, peer: &Peer) -> String {
    const NO_ANSWER: c_int = -libc::ETIMEDOUT;
    match (status, side) {
        (SERVICE_ENDED, _) => {
            format!("this host's service ended before the connection with {peer} was made; it is to be made anew")
        }
        (NO_ANSWER, Side::Passive) => format!(
            "{peer} asked for the connection, was accepted, and did not confirm it in time (no RTU): did its program end, or are \
             packets to its UDP port 4791 lost?"
        ),
        // A peer that asked for more time (MRA) is not told apart.
        (NO_ANSWER, Side::Active) => format!(
            "no connection manager answers at {peer}, or it asked for more time and the program there never accepted. Has that host \
             RDMA (RoCEv2, or a program on Ferroce), and does no firewall drop UDP port 4791?"
        ),
        _ => {
            format!("{peer} refuses to resolve the service (SIDR status {status}): does a program listen at that port?")
        }
    }
}

fn rejected(reason: c_int, side: Side, peer: &Peer) -> String {
    match reason {
        REJECT_SERVICE if side == Side::Active => {
            format!("no program listens at {peer} (reason 8): start the server first, and look at its address and port")
        }
        REJECT_STALE if side == Side::Active => {
            format!("{peer} takes the request for an old one (reason 10): connect once more")
        }
        reason if reason == c_int::from(REJECT_CONSUMER) => {
            format!("the program at {peer} rejected the connection (reason {reason})")
        }
        reason => format!("{peer} rejected the connection (reason {reason})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_with_the_peer_and_what_to_look_at() {
        let peer = Some("192.0.2.1:7471".parse().expect("an address"));
        let told = |code, status| failed(code, status, Side::Active, peer);
        let (errno, sentence) = told(event::REJECTED, 8).expect("a failure");
        assert!(errno == libc::ECONNREFUSED && sentence.contains("no program listens at 192.0.2.1:7471"), "{sentence}");
        let (errno, sentence) = told(event::UNREACHABLE, -libc::ETIMEDOUT).expect("a failure");
        assert!(errno == libc::ETIMEDOUT && sentence.contains("UDP port 4791"), "{sentence}");
        assert!(told(event::REJECTED, 28).expect("a failure").1.contains("the program at"));
        assert!(told(event::UNREACHABLE, 1).expect("a failure").1.contains("SIDR"));
        assert_eq!(told(event::CONNECT_ERROR, -5).expect("a failure").0, 5);
        assert!(told(event::ESTABLISHED, 0).is_none() && told(event::DISCONNECTED, 0).is_none());
        assert!(failed(event::REJECTED, 4, Side::Active, None).expect("a failure").1.starts_with("the peer"));
    }

    #[test]
    fn nobody_is_blamed_for_what_he_did_not_do() {
        let passive = |code, status| failed(code, status, Side::Passive, None).expect("a failure").1;
        let silent = passive(event::UNREACHABLE, -libc::ETIMEDOUT);
        assert!(silent.contains("no RTU") && !silent.contains("no connection manager"), "{silent}");
        assert!(!passive(event::REJECTED, REJECT_SERVICE).contains("listens"));
        for side in [Side::Active, Side::Passive] {
            let (errno, ended) = failed(event::UNREACHABLE, SERVICE_ENDED, side, None).expect("a failure");
            assert!(errno == libc::ECONNRESET && ended.contains("this host's service"), "{ended}");
        }
    }
}
