//! Counters of flows (`ibv_create_counters(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::CoreError;
use crate::sync::Mutex;

/// What is counted: `enum ibv_counter_description`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Frames.
    Packets,
    /// Their bytes, without the checksum.
    Bytes,
}

/// Places at which counters can be shown.
const POINTS_MAX: usize = 1_024;

/// Counts the frames of the flows that are made with it, all in one. They count from its creation on, and only go up.
#[derive(Debug, Default)]
pub struct FlowCounters {
    points: Mutex<Vec<(CounterKind, u32)>>,
    packets: AtomicU64,
    bytes: AtomicU64,
    /// Flows that it counts for.
    flows: AtomicU32,
}

impl FlowCounters {
    /// Counters that show nothing yet.
    pub fn new() -> FlowCounters {
        FlowCounters::default()
    }

    /// Shows a counter at place `index` of what is read. Several at one place are added up.
    ///
    /// # Errors
    /// EBUSY: it counts for a flow already. ENOMEM: too many.
    pub fn attach(&self, kind: CounterKind, index: u32) -> Result<(), CoreError> {
        let mut points = self.points.lock();
        let flows = self.flows();
        if flows > 0 {
            return Err(CoreError::new(libc::EBUSY, format!("the counters count for {flows} flows already")));
        }
        if points.len() >= POINTS_MAX {
            return Err(CoreError::new(libc::ENOMEM, format!("the counters have {POINTS_MAX} places already")));
        }
        points.push((kind, index));
        Ok(())
    }

    /// Puts the present values in their places; others are 0.
    ///
    /// # Errors
    /// EINVAL: a counter's place is not among these.
    pub fn read(&self, values: &mut [u64]) -> Result<(), CoreError> {
        values.fill(0);
        let (packets, bytes) = (self.packets.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        for (kind, index) in &*self.points.lock() {
            let count = values.len();
            let value = values.get_mut(*index as usize).ok_or_else(|| {
                CoreError::new(libc::EINVAL, format!("ncounters is {count}: a counter was attached at index {index}"))
            })?;
            *value = value.wrapping_add(match kind {
                CounterKind::Packets => packets,
                CounterKind::Bytes => bytes,
            });
        }
        Ok(())
    }

    /// Flows that it counts for.
    pub fn flows(&self) -> u32 {
        self.flows.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        self.packets.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The counters of a rule, which they know of as long as it is there.
#[derive(Debug)]
pub(super) struct Counting(Arc<FlowCounters>);

impl Counting {
    pub(super) fn begin(counters: &Arc<FlowCounters>) -> Counting {
        counters.flows.fetch_add(1, Ordering::Relaxed);
        Counting(Arc::clone(counters))
    }

    pub(super) fn count(&self, bytes: usize) {
        self.0.count(bytes);
    }
}

impl Clone for Counting {
    fn clone(&self) -> Self {
        Counting::begin(&self.0)
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.0.flows.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The same counters, not such that have counted as much.
impl PartialEq for FlowCounters {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for FlowCounters {}

impl PartialEq for Counting {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Counting {}
