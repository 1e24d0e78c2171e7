//! The RDMA side of the tests: what the client does, and what the server does beside it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use ferroce::{Completion, Qp, RecvWr, SendData, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};

use super::plan::{Extent, Measure, Progress, Test, Verb};
use super::report::{Figures, Latency};
use crate::rig::{Endpoint, Peer, Registered, status_error};

/// Messages before the first one that counts.
const WARM_UP: u64 = 50;
/// The most requests between two signalled ones.
const MAX_BATCH: u64 = 16;
/// Messages of a ping-pong between two signalled ones: what matters is the answer.
const PING_PONG_BATCH: u64 = 16;
/// Bytes in flight that a bandwidth test keeps at most, so that large messages do not queue for seconds.
const MAX_IN_FLIGHT: u64 = 16 << 20;
/// Completions taken at a time.
const POLL_BATCH: usize = 32;
/// `wr_id` of receives: no batch of sends has it.
const RECEIVE: u64 = u64::MAX;

/// One end of the test with everything set up.
pub(super) struct Load<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) qps: &'a [Arc<Qp>],
    pub(super) memory: &'a Registered,
    pub(super) peer: &'a Peer,
    /// Queue depth.
    pub(super) depth: u32,
    /// Bytes of one half of the memory: what we send lies in the first, what we get in the second.
    pub(super) half: u32,
    /// Largest inline data.
    pub(super) inline: u32,
    /// Receives posted on each queue pair.
    pub(super) receives: Vec<u32>,
}

