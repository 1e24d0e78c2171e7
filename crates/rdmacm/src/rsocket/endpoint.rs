//! What carries a stream: queue pair, completion queue, buffers. Drives [`Stream`] with verbs.

use std::ffi::c_int;
use std::ptr;

use ferroce_abi::consts::wr;
use ferroce_abi::{
    ibv_cq, ibv_device_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_send_wr_operands, ibv_sge, ibv_wc,
    ibv_wr_rdma,
};
use ferroce_rsocket::{
    ConnData, IOMAP_LEN, Iomap, Limits, Phase, Post, QUEUE_MAX, QUEUE_MIN, Sge, Source, Span, Stream,
};

use super::completions::Completions;
use super::gather::Gather;
use super::options::Sizes;
use super::region::{Region, Tables};
use crate::abi::QPT_RC;
use crate::entry::{Call, check};
use crate::id::IdObject;
use crate::{qp, verbs};

/// A receive, among ids of work requests.
const RECEIVE: u64 = 1 << 63;
/// `IBV_SEND_SIGNALED`, `IBV_SEND_INLINE`.
const SIGNALED: u32 = 1 << 1;
const INLINE: u32 = 1 << 3;
/// `IBV_WC_WITH_IMM`.
const WITH_IMM: u32 = 1 << 1;
/// Completions taken, and receives posted, at once.
const BATCH: usize = 16;

/// Belongs to an id, which must outlive it.
pub(super) struct Endpoint {
    id: *const IdObject,
    /// Goes before the buffers.
    completions: Completions,
    limits: Limits,
    send: Region,
    receive: Region,
    tables: Tables,
    iomaps: u16,
    stream: Option<Stream>,
}

// SAFETY: the id outlives it, and verbs may be called from any thread; it is used under the socket's lock.
unsafe impl Send for Endpoint {}

impl Endpoint {
    /// For an id that has a device. Receives are posted, so that the peer may send as soon as it knows of us.
    pub(super) fn new(id: &IdObject, sizes: &Sizes) -> Call<Endpoint> {
        // SAFETY: fields that are the library's during calls about the id.
        let (context, pd) = unsafe { ((*id.as_ptr()).verbs, (*id.as_ptr()).pd) };
        // SAFETY: integers, for which zero is a value.
        let mut device: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; the place is ours.
        check(unsafe { verbs::ibv_query_device(context, &raw mut device) })?;
        let most = u16::try_from(device.max_qp_wr.min(device.max_cqe / 2)).unwrap_or(QUEUE_MAX);
        let queue = |wanted: u16| wanted.min(most).clamp(QUEUE_MIN, QUEUE_MAX);
        let (send_queue, receive_queue) = (queue(sizes.send_queue), queue(sizes.receive_queue));
        let completions = Completions::new(context, c_int::from(send_queue) + c_int::from(receive_queue))?;
        let made = create_qp(id, completions.cq(), send_queue, receive_queue, sizes.inline).and_then(|inline| {
            let limits = Limits {
                send_queue,
                receive_queue,
                send_buffer: sizes.send_buffer,
                receive_buffer: sizes.receive_buffer,
                inline,
            };
            let send = Region::new(pd, limits.send_buffer as usize, false)?;
            let receive = Region::new(pd, limits.receive_buffer as usize, true)?;
            Ok((limits, send, receive, Tables::new(pd, sizes.iomaps)?))
        });
        let (limits, send, receive, tables) = match made {
            Ok(made) => made,
            Err(refusal) => {
                qp::destroy(id);
                return Err(refusal);
            }
        };
        let mut endpoint =
            Endpoint { id, completions, limits, send, receive, tables, iomaps: sizes.iomaps, stream: None };
        endpoint.post_receives(receive_queue.into())?;
        Ok(endpoint)
    }

    fn id(&self) -> &IdObject {
        // SAFETY: it outlives the endpoint.
        unsafe { &*self.id }
    }

    /// For the peer.
    pub(super) fn conn_data(&self) -> ConnData {
        ConnData {
            big_endian: cfg!(target_endian = "big"),
            credits: self.limits.receive_queue,
            iomaps: self.iomaps,
            table: self.tables.sge(),
            target: Sge { addr: self.receive.addr(), key: self.receive.rkey(), length: self.limits.receive_buffer / 2 },
        }
    }

    /// What the peer said: from now on there is a stream.
    pub(super) fn start(&mut self, peer: &ConnData) {
        let buffer = Sge { addr: self.receive.addr(), key: self.receive.rkey(), length: self.limits.receive_buffer };
        self.stream = Some(Stream::new(self.limits, buffer, peer));
    }

