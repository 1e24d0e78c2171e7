//! Packets that arrived at the wrong lane (from lane 0, or handed in by the lane that got them), and what lanes tell each other
//! about rings.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_wire::{BTH_LEN, ICRC_LEN, NetHeader, icrc};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::{Service, SocketId};
use crate::cm::Inbound;
use crate::protocol::{RelayHeader, RingCall, RingStep};
use crate::{LANE_SHIFT, seqpacket, sys};

/// The longest UDP payload with its relay header.
pub(super) const BUFFER_BYTES: usize = 65_536 + RelayHeader::LEN;

/// Packets of one source that are forwarded before others get their turn.
const PACKETS_PER_TURN: usize = 32;

impl Service {
    pub(super) fn forward_strays(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..PACKETS_PER_TURN {
            let Some(group) = &self.group else {
                break;
            };
            let datagram = match sys::recv_datagram(group.own_socket(), &mut buffer) {
                Ok(datagram) => datagram,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // Nothing more; other errors are those of ICMP messages, which the kernel reports once each.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => continue,
            };
            self.counters.strays += 1;
            match datagram.dst {
                Some(_) if datagram.len < BTH_LEN + ICRC_LEN => self.counters.drop_short += 1,
                Some(dst) => match checked(&buffer[..datagram.len], datagram.src, dst) {
                    Some(packet) if Inbound::is_for_us(packet) => self.management_packet(datagram.src, dst, packet),
                    Some(packet) => self.forward(None, &RelayHeader { src: datagram.src, dst }, packet),
                    None => self.counters.drop_icrc += 1,
                },
                None => self.counters.drop_short += 1,
            }
        }
        self.buffer = buffer;
    }

    pub(super) fn serve_relay(&mut self, socket: SocketId, flags: epoll::EventFlags) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..PACKETS_PER_TURN {
            // A lane that was given back hands in nothing any more.
            let Some((lend, lane)) = self.lends.get(&socket).and_then(|lend| Some((lend, lend.lane?))) else {
                break;
            };
            let sender = (lane, lend.lease);
            let received = match seqpacket::recv(&lend.relay, &mut buffer, RecvFlags::DONTWAIT) {
                Ok(received) => received,
                Err(_) => break,
            };
            if received.len == 0 {
                break; // Closed, and then hung up; or an empty message, which counts as nothing.
            }
            self.counters.relay_in += 1;
            let message = &buffer[..received.len];
            match RelayHeader::decode(message).filter(|_| !received.truncated) {
                Some((header, packet)) => self.forward(Some(socket), &header, packet),
                None => match RingCall::decode(message) {
                    Some(call) => self.pass_on(sender, &call, &received.descriptors),
                    None => self.counters.drop_short += 1,
                },
            }
        }
        self.buffer = buffer;
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.let_go(socket);
        }
    }

    /// Sends a packet to the lane that its QP number names.
    fn forward(&mut self, from: Option<SocketId>, header: &RelayHeader, packet: &[u8]) {
        let Some(lane) = lane_of(packet) else {
            self.counters.drop_short += 1;
            return;
        };
        let Some(socket) = self.lanes.get(&lane).copied() else {
            self.counters.drop_no_lane += 1;
            return;
        };
        if from == Some(socket) {
            self.counters.drop_loop += 1;
            return;
        }
        self.hand_over(socket, &[&header.encode(), packet], &[]);
    }

    /// Tells a lane what another one, `sender`, has to say about a ring. The descriptors are only passed on.
    fn pass_on(&mut self, sender: (u16, u64), call: &RingCall, descriptors: &[OwnedFd]) {
        let expected = match call.step {
            RingStep::Offer => 1,
            RingStep::Accept => 0,
        };
        if descriptors.len() != expected {
            self.counters.drop_short += 1;
            return;
        }
        if call.lane == sender.0 {
            self.counters.drop_loop += 1;
            return;
        }
        // A lease that has ended is not the one that was meant, though its lane may be another's by now.
        let target = self.lanes.get(&call.lane).copied().filter(|socket| self.lends[socket].lease == call.lease);
        let Some(socket) = target else {
            self.counters.drop_no_lane += 1;
            return;
        };
        let call = RingCall { lane: sender.0, lease: sender.1, ..*call };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        self.hand_over(socket, &[&call.encode()], &descriptors);
    }

    fn hand_over(&mut self, socket: SocketId, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) {
        match seqpacket::send(&self.lends[&socket].relay, parts, descriptors, SendFlags::DONTWAIT) {
            Ok(()) => self.counters.relay_out += 1,
            Err(errno) => {
                if errno != Errno::AGAIN {
                    log::debug!("no relay to socket {socket}: {errno}");
                }
                self.counters.drop_full += 1;
            }
        }
    }
}

/// A packet from the network without its ICRC, if that is right: lanes take what is relayed as checked.
fn checked(datagram: &[u8], src: SocketAddr, dst: IpAddr) -> Option<&[u8]> {
    let (packet, icrc) = datagram.split_last_chunk::<ICRC_LEN>()?;
    let net = NetHeader {
        src: src.ip().to_canonical(),
        dst: dst.to_canonical(),
        src_port: src.port(),
        tclass: 0,
        hop_limit: 0,
        udp_len: u16::try_from(datagram.len()).ok()?,
    };
    icrc::verify(&net, packet, u32::from_le_bytes(*icrc)).map(|_| packet)
}

/// The upper bits of the destination QP number in a base transport header.
fn lane_of(packet: &[u8]) -> Option<u16> {
    let bth = packet.first_chunk::<BTH_LEN>()?;
    let qpn = u32::from_be_bytes([0, bth[5], bth[6], bth[7]]);
    Some((qpn >> LANE_SHIFT) as u16)
}
