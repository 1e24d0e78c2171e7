//! Requests about connections, and packets to queue pair 1.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ferroce_cm::{IdInfo, Owner};
use ferroce_wire::LANE_SHIFT;
use ferroce_wire::mad::PortSpace;
use rustix::event::epoll;

use super::{Service, Source};
use crate::ServiceError;
use crate::cm::protocol::{CmReply, CmRequest};
use crate::cm::{Asker, Inbound, Outcome};
use crate::devices::{self, ListOptions};
use crate::netlink;
use crate::protocol::{CmIdPage, CmIdStatus, Reply};

/// How long the list of devices is good.
const DEVICES_FRESH: Duration = Duration::from_secs(1);

impl Service {
    pub(super) fn answer_cm(&mut self, id: u64, request: u64, asked: CmRequest) {
        // Whoever wants events wants packets: the port is open from the first channel on.
        let opened = match asked {
            CmRequest::OpenChannel => self.open_group().map(drop),
            CmRequest::Connect { .. }
            | CmRequest::Accept { .. }
            | CmRequest::Resolve { .. }
            | CmRequest::Adopt { .. } => self.look_up_guids(),
            _ => Ok(()),
        };
        let allowed = opened.and_then(|()| self.may_ask(id, &asked));
        let lanes = &self.clients[&id].lanes;
        let holds_qpn = |qpn: u32| u16::try_from(qpn >> LANE_SHIFT).is_ok_and(|lane| lanes.contains_key(&lane));
        let guids = self.guids.as_ref().map(|(_, guids)| guids);
        let guid_of = |addr: IpAddr| guids.and_then(|guids| guids.get(&addr).copied());
        let asker = Asker { client: id, holds_qpn: &holds_qpn, guid_of: &guid_of };
        match allowed.and_then(|()| self.cm.answer(&asker, asked)) {
            Ok(Outcome::Reply(reply)) => self.reply(id, request, Reply::Cm(reply), &[]),
            Ok(Outcome::Channel(channel, theirs)) => {
                let ours = self.cm.channel_fd(channel).expect("it was just made");
                if let Err(errno) =
                    epoll::add(&self.epoll, ours, Source::Channel(channel).token(), epoll::EventFlags::IN)
                {
                    let error = ServiceError::system("no event channel: cannot watch it", errno);
                    return self.reply_error(id, request, error);
                }
                self.reply(id, request, Reply::Cm(CmReply::Channel { channel }), &[theirs.as_fd()]);
            }
            Err(error) => self.reply_error(id, request, error),
        }
        self.rewatch_channels();
    }

    /// A page of the ids that a client is told of. Those that nobody owns any more are shown to who sees all.
    pub(super) fn cm_ids(&self, asker: u64, from: u64) -> CmIdPage {
        let uid = self.clients[&asker].peer.uid;
        let user = (!self.may_see(asker, self.uid)).then(|| self.user(uid));
        let is_shown = |info: &&IdInfo| {
            user.is_none() || self.is_same_user(uid, uid) || info.owner.is_some_and(|Owner(client)| client == asker)
        };
        let (ids, next) = self.cm.page_of_ids(from, user);
        let status = |info: &IdInfo| CmIdStatus {
            id: info.id.number(),
            pid: info.owner.and_then(|Owner(client)| self.clients.get(&client)).map_or(0, |client| client.peer.pid),
            space: space_name(info.space),
            service: if info.service == ferroce_cm::Service::Datagram { "datagram" } else { "connected" }.into(),
            state: info.state.to_string(),
            local: info.local,
            peer: info.peer,
            qpn: info.qpn,
            remote_qpn: info.remote_qpn,
            waiting: info.waiting as u64,
        };
        CmIdPage { ids: ids.iter().filter(is_shown).map(status).collect(), next }
    }

    /// Addresses of devices, at most a second old.
    fn look_up_guids(&mut self) -> Result<(), ServiceError> {
        let now = Instant::now();
        if self.guids.as_ref().is_some_and(|(at, _)| now < *at + DEVICES_FRESH) {
            return Ok(());
        }
        let mut guids = BTreeMap::new();
        for device in devices::list(ListOptions { loopback: true })? {
            for entry in device.gids {
                guids.entry(entry.addr).or_insert(device.guid);
            }
        }
        self.guids = Some((now, guids));
        Ok(())
    }