    /// There is one once the connection is made.
    pub(super) fn stream(&mut self) -> Option<&mut Stream> {
        self.stream.as_mut()
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        self.stream.as_ref().map(Stream::phase)
    }

    /// Descriptor of the completion channel.
    pub(super) fn fd(&self) -> c_int {
        self.completions.fd()
    }
}

/// Completions.
impl Endpoint {
    /// Does what can be done without waiting. True: something came.
    pub(super) fn progress(&mut self) -> bool {
        let mut moved = false;
        while self.take_completions() {
            moved = true;
        }
        self.post_controls();
        moved
    }

    fn take_completions(&mut self) -> bool {
        let Some(stream) = self.stream.as_mut() else { return false };
        // SAFETY: integers, for which zero is a value.
        let mut completions: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        let Some(count) = self.completions.take(&mut completions) else {
            // The device is gone, or the process is a forked child.
            let was_connected = stream.phase() == Phase::Connected;
            stream.broken();
            return was_connected;
        };
        let mut receives = 0;
        for completion in &completions[..count] {
            let success = completion.status == 0;
            if completion.wr_id & RECEIVE == 0 {
                stream.sent(completion.wr_id, success);
            } else if !success {
                stream.broken();
            } else {
                receives += 1;
                if completion.wc_flags & WITH_IMM == 0 {
                    stream.broken();
                } else if let Err(violation) = stream.received(u32::from_be(completion.imm_data)) {
                    crate::entry::note("rsocket\0", libc::EPROTO, violation.to_string());
                }
            }
        }
        if stream.phase() == Phase::Connected
            && self.post_receives(receives).is_err()
            && let Some(stream) = self.stream.as_mut()
        {
            stream.broken();
        }
        count > 0
    }

    fn post_receives(&mut self, mut count: usize) -> Call<()> {
        while count > 0 {
            let now = count.min(BATCH);
            let empty = ibv_recv_wr { wr_id: RECEIVE, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
            let mut list = [empty; BATCH];
            let start = list.as_mut_ptr();
            for at in 1..now {
                // SAFETY: both are elements.
                unsafe { (*start.add(at - 1)).next = start.add(at) };
            }
            let mut bad = ptr::null_mut();
            let qp = self.qp();
            // SAFETY: a live queue pair; a list that lives during the call.
            check(unsafe {
                let post = (*(*qp).context).ops.post_recv.expect("libibverbs fills its table");
                post(qp, start, &raw mut bad)
            })?;
            count -= now;
        }
        Ok(())
    }

    /// From now on the descriptor becomes readable with the next completion.
    pub(super) fn arm(&mut self) {
        self.completions.arm();
    }

    /// The descriptor was readable: takes the event, if nobody was faster.
    pub(super) fn disarm(&mut self) {
        self.completions.disarm();
    }
}

/// Sending.
impl Endpoint {
    fn qp(&self) -> *mut ferroce_abi::ibv_qp {
        // SAFETY: set by `Endpoint::new`, cleared when it is dropped.
        unsafe { (*self.id().as_ptr()).qp }
    }

    /// Posts credits and the like, as far as there is room.
    pub(super) fn post_controls(&mut self) {
        while let Some(post) = self.stream.as_mut().and_then(Stream::next_control) {
            self.post(&post, &mut Gather::empty());
        }
    }

    /// Takes what the peer has written for us to send to.
    pub(super) fn look_for_target(&mut self) {
        if let Some(stream) = self.stream.as_mut()
            && let Some(entry) = stream.target_entry()
            && stream.take_target(self.tables.target(entry))
        {
            self.tables.clear_target(entry);
        }
    }

    /// Can the program send?
    pub(super) fn has_room(&mut self) -> bool {
        self.look_for_target();
        self.stream.as_ref().is_some_and(Stream::has_room)
    }

    /// Sends the program's next bytes, at most `longest`: how many. None: there is no room.
    pub(super) fn write(&mut self, data: &mut Gather<'_>, longest: u32) -> Option<usize> {
        self.look_for_target();
        let before = data.left();
        let post = self.stream.as_mut()?.write(before, longest)?;
        self.post(&post, data);
        Some(before - data.left())
    }

    /// Sends a mapping. False: there is no room.
    pub(super) fn map(&mut self, index: u16, iomap: Iomap) -> bool {
        let Some(post) = self.stream.as_mut().and_then(|stream| stream.map(index, iomap)) else { return false };
        self.post(&post, &mut Gather::empty());
        true
    }

    /// What the peer has mapped at an offset.
    pub(super) fn mapping(&self, offset: u64) -> Option<Iomap> {
        self.tables.mapping(offset)
    }

