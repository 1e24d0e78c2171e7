//! Ends of connections that do what they are told line by line: in this process, or in one that can be killed.

use std::io::{BufRead, Write};
use std::net::SocketAddr;

use ferroce_service::client::{Client, LaneLease, StartOptions};
use ferroce_service::cm::client::EventChannel;
use ferroce_service::cm::protocol::{CmEvent, CmRequest, Detail, Ece, Param, Path};
use ferroce_service::cm::route;
use ferroce_wire::LANE_SHIFT;
use rustix::event::{PollFd, PollFlags, poll};

use super::{Helper, MINUTE, say};

pub(super) const CONNECT_REQUEST: u32 = 4;
pub(super) const CONNECT_RESPONSE: u32 = 5;
pub(super) const UNREACHABLE: u32 = 7;
pub(super) const REJECTED: u32 = 8;
pub(super) const ESTABLISHED: u32 = 9;
pub(super) const DISCONNECTED: u32 = 10;
pub(super) const TIMEWAIT_EXIT: u32 = 15;

const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;

/// A program with a lane and an event channel.
pub(super) struct Program {
    pub(super) client: Client,
    lane: LaneLease,
    pub(super) channel: EventChannel,
    last_qpn: u32,
    /// The id that a command is about.
    id: u64,
    peer: Option<SocketAddr>,
}

impl Program {
    pub(super) fn new(options: &StartOptions) -> Program {
        let client = Client::connect(options).unwrap();
        let lane = client.lease_lane().unwrap();
        let channel = EventChannel::open(&client).unwrap();
        let last_qpn = u32::from(lane.lane()) << LANE_SHIFT | 1;
        Program { client, lane, channel, last_qpn, id: 0, peer: None }
    }

    /// A queue pair number that was not used before.
    fn param(&mut self) -> Param {
        self.last_qpn += 1;
        assert_eq!(self.last_qpn >> LANE_SHIFT, u32::from(self.lane.lane()), "a lane has no more queue pairs");
        Param { qpn: self.last_qpn, retry_count: 7, ..Param::default() }
    }

    /// Does what a line says, and answers.
    pub(super) fn obey(&mut self, line: &str) -> String {
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        let id = self.id;
        match command {
            "listen" => return self.listen(argument.parse().unwrap(), TCP, 0).to_string(),
            "listen-udp" => return self.listen(argument.parse().unwrap(), UDP, 0).to_string(),
            "create" => self.create(TCP),
            "create-udp" => self.create(UDP),
            "bind" => drop(self.client.cm_bind(id, argument.parse().unwrap(), false, false).unwrap()),
            "route" => self.peer = Some(argument.parse().unwrap()),
            "connect" => self.connect(b"hello"),
            "resolve" => {
                let (path, port) = self.path();
                self.ask(CmRequest::Resolve { id, path, port, private_data: Vec::new() });
            }
            "accept" => self.accept(id),
            "accept-udp" => {
                let (qpn, private_data) = (self.param().qpn, Vec::new());
                self.ask(CmRequest::AcceptDatagram { id, qpn, qkey: 1, private_data, ece: Ece::default() });
            }
            "establish" => self.ask(CmRequest::Establish { id }),
            "disconnect" => self.ask(CmRequest::Disconnect { id }),
            "event" => return self.event().code.to_string(),
            other => panic!("no command {other}"),
        }
        "done".into()
    }

    pub(super) fn ask(&self, request: CmRequest) {
        self.client.cm(request).unwrap();
    }

    pub(super) fn listen(&mut self, at: SocketAddr, space: u16, backlog: u32) -> SocketAddr {
        self.create(space);
        let addr = self.client.cm_bind(self.id, at, false, false).unwrap();
        self.ask(CmRequest::Listen { id: self.id, backlog });
        addr
    }

    fn create(&mut self, space: u16) {
        self.id = self.client.cm_create_id(&self.channel, space, space == UDP).unwrap();
    }

    /// The way to the peer: packets of the connection are over after a quarter of a second.
    fn path(&self) -> (Path, u16) {
        let peer = self.peer.expect("a route comes first");
        (Path { ack_timeout: 16, ..route::resolve(peer, None).unwrap().path }, peer.port())
    }

    fn connect(&mut self, private_data: &[u8]) {
        let ((path, port), param) = (self.path(), self.param());
        let (id, private_data, ece) = (self.id, private_data.to_vec(), Ece::default());
        self.ask(CmRequest::Connect { id, path, port, param, private_data, ece });
    }

    pub(super) fn accept(&mut self, id: u64) {
        let (param, private_data, ece) = (self.param(), Vec::new(), Ece::default());
        self.ask(CmRequest::Accept { id, param, private_data, ece });
    }

    /// The next event, which must come.
    fn event(&mut self) -> CmEvent {
        assert_eq!(poll(&mut [PollFd::new(&self.channel.fd(), PollFlags::IN)], Some(&MINUTE)), Ok(1), "no event came");
        let event = self.channel.next_event().unwrap();
        if let Detail::Request { .. } = event.detail {
            self.id = event.id;
        }
        event
    }

    /// Connects, disconnects, and leaves nothing.
    pub(super) fn round_trip(&mut self, to: SocketAddr) {
        self.create(TCP);
        self.peer = Some(to);
        self.connect(b"hello");
        assert_eq!(self.event().code, CONNECT_RESPONSE);
        self.ask(CmRequest::Establish { id: self.id });
        self.ask(CmRequest::Disconnect { id: self.id });
        assert_eq!(self.event().code, DISCONNECTED);
        self.ask(CmRequest::Destroy { id: self.id });
    }
}

/// Obeys its standard input.
pub(super) fn role_end(options: &StartOptions) {
    let mut program = Program::new(options);
    for line in std::io::stdin().lock().lines() {
        say(program.obey(&line.unwrap()));
    }
}

/// An end of a connection.
pub(super) enum End {
    Here(Box<Program>),
    There(Helper),
}

impl End {
    pub(super) fn obey(&mut self, line: &str) -> String {
        match self {
            End::Here(program) => program.obey(line),
            End::There(helper) => {
                let stdin = helper.child.stdin.as_mut().unwrap();
                writeln!(stdin, "{line}").and_then(|()| stdin.flush()).unwrap();
                helper.line()
            }
        }
    }
}
