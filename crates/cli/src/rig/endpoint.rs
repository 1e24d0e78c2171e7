//! A device, its objects, and queue pairs connected to a peer's.

use std::cell::Cell;
use std::net::{IpAddr, TcpStream};
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, bail};
use ferroce::{
    AhAttr, CompChannel, Completion, Context, Cq, Device, InitiatorCreate, Pd, Psn, Qp, QpAttr, QpAttrMask, QpCreate,
    QpModify, QpState, QpType, QueueCaps, Srq, SrqCreate, WcStatus, XrcdOpen,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::memory::{Area, PEERS_ACCESS};

/// Q_Key of our UD queue pairs.
pub(crate) const QKEY: u32 = 0x1111_1111;
/// ACK timeout code: 4.096 us * 2^14 = 67 ms.
const TIMEOUT: u8 = 14;
/// RNR NAK timer code: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
/// Empty polls between two looks whether the peer is still there.
const POLLS_PER_LOOK: u32 = 4096;

/// Which device and GID to use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    /// Device or interface name.
    pub(crate) device: Option<String>,
    /// Index in its GID table.
    pub(crate) gid_index: Option<u32>,
}

impl Choice {
    /// The device and the GID index. Without a wish: the device that has the address `local`, else the first one with
    /// a GID of its family.
    fn resolve(&self, local: IpAddr) -> Result<(Arc<Device>, u32)> {
        let mut devices = ferroce::devices()?;
        if let Some(wanted) = &self.device {
            let names: Vec<String> = devices.iter().map(|d| format!("{} ({})", d.name(), d.ifname())).collect();
            devices.retain(|device| device.name() == wanted || device.ifname() == *wanted);
            if devices.is_empty() {
                bail!("there is no device or interface {wanted}; there are: {}", names.join(", "));
            }
        }
        let position = |test: &dyn Fn(IpAddr) -> bool| {
            devices.iter().find_map(|device| {
                let index = device.gids().iter().position(|entry| test(entry.addr))?;
                Some((Arc::clone(device), index as u32))
            })
        };
        let exact = position(&|addr| addr == local);
        if let Some(index) = self.gid_index {
            let device = exact.map(|(device, _)| device).or_else(|| devices.first().cloned()).ok_or_else(no_device)?;
            device.gid(index)?;
            return Ok((device, index));
        }
        exact
            .or_else(|| position(&|addr| addr.is_ipv4() == local.is_ipv4()))
            .or_else(|| devices.first().map(|device| (Arc::clone(device), 0)))
            .ok_or_else(no_device)
    }

    /// An address at which a server on this machine that makes the same choice is reached.
    pub(crate) fn own_address(&self) -> Result<IpAddr> {
        let (device, index) = self.resolve(IpAddr::from([127, 0, 0, 1]))?;
        Ok(device.gid(index)?.addr)
    }
}

fn no_device() -> anyhow::Error {
    anyhow!("there is no device: `ferroce devices` says why")
}

/// What both ends of a test agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Send and receive queue depth of each queue pair.
    pub(crate) depth: u32,
    /// Sleep in completion channels instead of polling.
    pub(crate) events: bool,
    /// Largest inline data in bytes.
    pub(crate) inline: u32,
}

/// What an end tells the other about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Address of its GID.
    pub(crate) addr: IpAddr,
    /// Largest path MTU that it can do.
    pub(crate) mtu: u32,
    /// Its queue pairs.
    pub(crate) qps: Vec<PeerQp>,
    /// Its memory.
    pub(crate) area: Area,
}

/// One queue pair of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerQp {
    /// Number.
    pub(crate) qpn: u32,
    /// First PSN that it sends.
    pub(crate) psn: u32,
}

/// An opened device with one PD and one CQ for everything.
pub(crate) struct Endpoint {
    pub(crate) pd: Arc<Pd>,
    pub(crate) cq: Arc<Cq>,
    channel: Option<Arc<CompChannel>>,
    gid_index: u32,
    addr: IpAddr,
    settings: Settings,
    /// The side channel: its end is the peer's.
    watch: TcpStream,
    idle: Cell<u32>,
}

