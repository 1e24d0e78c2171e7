//! The queue pair of a datagram socket at one local address, and its buffers.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::ptr;
use std::sync::Arc;

use ferroce_abi::consts::wr;
use ferroce_abi::{
    ibv_ah, ibv_ah_attr, ibv_device_attr, ibv_qp, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_send_wr_operands,
    ibv_wc, ibv_wr_ud,
};
use ferroce_rsocket::{DATAGRAM_MAX, DataHeader, QUEUE_MAX, QUEUE_MIN, Span};

use super::super::OwnedId;
use super::super::completions::Completions;
use super::super::gather::Gather;
use super::super::options::Sizes;
use super::super::region::Region;
use super::{Arrived, Place, address};
use crate::abi::{PS_UDP, QPT_UD, UDP_QKEY};
use crate::channel::ChannelObject;
use crate::entry::{Call, Refusal, check};
use crate::id::{Fresh, IdObject};
use crate::{addr, qp, verbs};

/// Bytes in front of what a UD queue pair receives.
const GRH_LEN: u32 = 40;
/// Completions taken at once.
const BATCH: usize = 16;
/// A receive, among ids of work requests.
const RECEIVE: u64 = 1 << 63;
/// `IBV_SEND_SIGNALED`.
const SIGNALED: u32 = 1 << 1;
/// A place for one datagram.
const SLOT: u32 = DATAGRAM_MAX as u32;

/// An address handle.
pub(super) struct Ah(*mut ibv_ah);

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Ah {}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: made by `Port::handle`; requests that were posted with it have copies of what they need.
        unsafe { verbs::ibv_destroy_ah(self.0) };
    }
}

/// See the module's text.
pub(super) struct Port {
    local: SocketAddr,
    /// Goes before the buffers.
    completions: Completions,
    send: Region,
    /// Offsets of places to send from.
    free: Vec<u32>,
    sends: usize,
    receive: Region,
    /// Longest payload of the device, in bytes.
    mtu: usize,
    /// The last to go.
    id: OwnedId,
}

// SAFETY: verbs may be called from any thread; it is used under the socket's lock.
unsafe impl Send for Port {}

impl Port {
    /// At a local address, whose device carries `mtu` bytes. Receives are posted.
    pub(super) fn new(local: SocketAddr, mtu: usize, sizes: &Sizes) -> Call<Port> {
        let id = bound_id(local)?;
        // SAFETY: fields that are the library's during calls about the id.
        let (context, pd) = unsafe { ((*id.get().as_ptr()).verbs, (*id.get().as_ptr()).pd) };
        // SAFETY: integers, for which zero is a value.
        let mut device: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; the place is ours.
        check(unsafe { verbs::ibv_query_device(context, &raw mut device) })?;
        let most = u16::try_from(device.max_qp_wr.min(device.max_cqe / 2)).unwrap_or(QUEUE_MAX);
        let queue = |wanted: u16, buffer: u32| {
            let fits = u16::try_from(buffer / SLOT).unwrap_or(QUEUE_MAX);
            wanted.min(fits).min(most).clamp(QUEUE_MIN, QUEUE_MAX)
        };
        let sends = queue(sizes.send_queue, sizes.send_buffer);
        let receives = queue(sizes.receive_queue, sizes.receive_buffer);
        let send = Region::new(pd, usize::from(sends) * DATAGRAM_MAX, false)?;
        // Behind the places: what comes in front of each datagram, of which nobody makes use.
        let receive = Region::new(pd, usize::from(receives) * DATAGRAM_MAX + GRH_LEN as usize, false)?;
        let completions = Completions::new(context, c_int::from(sends) + c_int::from(receives))?;
        let free = (0..u32::from(sends)).rev().map(|at| at * SLOT).collect();
        let sends = usize::from(sends);
        let port = Port { local, completions, send, free, sends, receive, mtu, id };
        port.start(sends, receives)?;
        Ok(port)
    }

    fn start(&self, sends: usize, receives: u16) -> Call<()> {
        // SAFETY: integers and pointers, for which zero is a value.
        let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        init.send_cq = self.completions.cq();
        init.recv_cq = self.completions.cq();
        init.qp_type = QPT_UD as u32;
        init.cap.max_send_wr = sends as u32;
        init.cap.max_recv_wr = receives.into();
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 2;
        qp::create(self.id.get(), ptr::null_mut(), &mut init)?;
        (0..u32::from(receives)).try_for_each(|at| self.post_receive(at * SLOT))
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn qpn(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.qp()).qp_num }
    }

    /// Longest datagram with its header that a UD packet carries, in bytes.
    pub(super) fn longest(&self) -> usize {
        self.mtu.min(DATAGRAM_MAX)
    }

    fn qp(&self) -> *mut ibv_qp {
        qp::qp_of(self.id.get())
    }

    /// Descriptor of the completion channel.
    pub(super) fn fd(&self) -> c_int {
        self.completions.fd()
    }

    /// A handle for an address.
    pub(super) fn handle(&self, address: &ibv_ah_attr) -> Call<Ah> {
        let mut address = *address;
        // SAFETY: a live PD; attributes of ours.
        let ah = unsafe { verbs::ibv_create_ah((*self.qp()).pd, &raw mut address) };
        if ah.is_null() { Err(Refusal::last()) } else { Ok(Ah(ah)) }
    }
}

/// Sending.
impl Port {
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn all_sent(&self) -> bool {
        self.free.len() == self.sends
    }