    /// A packet from the network to queue pair 1. (Lanes do not hand such packets in: a program could make them up.)
    pub(super) fn management_packet(&mut self, src: SocketAddr, dst: IpAddr, packet: &[u8]) {
        self.counters.management += 1;
        if self.is_of_this_host(src.ip()) && !self.cm.sends_from(src) {
            // Whoever may send from this host's address is no connection manager: it could end connections of others.
            log::debug!("queue pair 1: from {src}: another program of this host made that up");
            return;
        }
        match Inbound::parse(src, dst, packet) {
            Ok(inbound) => self.cm.packet(&inbound),
            Err(reason) => log::debug!("queue pair 1: from {src}: {reason}"),
        }
    }

    /// Is it an address of this host? The list is at most a second old.
    fn is_of_this_host(&mut self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        if ip.is_loopback() {
            return true;
        }
        let now = Instant::now();
        let fresh = self.own_addresses.as_ref().is_some_and(|(at, _)| now < *at + DEVICES_FRESH);
        if !fresh {
            match netlink::addresses() {
                Ok(addresses) => {
                    let ips = addresses.into_iter().map(|address| address.addr.to_canonical()).collect();
                    self.own_addresses = Some((now, ips));
                }
                Err(error) => log::debug!("the last list of addresses goes on: {error}"),
            }
        }
        self.own_addresses.as_ref().is_some_and(|(_, ips)| ips.contains(&ip))
    }

    pub(super) fn serve_channel(&mut self, channel: u64, flags: epoll::EventFlags) {
        let hung_up = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        self.cm.flush(channel);
        let client = self.cm.client_of(channel).and_then(|client| self.clients.get(&client));
        if let Some(closer) = client.map(|client| client.closer.clone())
            && let Some(socket) = self.cm.serve_channel(channel, hung_up, &closer)
        {
            self.unwatch(&socket);
            closer.retire(socket);
        }
        self.rewatch_channels();
    }

    /// Waits for room where events wait.
    pub(super) fn rewatch_channels(&mut self) {
        for (channel, socket, waits) in self.cm.rewatch() {
            let flags = if waits { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            if let Err(errno) = epoll::modify(&self.epoll, socket, Source::Channel(channel).token(), flags) {
                log::error!("cannot change how an event channel is watched: {errno}");
            }
        }
    }
}

/// As `rdma resource show cm_id` calls it.
fn space_name(space: PortSpace) -> String {
    match space {
        PortSpace::Tcp => "TCP".into(),
        PortSpace::Udp => "UDP".into(),
        PortSpace::Ipoib => "IPOIB".into(),
        PortSpace::Ib => "IB".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use ferroce_cm::{Cm, Config, ConnectParam, ConnectionParam, Path};
    use ferroce_testkit::{free_name, free_port};
    use ferroce_wire::Psn;
    use ferroce_wire::mad::{Ece, gsi_headers};

    use super::*;
    use crate::server::ServerOptions;

    /// A request for a connection to a port where nobody listens, without its ICRC.
    fn request(path: Path) -> Vec<u8> {
        let mut cm = Cm::new(Config::new([7; 32]));
        let id = cm.create_id(Owner(1), PortSpace::Tcp, ferroce_cm::Service::Connected).unwrap();
        let param = ConnectionParam { qpn: 0x4002, ..ConnectionParam::default() };
        let connect = ConnectParam { path, port: 1, ca_guid: 9, param, private_data: b"", ece: Ece::default() };
        cm.connect(0, id, &connect).unwrap();
        let headers = gsi_headers(Psn::new(1));
        let mut packet = vec![0; headers.len()];
        headers.emit(&mut packet);
        packet.extend(cm.poll_transmit().unwrap().mad.emit());
        packet
    }

    #[test]
    fn nobody_else_on_this_host_speaks_for_its_connection_manager() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let (port, mut service) = (options.port, Service::bind(options).unwrap());
        let (there, here): (IpAddr, IpAddr) = ("127.0.0.2".parse().unwrap(), "127.0.0.1".parse().unwrap());
        let listener = UdpSocket::bind((there, port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let packet = request(Path::new(there, here));
        let src = SocketAddr::new(there, 40_000);

        service.management_packet(src, here, &packet);
        assert!(listener.recv(&mut [0; 512]).is_err(), "it was answered");
        // It is a good one.
        service.cm.packet(&Inbound::parse(src, here, &packet).unwrap());
        assert!(listener.recv(&mut [0; 512]).is_ok());
    }
}