impl Endpoint {
    /// Opens the device chosen for a peer at the other end of `control`, for `qps` queue pairs to come.
    pub(crate) fn open(choice: &Choice, control: &Control, qps: u32, settings: Settings) -> Result<Endpoint> {
        let (local, _) = control.addresses()?;
        let (device, gid_index) = choice.resolve(local)?;
        let addr = device.gid(gid_index)?.addr;
        let context: Arc<Context> = device.open().with_context(|| format!("cannot open {}", device.name()))?;
        let channel = if settings.events { Some(context.create_comp_channel()?) } else { None };
        let cq = context.create_cq(2 * settings.depth * qps.max(1), channel.as_ref(), 0)?;
        let pd = context.alloc_pd()?;
        Ok(Endpoint { pd, cq, channel, gid_index, addr, settings, watch: control.second()?, idle: Cell::new(0) })
    }

    /// The device's name and interface, and the address in use.
    pub(crate) fn describe(&self) -> String {
        let device = self.pd.context().device();
        format!("{} ({}) {}", device.name(), device.ifname(), self.addr)
    }

    /// Address of our GID.
    pub(crate) fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Largest path MTU that the interface carries.
    pub(crate) fn mtu(&self) -> u32 {
        self.pd.context().device().port().active_mtu
    }

    /// A queue pair in RESET.
    pub(crate) fn create_qp(&self, qp_type: QpType) -> Result<Arc<Qp>> {
        Ok(self.pd.create_qp(&QpCreate {
            send_cq: Arc::clone(&self.cq),
            recv_cq: Arc::clone(&self.cq),
            srq: None,
            caps: self.caps(),
            qp_type,
            sq_sig_all: false,
            cookie: 0,
        })?)
    }

    /// An XRC initiator in RESET.
    pub(crate) fn create_initiator(&self) -> Result<Arc<Qp>> {
        let (send_cq, caps) = (Arc::clone(&self.cq), self.caps());
        Ok(self.pd.create_initiator(&InitiatorCreate { send_cq, caps, sq_sig_all: false, cookie: 0 })?)
    }

    /// An XRC target in RESET, and a shared receive queue of its domain.
    pub(crate) fn create_target(&self) -> Result<(Arc<Qp>, Arc<Srq>)> {
        let context = self.pd.context();
        let domain = context.open_xrcd(&XrcdOpen { name: None, create: true, exclusive: false })?;
        let QueueCaps { max_recv_wr: max_wr, max_recv_sge: max_sge, .. } = self.caps();
        let srq = domain.create_srq(&self.pd, &self.cq, &SrqCreate { max_wr, max_sge, cookie: 0 })?;
        Ok((domain.create_target(0)?, srq))
    }

    fn caps(&self) -> QueueCaps {
        QueueCaps {
            max_send_wr: self.settings.depth,
            max_recv_wr: self.settings.depth,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: self.settings.inline,
        }
    }

    /// The address vector of the path to `peer`.
    pub(crate) fn path_to(&self, peer: IpAddr) -> AhAttr {
        AhAttr {
            is_global: true,
            dgid: match peer {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            },
            sgid_index: self.gid_index as u8,
            hop_limit: 64,
            port_num: 1,
            ..AhAttr::default()
        }
    }

