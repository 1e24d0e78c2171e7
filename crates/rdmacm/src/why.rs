//! Why a connection did not come about, in words: the event says it by a number.

use std::ffi::c_int;
use std::net::SocketAddr;

use crate::abi::event;
use crate::connect::REJECT_CONSUMER;

/// Reasons of a REJ (IBA 12.6.7.2).
const REJECT_SERVICE: c_int = 8;
const REJECT_STALE: c_int = 10;

/// What an event of the service tells of a failure: an error number, and a sentence for the log. None: of none.
pub(crate) fn failed(code: u32, status: c_int, peer: Option<SocketAddr>) -> Option<(c_int, String)> {
    let peer = peer.map_or_else(|| "the peer".to_owned(), |peer| peer.to_string());
    match code {
        event::REJECTED => Some((libc::ECONNREFUSED, rejected(status, &peer))),
        event::UNREACHABLE if status == -libc::ETIMEDOUT => Some((
            libc::ETIMEDOUT,
            format!(
                "no connection manager answers at {peer}: nothing came back from UDP port 4791 there. Has that host RDMA (RoCEv2, or a \
                 program on Ferroce), and does no firewall drop the port?"
            ),
        )),
        event::UNREACHABLE => Some((
            status.abs(),
            format!(
                "{peer} refuses to resolve the service (SIDR status {status}): does a program listen at that port?"
            ),
        )),
        event::CONNECT_ERROR => Some((status.abs(), format!("the connection to {peer} failed while it was made"))),
        _ => None,
    }
}

fn rejected(reason: c_int, peer: &str) -> String {
    match reason {
        REJECT_SERVICE => {
            format!("no program listens at {peer} (reason 8): start the server first, and look at its address and port")
        }
        REJECT_STALE => format!("{peer} takes the request for an old one (reason 10): connect once more"),
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
        let told = |code, status| failed(code, status, peer);
        let (errno, sentence) = told(event::REJECTED, 8).expect("a failure");
        assert!(errno == libc::ECONNREFUSED && sentence.contains("no program listens at 192.0.2.1:7471"), "{sentence}");
        let (errno, sentence) = told(event::UNREACHABLE, -libc::ETIMEDOUT).expect("a failure");
        assert!(errno == libc::ETIMEDOUT && sentence.contains("UDP port 4791"), "{sentence}");
        assert!(told(event::REJECTED, 28).expect("a failure").1.contains("the program at"));
        assert!(told(event::UNREACHABLE, 1).expect("a failure").1.contains("SIDR"));
        assert_eq!(told(event::CONNECT_ERROR, -5).expect("a failure").0, 5);
        assert!(told(event::ESTABLISHED, 0).is_none() && told(event::DISCONNECTED, 0).is_none());
        assert!(failed(event::REJECTED, 4, None).expect("a failure").1.starts_with("the peer"));
    }
}