    /// Sends a datagram, which is no longer than [`Port::longest`] with its header. False: there is no room.
    pub(super) fn send(&mut self, ah: &Ah, qpn: u32, data: &mut Gather<'_>) -> Call<bool> {
        let Some(offset) = self.free.pop() else { return Ok(false) };
        let header = DataHeader { src: self.local }.to_bytes();
        let (header, data_len) = (header.as_slice(), data.left());
        let span = Span { offset, len: (header.len() + data_len) as u32 };
        // SAFETY: a place of the send buffer, which nobody reads before the request is posted.
        let place = unsafe { std::slice::from_raw_parts_mut(self.send.place(span), span.len as usize) };
        place[..header.len()].copy_from_slice(header);
        data.copy_to(&mut place[header.len()..]);
        let mut list = self.send.sge(span);
        // SAFETY: integers and pointers, for which zero is a value.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = offset.into();
        request.sg_list = &raw mut list;
        request.num_sge = 1;
        request.opcode = wr::SEND;
        request.send_flags = SIGNALED;
        request.wr = ibv_send_wr_operands { ud: ibv_wr_ud { ah: ah.0, remote_qpn: qpn, remote_qkey: UDP_QKEY } };
        let mut bad = ptr::null_mut();
        let qp = self.qp();
        // SAFETY: a live queue pair and handle; a request whose list lives during the call. The bytes are in the send buffer, which
        // outlives the queue pair.
        let result = check(unsafe {
            let send = (*(*qp).context).ops.post_send.expect("libibverbs fills its table");
            send(qp, &raw mut request, &raw mut bad)
        });
        if result.is_err() {
            self.free.push(offset);
        }
        result.map(|()| true)
    }
}

/// Receiving.
impl Port {
    fn post_receive(&self, offset: u32) -> Call<()> {
        let header = Span { offset: (self.receive.len() - GRH_LEN as usize) as u32, len: GRH_LEN };
        let mut list = [self.receive.sge(header), self.receive.sge(Span { offset, len: SLOT })];
        let mut request = ibv_recv_wr {
            wr_id: RECEIVE | u64::from(offset),
            next: ptr::null_mut(),
            sg_list: list.as_mut_ptr(),
            num_sge: 2,
        };
        let mut bad = ptr::null_mut();
        let qp = self.qp();
        // SAFETY: a live queue pair; a request that lives during the call, for memory that outlives the queue pair.
        check(unsafe {
            let post = (*(*qp).context).ops.post_recv.expect("libibverbs fills its table");
            post(qp, &raw mut request, &raw mut bad)
        })
    }

    /// Takes what has come, as port number `own`. True: there was something.
    pub(super) fn take_completions(&mut self, own: usize, queue: &mut VecDeque<Arrived>) -> bool {
        // SAFETY: integers, for which zero is a value.
        let mut completions: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        let count = self.completions.take(&mut completions).unwrap_or(0);
        for completion in &completions[..count] {
            let offset = completion.wr_id as u32;
            if completion.wr_id & RECEIVE == 0 {
                self.free.push(offset);
                continue;
            }
            let whole = completion.byte_len.saturating_sub(GRH_LEN).min(SLOT);
            match (completion.status, DataHeader::parse(self.bytes(Span { offset, len: whole }))) {
                (0, Some((header, data))) => {
                    let len = data.len() as u32;
                    let span = Span { offset: offset + whole - len, len };
                    queue.push_back(Arrived { src: header.src, place: Place::Slot { port: own, slot: offset, span } });
                }
                // Of a stranger; or the queue pair has ended, and takes nothing any more.
                _ => self.release(offset),
            }
        }
        count > 0
    }

    /// Bytes of a datagram that has come.
    pub(super) fn bytes(&self, span: Span) -> &[u8] {
        // SAFETY: inside the buffer; nobody writes there before the place is released.
        unsafe { std::slice::from_raw_parts(self.receive.place(span), span.len as usize) }
    }

    /// A datagram was read: its place is for the next one.
    pub(super) fn release(&self, slot: u32) {
        if let Err(refusal) = self.post_receive(slot) {
            crate::entry::note(
                "rsocket\0",
                refusal.errno(),
                "a datagram's place is lost: the queue pair takes none".into(),
            );
        }
    }
}

/// Sleeping.
impl Port {
    /// From now on the descriptor becomes readable with the next completion.
    pub(super) fn arm(&mut self) {
        self.completions.arm();
    }

    /// Takes the event, if there is one and nobody was faster.
    pub(super) fn disarm(&mut self) {
        self.completions.disarm();
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // Nobody reads or writes the buffers afterwards.
        qp::destroy(self.id.get());
    }
}

/// An id at the address, in the port space of datagrams.
fn bound_id(local: SocketAddr) -> Call<OwnedId> {
    let channel = ChannelObject::open()?;
    let mut number = 0;
    check(channel.with_service(|service| {
        // SAFETY: an open channel; the place is ours.
        unsafe { verbs::ferroce_cm_create_id(service, PS_UDP as u16, 1, &raw mut number) }
    }))?;
    let id = OwnedId(IdObject::publish(Fresh {
        number,
        channel: Arc::clone(&channel),
        is_sync: false,
        context: ptr::null_mut(),
        ps: PS_UDP,
        qp_type: QPT_UD,
    }));
    let name = address::storage(local);
    // SAFETY: a live id, and an address of ours.
    let bound = unsafe { addr::rdma_bind_addr(id.get().as_ptr(), addr::plain(&name).cast_mut()) };
    if bound == 0 { Ok(id) } else { Err(Refusal::last()) }
}