impl Load<'_> {
    /// Fills all receive queues.
    pub(super) fn post_receives(&mut self) -> Result<()> {
        for index in 0..self.qps.len() {
            while self.receives[index] < self.depth {
                self.post_receive(index)?;
            }
        }
        Ok(())
    }

    fn post_receive(&mut self, index: usize) -> Result<()> {
        let sge = self.memory.sge(self.half as usize, self.half);
        self.qps[index].post_recv(RecvWr { wr_id: RECEIVE, sges: [sge].into_iter().collect() })?;
        self.receives[index] += 1;
        Ok(())
    }

    /// The queue pair of a completion.
    fn index_of(&self, completion: &Completion) -> Result<usize> {
        self.qps.iter().position(|qp| qp.qpn() == completion.qp_num).context("a completion of an unknown queue pair")
    }

    /// A request of `test`. Small payloads go inline where the operation allows it.
    fn request(&self, test: Test, size: u32, wr_id: u64, signaled: bool) -> SendWr {
        let area = &self.peer.area;
        let into = area.addr + u64::from(self.half);
        let (op, length, from) = match test.verb {
            Verb::Send => (SendOp::Send, size, 0),
            Verb::Write => (SendOp::Write { raddr: into, rkey: area.rkey }, size, 0),
            Verb::Read => (SendOp::Read { raddr: area.addr, rkey: area.rkey }, size, self.half),
            Verb::Atomic => (SendOp::FetchAdd { raddr: area.addr, rkey: area.rkey, add: 1 }, 8, self.half),
        };
        let inline = length <= self.inline && test.is_ping_pong();
        let data = if inline {
            SendData::Inline(self.memory.copy(0, length as usize))
        } else {
            SendData::Sges([self.memory.sge(from as usize, length)].into_iter().collect())
        };
        let mut flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
        flags.set(SendFlags::INLINE, inline);
        SendWr { wr_id, op, flags, data, ud: None, xrc_srqn: None }
    }

    /// Tells an active server that the test is over: a SEND with immediate on every queue pair.
    fn stop(&self) -> Result<()> {
        for qp in self.qps {
            let data = SendData::Sges([self.memory.sge(0, 1)].into_iter().collect());
            let op = SendOp::SendImm { imm: 0 };
            qp.post_send(SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, data, ud: None, xrc_srqn: None })?;
            qp.ring();
        }
        let mut left = self.qps.len();
        while left > 0 {
            left -= usize::from(good(self.endpoint.wait()?)?.wr_id != RECEIVE);
        }
        Ok(())
    }

    /// Client: measures one test.
    pub(super) fn measure(&mut self, test: Test, size: u32, extent: Extent) -> Result<Figures> {
        let figures = match test.measure {
            Measure::Bandwidth => {
                self.stream(test, size, Extent::Messages(WARM_UP))?;
                self.stream(test, size, extent)?
            }
            Measure::Latency => self.one_by_one(test, size, extent)?,
        };
        if is_active(test) {
            self.stop()?;
        }
        Ok(figures)
    }

    /// Keeps all send queues full. The last request of each batch is signalled; its identifier tells queue pair and length.
    fn stream(&mut self, test: Test, size: u32, extent: Extent) -> Result<Figures> {
        let depth = (MAX_IN_FLIGHT / u64::from(size) / self.qps.len() as u64).clamp(2, u64::from(self.depth));
        let batch = (depth / 4).clamp(1, MAX_BATCH);
        let mut outstanding = vec![0; self.qps.len()];
        let (mut posted, mut done) = (0, 0);
        let mut completions = [Completion::UNUSED; POLL_BATCH];
        let progress = Progress::start(extent);
        loop {
            for (index, qp) in self.qps.iter().enumerate() {
                while outstanding[index] + batch <= depth {
                    let count = progress.more(posted, batch);
                    for left in (0..count).rev() {
                        let last = left == 0;
                        qp.post_send(self.request(test, size, (index as u64) << 32 | count, last))?;
                    }
                    if count == 0 {
                        break;
                    }
                    qp.ring();
                    outstanding[index] += count;
                    posted += count;
                }
            }
            if done == posted {
                return Ok(Figures::bandwidth(done, size, progress.elapsed()));
            }
            let taken = self.endpoint.poll(&mut completions)?;
            for completion in &completions[..taken] {
                let completion = good(*completion)?;
                let (index, count) = ((completion.wr_id >> 32) as usize, completion.wr_id & 0xffff_ffff);
                outstanding[index] -= count;
                done += count;
            }
        }
    }

    /// One message after the other on the first queue pair.
    fn one_by_one(&mut self, test: Test, size: u32, extent: Extent) -> Result<Figures> {
        let mut round = 0;
        self.clear_mark(size);
        for _ in 0..WARM_UP {
            round += 1;
            self.exchange(test, size, round)?;
        }
        let mut latency = Latency::default();
        let progress = Progress::start(extent);
        while progress.more(latency.count(), 1) > 0 {
            round += 1;
            let begun = Instant::now();
            self.exchange(test, size, round)?;
            latency.add(begun.elapsed(), test.is_ping_pong());
            self.refill()?;
        }
        Ok(Figures::latency(latency, progress.elapsed()))
    }

    /// Does the message of this round ask for a completion? Of a ping-pong only some do, as of programs that care for latency.
    fn is_signaled(&self, test: Test, round: u64) -> bool {
        let batch = PING_PONG_BATCH.min(u64::from(self.depth / 2).max(1));
        !test.is_ping_pong() || round.is_multiple_of(batch)
    }

    /// Posts one request and waits for its end: for a ping-pong the answer, and the completion if it is signalled.
    fn exchange(&mut self, test: Test, size: u32, round: u64) -> Result<()> {
        let signaled = self.is_signaled(test, round);
        let qp = &self.qps[0];
        if test.verb == Verb::Write {
            self.memory.write(size as usize - 1, &[mark(round)]);
        }
        qp.post_send(self.request(test, size, 0, signaled))?;
        qp.ring();
        let (mut sent, mut answered) = (!signaled, !test.is_ping_pong());
        while !(sent && answered) {
            if test.verb == Verb::Write {
                answered = answered || self.marked(size, round);
            }
            let mut completion = [Completion::UNUSED];
            if self.endpoint.poll(&mut completion)? == 1 {
                let completion = good(completion[0])?;
                if completion.wr_id == RECEIVE {
                    self.receives[0] -= 1;
                    answered = true;
                } else {
                    sent = true;
                }
            }
        }
        Ok(())
    }

    /// Posts receives anew when half of them are used, outside of what is timed.
    fn refill(&mut self) -> Result<()> {
        while self.receives[0] <= self.depth / 2 {
            self.post_receive(0)?;
        }
        Ok(())
    }

    /// Server: plays its part until the client stops it. Passive tests need nothing: that is what one-sided means.
    pub(super) fn serve(&mut self, test: Test, size: u32) -> Result<()> {
        if !is_active(test) {
            return Ok(());
        }
        match test.measure {
            Measure::Bandwidth => self.swallow(),
            Measure::Latency => self.answer(test, size),
        }
    }

    /// Takes messages and posts receives anew.
    fn swallow(&mut self) -> Result<()> {
        let mut running = self.qps.len();
        let mut completions = [Completion::UNUSED; POLL_BATCH];
        while running > 0 {
            let taken = self.endpoint.poll(&mut completions)?;
            for completion in &completions[..taken] {
                let completion = good(*completion)?;
                let index = self.index_of(&completion)?;
                self.receives[index] -= 1;
                running -= usize::from(is_stop(&completion));
                self.post_receive(index)?;
            }
        }
        Ok(())
    }

    /// Answers each message by one of the same size.
    fn answer(&mut self, test: Test, size: u32) -> Result<()> {
        let mut round = 1;
        let mut running = self.qps.len();
        // A signalled answer was not completed yet.
        let mut in_flight = false;
        let mut received = 0;
        while running > 0 {
            let mut completion = [Completion::UNUSED];
            if self.endpoint.poll(&mut completion)? == 1 {
                let completion = good(completion[0])?;
                if completion.wr_id == RECEIVE {
                    let index = self.index_of(&completion)?;
                    self.receives[index] -= 1;
                    let stop = is_stop(&completion);
                    running -= usize::from(stop);
                    received += u64::from(!stop);
                } else {
                    in_flight = false;
                }
            }
            let arrived = match test.verb {
                Verb::Write => self.marked(size, round),
                _ => received >= round,
            };
            if arrived && !in_flight {
                if test.verb == Verb::Write {
                    self.memory.write(size as usize - 1, &[mark(round)]);
                }
                in_flight = self.is_signaled(test, round);
                self.qps[0].post_send(self.request(test, size, 0, in_flight))?;
                self.qps[0].ring();
                round += 1;
                self.refill()?;
            }
        }
        Ok(())
    }

    /// Forgets the marks of an earlier test in what we get.
    pub(super) fn clear_mark(&self, size: u32) {
        self.memory.write((self.half + size) as usize - 1, &[0]);
    }

    /// The WRITE of `round` has arrived: its last byte, which comes last, is there.
    fn marked(&self, size: u32, round: u64) -> bool {
        self.memory.byte((self.half + size) as usize - 1) == mark(round)
    }
}

/// The last byte of a WRITE of a latency test: never 0, and different from the one before.
fn mark(round: u64) -> u8 {
    (round % 255) as u8 + 1
}

/// The server has something to do in this test.
pub(super) fn is_active(test: Test) -> bool {
    test.verb == Verb::Send || (test.verb == Verb::Write && test.measure == Measure::Latency)
}

fn is_stop(completion: &Completion) -> bool {
    completion.opcode == WcOpcode::Recv && completion.flags.contains(ferroce::WcFlags::WITH_IMM)
}

fn good(completion: Completion) -> Result<Completion> {
    match completion.status {
        WcStatus::Success => Ok(completion),
        _ => bail!(status_error(&completion)),
    }
}
