//! The host of one queue pair of a replayed machine.

use std::collections::VecDeque;

use ferroce_transport::{
    Access, AtomicOp, Completion, Count, Drop, Host, Memory, MemoryError, Payload, QpEvent, RecvWr, Sge, Span, Train,
    Window, WindowSignal,
};
use ferroce_wire::Headers;

use super::memory::NodeMemory;

/// What the host keeps for one queue pair.
#[derive(Default)]
pub(crate) struct Queues {
    /// Receives that wait.
    pub(crate) receives: VecDeque<RecvWr>,
    /// Completions of send requests, in order.
    pub(crate) sends: Vec<Completion>,
    /// Completions of receives, in order.
    pub(crate) received: Vec<Completion>,
    /// Send requests that are complete, signalled or not.
    pub(crate) released: u32,
    /// Times that the peer was asked what it has.
    pub(crate) probes: u32,
}

/// The host, lent to a queue pair for one call.
pub(crate) struct QpHost<'a> {
    /// The machine's memory.
    pub(crate) memory: &'a mut NodeMemory,
    /// The queue pair's own.
    pub(crate) queues: &'a mut Queues,
    /// The requester may send. The windows are the brake by which the replay lets request packets out one at a time.
    pub(crate) open: bool,
}

impl Memory for QpHost<'_> {
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        self.memory.resolve_local(pd, sge, write)
    }

    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        self.memory.resolve_remote(pd, rkey, va, len, access)
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        Memory::load(self.memory, span, into)
    }

    fn store(&mut self, span: Span, data: &[u8], last: bool) -> Result<(), MemoryError> {
        self.memory.store(span, data, last)
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        self.memory.atomic(span, op)
    }

    fn invalidate(&mut self, pd: u32, rkey: u32, qpn: u32) -> Result<(), MemoryError> {
        self.memory.invalidate(pd, rkey, qpn)
    }
}

impl Host for QpHost<'_> {
    fn pop_recv(&mut self) -> Option<RecvWr> {
        self.queues.receives.pop_front()
    }

    fn complete_send(&mut self, completion: Completion) {
        self.queues.sends.push(completion);
    }

    fn release_send(&mut self, count: u32) {
        self.queues.released += count;
    }

    fn complete_recv(&mut self, completion: Completion) {
        self.queues.received.push(completion);
    }

    fn event(&mut self, _event: QpEvent) {}

    fn drop_packet(&mut self, _reason: Drop) {}

    fn count(&mut self, what: Count, n: u32) {
        if what == Count::ProbeSent {
            self.queues.probes += n;
        }
    }

    fn window(&mut self, _window: Window) -> u32 {
        if self.open { u32::MAX } else { 0 }
    }

    fn window_take(&mut self, _window: Window, _bytes: u32) {}

    fn window_return(&mut self, _window: Window, _bytes: u32, _signal: WindowSignal) {}
}

/// A packet that a queue pair sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    /// Its headers.
    pub(crate) headers: Headers,
    /// Its payload without pad.
    pub(crate) payload: Vec<u8>,
}

/// Cuts a train into packets, as a link does.
pub(crate) fn packets(train: &Train, memory: &NodeMemory) -> Vec<Sent> {
    let payload = payload(train, memory);
    let mut rest = &payload[..];
    let packets = (0..train.packets).map(|index| {
        let last = index + 1 == train.packets;
        let headers = match (index, &train.tail) {
            (0, _) => train.head,
            (_, Some(tail)) if last => *tail,
            _ => {
                let mut bth = train.head.bth;
                (bth.opcode, bth.psn) = (train.body, bth.psn.add(index));
                Headers::new(bth)
            }
        };
        assert!(headers.matches_opcode(), "the extended headers are those of the opcode");
        let (payload, later) = rest.split_at(if last { rest.len() } else { train.mtu as usize });
        rest = later;
        Sent { headers, payload: payload.to_vec() }
    });
    packets.collect()
}

fn payload(train: &Train, memory: &NodeMemory) -> Vec<u8> {
    let bytes = match &train.payload {
        Payload::Gather(spans) => spans.iter().flat_map(|span| read(memory, *span)).copied().collect(),
        Payload::Copy(span) | Payload::Lent(span) => read(memory, *span).to_vec(),
        Payload::Inline(bytes, start) => bytes[*start as usize..][..train.len as usize].to_vec(),
    };
    assert_eq!(bytes.len(), train.len as usize, "a train has the payload that it says");
    bytes
}

fn read(memory: &NodeMemory, span: Span) -> &[u8] {
    if span.len == 0 { &[] } else { memory.read(span.addr, span.len as usize) }
}