    /// Brings a queue pair from RESET to RTS, connected to `remote` at `peer` (UD: just ready).
    pub(crate) fn connect(&self, qp: &Qp, psn: u32, peer: &Peer, remote: PeerQp, mtu: u32) -> Result<()> {
        use QpAttrMask as M;
        let mut change = QpModify {
            attr: QpAttr {
                state: QpState::Init,
                port_num: 1,
                pkey_index: 0,
                qkey: QKEY,
                access: PEERS_ACCESS,
                path_mtu: mtu,
                dest_qpn: remote.qpn,
                rq_psn: Psn::new(remote.psn),
                sq_psn: Psn::new(psn),
                max_rd_atomic: 16,
                max_dest_rd_atomic: 16,
                min_rnr_timer: MIN_RNR_TIMER,
                timeout: TIMEOUT,
                retry_cnt: 7,
                rnr_retry: 7,
                ..QpAttr::default()
            },
            ah: self.path_to(peer.addr),
        };
        let connected = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        let (init, rtr, rts) = match qp.qp_type() {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => (
                M::ACCESS_FLAGS,
                connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
            ),
            QpType::Uc => (M::ACCESS_FLAGS, connected, M::SQ_PSN),
            QpType::Ud => (M::QKEY, M::empty(), M::SQ_PSN),
            QpType::RawPacket => unreachable!("the rig makes no queue pairs of frames"),
        };
        qp.modify(&change, M::STATE | M::PKEY_INDEX | M::PORT | init)?;
        change.attr.state = QpState::Rtr;
        qp.modify(&change, M::STATE | rtr)?;
        change.attr.state = QpState::Rts;
        qp.modify(&change, M::STATE | rts)?;
        Ok(())
    }

    /// Takes completions if there are some; never sleeps.
    pub(crate) fn look(&self, out: &mut [Completion]) -> Result<usize> {
        Ok(self.cq.poll(out)?)
    }

    /// Takes completions if there are some. If not: polling mode returns, events mode sleeps until there may be some.
    ///
    /// Fails when the peer's process has ended.
    pub(crate) fn poll(&self, out: &mut [Completion]) -> Result<usize> {
        let taken = self.look(out)?;
        if taken > 0 {
            return Ok(taken);
        }
        let Some(channel) = &self.channel else {
            let idle = self.idle.get().wrapping_add(1);
            self.idle.set(idle);
            if idle.is_multiple_of(POLLS_PER_LOOK) {
                self.look_at_peer()?;
            }
            return Ok(0);
        };
        self.cq.req_notify(false)?;
        // What came before the request raises no event.
        let taken = self.cq.poll(out)?;
        if taken == 0 {
            // Ends at least some times a second, so that a peer that is gone is noticed and deadlines are kept.
            self.pd.context().attend(channel)?;
            if channel.is_readable() {
                channel.next_event().context("cannot take an event")?;
            } else {
                self.look_at_peer()?;
            }
        }
        Ok(taken)
    }

    /// Fails if the side channel was closed.
    fn look_at_peer(&self) -> Result<()> {
        let mut fds = [PollFd::new(&self.watch, PollFlags::IN)];
        let readable = poll(&mut fds, Some(&Timespec::default())).context("cannot look at the side channel")?;
        if readable > 0 && self.watch.peek(&mut [0]).context("the TCP side channel to the peer broke")? == 0 {
            bail!("the peer ended; its own messages say why");
        }
        Ok(())
    }

    /// Waits for one completion, whatever it is.
    pub(crate) fn wait(&self) -> Result<Completion> {
        let mut out = [Completion::UNUSED];
        while self.poll(&mut out)? == 0 {}
        Ok(out[0])
    }
}

/// What a failed completion means to the person who runs the test.
pub(crate) fn status_error(completion: &Completion) -> anyhow::Error {
    let hint = match completion.status {
        WcStatus::RetryExcErr => ": no answer over RDMA, though TCP works; is UDP port 4791 open in both directions?",
        WcStatus::RnrRetryExcErr => ": the peer posted no receives",
        WcStatus::RemAccessErr => ": the peer's memory region does not grant this",
        WcStatus::WrFlushErr => ": the queue pair failed before; the first failure counts",
        _ => "",
    };
    anyhow!(
        "RDMA: a request ended with {:?} (opcode {:?}, vendor error {:#x}){hint}",
        completion.status,
        completion.opcode,
        completion.vendor_err
    )
}
