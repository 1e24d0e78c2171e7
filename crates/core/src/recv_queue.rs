//! Receive queues: where receive requests wait for messages.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::Mutex;
use ferroce_transport::RecvWr;

use crate::error::CoreError;
use crate::limits;

/// Receive requests in the order they were posted. Any thread may post; the lane of the queue pair pops.
#[derive(Debug)]
pub struct RecvQueue {
    max_sge: u32,
    requests: Mutex<Requests>,
    /// Copy of the queue's length, to be read without the lock.
    len: AtomicU32,
}

#[derive(Debug)]
struct Requests {
    queue: VecDeque<RecvWr>,
    max_wr: u32,
}

/// Requests that a new queue has room for before it allocates again.
const FIRST_ALLOCATION: u32 = 256;

impl RecvQueue {
    /// A queue for `max_wr` outstanding requests of at most `max_sge` elements each.
    ///
    /// # Errors
    /// EINVAL: above the device's limits.
    pub fn new(max_wr: u32, max_sge: u32) -> Result<RecvQueue, CoreError> {
        if max_wr > limits::MAX_QP_WR {
            return Err(CoreError::new(libc::EINVAL, format!("max_recv_wr {max_wr} is above {}", limits::MAX_QP_WR)));
        }
        if max_sge > limits::MAX_SGE {
            return Err(CoreError::new(libc::EINVAL, format!("max_recv_sge {max_sge} is above {}", limits::MAX_SGE)));
        }
        let queue = VecDeque::with_capacity(max_wr.min(FIRST_ALLOCATION) as usize);
        Ok(RecvQueue { max_sge, requests: Mutex::new(Requests { queue, max_wr }), len: AtomicU32::new(0) })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// EINVAL: more elements than `max_sge`. ENOMEM: `max_wr` requests wait already.
    pub fn post(&self, wr: RecvWr) -> Result<(), CoreError> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(CoreError::new(libc::EINVAL, "num_sge of a receive request is above the queue's max_sge"));
        }
        let mut requests = self.requests.lock();
        if requests.queue.len() >= requests.max_wr as usize {
            return Err(CoreError::new(
                libc::ENOMEM,
                "the receive queue is full: wait for completions before posting more, or ask for a larger max_recv_wr",
            ));
        }
        requests.queue.push_back(wr);
        self.len.store(requests.queue.len() as u32, Ordering::Release);
        Ok(())
    }

    /// Takes the oldest request.
    pub fn pop(&self) -> Option<RecvWr> {
        if self.is_empty() {
            return None;
        }
        let mut requests = self.requests.lock();
        let wr = requests.queue.pop_front();
        self.len.store(requests.queue.len() as u32, Ordering::Release);
        wr
    }

    /// Drops every request without completing it (RESET, destruction). Gives their number.
    pub fn clear(&self) -> u32 {
        let mut requests = self.requests.lock();
        let count = requests.queue.len() as u32;
        requests.queue.clear();
        self.len.store(0, Ordering::Release);
        count
    }

    /// Requests that wait.
    pub fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// No request waits. Takes no lock.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that may wait.
    pub fn max_wr(&self) -> u32 {
        self.requests.lock().max_wr
    }

    /// Elements a request may have.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Changes how many requests may wait.
    ///
    /// # Errors
    /// EINVAL: fewer than wait now.
    pub(crate) fn resize(&self, max_wr: u32) -> Result<(), CoreError> {
        let mut requests = self.requests.lock();
        if (max_wr as usize) < requests.queue.len() {
            return Err(CoreError::new(
                libc::EINVAL,
                format!("max_wr {max_wr} is below the {} requests that wait", requests.queue.len()),
            ));
        }
        requests.max_wr = max_wr;
        Ok(())
    }
}