    /// As [`Endpoint::write`], to an offset of a mapping.
    pub(super) fn write_mapped(
        &mut self,
        data: &mut Gather<'_>,
        longest: u32,
        iomap: &Iomap,
        offset: u64,
    ) -> Option<usize> {
        let before = data.left();
        let post = self.stream.as_mut()?.write_mapped(before, longest, iomap, offset)?;
        self.post(&post, data);
        Some(before - data.left())
    }

    /// What cannot be posted breaks the stream, as if it had failed on its way.
    fn post(&mut self, post: &Post, data: &mut Gather<'_>) {
        let bytes;
        let none = ibv_sge { addr: 0, length: 0, lkey: 0 };
        let own = |start: *const u8, len: u32| ibv_sge { addr: start.expose_provenance() as u64, length: len, lkey: 0 };
        let mut copied;
        let (mut list, count, flags) = match post.source {
            Source::Nothing => ([none; 2], 0, 0),
            Source::Bytes(given, len) => {
                bytes = given;
                ([own(bytes.as_ptr(), len as u32), none], 1, INLINE)
            }
            Source::Inline(len) => {
                let start = match data.contiguous(len as usize) {
                    Some(start) => start,
                    None => {
                        copied = vec![0; len as usize];
                        data.copy_to(&mut copied);
                        copied.as_ptr()
                    }
                };
                ([own(start, len), none], 1, INLINE)
            }
            Source::Ring([first, second]) => {
                self.fill(first, data);
                self.fill(second, data);
                ([self.send.sge(first), self.send.sge(second)], 1 + c_int::from(second.len > 0), 0)
            }
        };
        // SAFETY: integers and pointers, for which zero is a value.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = post.id;
        request.sg_list = list.as_mut_ptr();
        request.num_sge = count;
        request.send_flags = flags | SIGNALED;
        request.opcode = if post.imm.is_some() { wr::RDMA_WRITE_WITH_IMM } else { wr::RDMA_WRITE };
        request.imm_data = post.imm.unwrap_or(0).to_be();
        request.wr = ibv_send_wr_operands { rdma: ibv_wr_rdma { remote_addr: post.remote, rkey: post.key } };
        let mut bad = ptr::null_mut();
        let qp = self.qp();
        // SAFETY: a live queue pair; a request whose list and inline bytes live during the call. Other bytes are in the send buffer, which
        // outlives the queue pair.
        let result = unsafe {
            let send = (*(*qp).context).ops.post_send.expect("libibverbs fills its table");
            send(qp, &raw mut request, &raw mut bad)
        };
        if result != 0
            && let Some(stream) = self.stream.as_mut()
        {
            stream.sent(post.id, false);
        }
    }

    fn fill(&self, span: Span, data: &mut Gather<'_>) {
        let place = self.send.place(span);
        // SAFETY: a place of the send buffer, which nobody reads before the work request is posted.
        data.copy_to(unsafe { std::slice::from_raw_parts_mut(place, span.len as usize) });
    }
}

/// Receiving.
impl Endpoint {
    /// Copies unread bytes, after `skip` of them, to `to`: how many.
    ///
    /// # Safety
    ///
    /// `to` is room for `len` bytes.
    pub(super) unsafe fn copy_unread(&mut self, skip: u32, to: *mut u8, len: usize) -> usize {
        let Some(stream) = self.stream.as_ref() else { return 0 };
        let mut done = 0;
        while done < len
            && let Some(mut span) = stream.next_data(skip + done as u32)
        {
            span.len = u32::try_from(len - done).unwrap_or(u32::MAX).min(span.len);
            // SAFETY: no more than `len` bytes in all.
            unsafe { self.receive.copy_out(span, to.add(done)) };
            done += span.len as usize;
        }
        done
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Nobody reads or writes the buffers afterwards.
        qp::destroy(self.id());
    }
}

/// Gives how long payload may be that goes inline.
fn create_qp(id: &IdObject, cq: *mut ibv_cq, send_queue: u16, receive_queue: u16, inline: u16) -> Call<u32> {
    // SAFETY: integers and pointers, for which zero is a value.
    let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
    init.send_cq = cq;
    init.recv_cq = cq;
    init.qp_type = QPT_RC as u32;
    init.cap.max_send_wr = send_queue.into();
    init.cap.max_recv_wr = receive_queue.into();
    init.cap.max_send_sge = 2;
    init.cap.max_recv_sge = 1;
    // What the stream says by itself goes inline always.
    init.cap.max_inline_data = u32::from(inline).max(IOMAP_LEN as u32);
    qp::create(id, ptr::null_mut(), &mut init)?;
    Ok(if inline == 0 { 0 } else { init.cap.max_inline_data })
}
