//! A lane: what a hardware queue is to a card.
//!
//! One lock guards everything that a packet can touch. It is never waited for on the data path: who does not get it leaves a
//! doorbell, and whoever holds it looks at the doorbells again after letting go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use ferroce_core::flow::{FlowId, FlowRule};
use ferroce_core::{AsyncEvent, CoreError, KeyTable};
use ferroce_link::Link;
use ferroce_link::ring::WakeSocket;
use ferroce_transport::{Nanos, QpAttr, QpAttrMask, QpState};
use parking_lot::MutexGuard;

use crate::clock;
use crate::counters::CounterSnapshot;
use crate::gate::Gate;
use crate::groups::Group;
use crate::progress;
use crate::queue_pair::{QueuePair, QueuePairInit};
use crate::raw::RawSleep;
use crate::relay::Relay;
use crate::rings::{Asked, RingSleep, Rings};
use crate::run::{LaneState, Turn};
use crate::sleeper::Sleeper;
use crate::spin::Spin;

pub use ferroce_wire::LANE_SHIFT;

/// Queue pairs that a lane can hold.
pub const SLOTS_PER_LANE: u32 = 1 << LANE_SHIFT;

/// One in so many of a polling program's turns looks at the relay.
const POLLS_PER_RELAY: u64 = 64;
/// So long a program that polls in vain stays awake on a crowded core.
const POLL_AWAKE_NS: u64 = 20_000;
/// What is told to who wants something of a lane that has ended.
pub(crate) const FAILED: &str = "the card has failed: open the device anew";
/// "No deadline" in `deadline`.
const NEVER: u64 = u64::MAX;

/// What the progress thread is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Progress {
    /// Running, or napping for a fraction of a millisecond because the program is active.
    Awake,
    /// Asleep until something happens to the lane.
    OnDuty,
    /// Asleep until somebody wakes it: an attendant looks after the lane.
    Relieved,
}

/// What the running thread needs besides the locked state.
#[derive(Debug)]
pub(crate) struct LaneShared {
    pub(crate) number: u16,
    pub(crate) keys: Arc<KeyTable>,
}

/// A lane of the card.
#[derive(Debug)]
pub struct Lane {
    shared: LaneShared,
    state: Gate<LaneState>,
    /// Counts the program's polls, so that the progress thread sees whether it still polls.
    polls: AtomicU64,
    /// When the program last turned the lane.
    last_turn: AtomicU64,
    /// The progress thread.
    progress_sleeper: Sleeper,
    /// A program thread that waits for a completion event and looks after the lane meanwhile.
    attendant: Sleeper,
    /// The attendant's seat is taken.
    attended: AtomicBool,
    /// What attendants learned about their waits.
    attendant_spin: Spin,
    /// What programs that poll in vain learned about the core they run on.
    poller_spin: Spin,
    /// What the progress thread is at: a [`Progress`].
    progress: AtomicU8,
    /// When the lane next needs a turn without a packet.
    deadline: AtomicU64,
    sleep_fds: Vec<OwnedFd>,
    /// What sleepers need of the rings.
    rings: Option<Arc<RingSleep>>,
    /// What sleepers need of RAW_PACKET queue pairs.
    raw: Arc<RawSleep>,
    /// Which of all these descriptors are not to be slept on any more, by place.
    hung_up: AtomicU64,
    closed: AtomicBool,
}

impl Lane {
    /// Opens a lane and starts its progress thread. `sleep_fds` become readable when the link or the relay has packets. With `wake`
    /// (and a relay) the lane makes and takes rings to lanes of other processes on this host.
    ///
    /// # Errors
    /// No descriptor or no thread to be had.
    pub fn open(
        number: u16,
        seed: u64,
        keys: Arc<KeyTable>,
        link: Box<dyn Link>,
        relay: Option<Box<dyn Relay>>,
        sleep_fds: Vec<OwnedFd>,
        wake: Option<WakeSocket>,
    ) -> std::io::Result<Arc<Lane>> {
        let ring_sleep = wake.map(|socket| Arc::new(RingSleep::new(socket)));
        let rings = ring_sleep.clone().map(|sleep| Rings::new(number, sleep));
        let raw = Arc::new(RawSleep::default());
        let lane = Arc::new(Lane {
            shared: LaneShared { number, keys },
            state: Gate::new(LaneState::new(link, relay, rings, Arc::clone(&raw), seed)),
            polls: AtomicU64::new(0),
            last_turn: AtomicU64::new(0),
            progress_sleeper: Sleeper::new()?,
            attendant: Sleeper::new()?,
            attended: AtomicBool::new(false),
            attendant_spin: Spin::default(),
            poller_spin: Spin::default(),
            progress: AtomicU8::new(Progress::Awake as u8),
            deadline: AtomicU64::new(NEVER),
            sleep_fds,
            rings: ring_sleep,
            raw,
            hung_up: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        progress::spawn(&lane)?;
        Ok(lane)
    }

    /// Its number: the upper ten bits of its queue pair numbers.
    pub fn number(&self) -> u16 {
        self.shared.number
    }

    /// What all its queue pairs counted, those that are gone included, and its strays.
    pub fn counters(&self) -> CounterSnapshot {
        self.look(|state| state.counters())
    }

    /// What its link counted.
    pub fn link_stats(&self) -> ferroce_link::LinkStats {
        self.look(|state| state.link_stats())
    }

    /// Ends the progress thread, and all that packets and programs could do to the lane. Queue pairs still open make no more progress.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.progress_sleeper.wake();
    }

    /// Makes a queue pair in RESET.
    ///
    /// # Errors
    /// ENOMEM: all numbers of the lane are taken. EPERM: frames (RAW_PACKET) are not for this process. EIO: the card has failed.
    pub fn create_qp(self: &Arc<Self>, init: QueuePairInit) -> Result<Arc<QueuePair>, CoreError> {
        self.locked(|state| {
            let slot = state.take_slot(&init)?;
            let qpn = u32::from(self.shared.number) << LANE_SHIFT | u32::from(slot);
            let qp = Arc::new(QueuePair::new(slot, qpn, init, Arc::clone(self)));
            state.insert(Arc::clone(&qp));
            Ok(qp)
        })?
    }

    pub(crate) fn destroy(&self, qp: &QueuePair) {
        // In a lane that has ended nothing touches it any more.
        let _ = self.locked(|state| {
            // An ACK that waited for the program's answer goes out now: the peer must not wait in vain.
            state.run(&self.shared, clock::now(), Turn::POST, &self.state.take_bells());
            state.remove(&self.shared, qp);
        });
    }

    pub(crate) fn modify(&self, qp: &QueuePair, attr: &QpAttr, mask: QpAttrMask) -> Result<(), CoreError> {
        self.locked(|state| {
            // Requests posted and ACKs owed before this call belong to the old state.
            state.run(&self.shared, clock::now(), Turn::POST, &self.state.take_bells());
            state.modify(&self.shared, qp, attr, mask)
        })?
    }

    pub(crate) fn attach(&self, qp: &QueuePair, group: Group) -> Result<(), CoreError> {
        self.locked(|state| state.attach(qp, group))?
    }

    pub(crate) fn detach(&self, qp: &QueuePair, group: Group) -> Result<(), CoreError> {
        self.locked(|state| state.detach(qp, group))?
    }

    pub(crate) fn add_flow(&self, qp: &QueuePair, rule: FlowRule) -> Result<FlowId, CoreError> {
        let added = self.locked(|state| state.add_flow(qp, rule))?;
        // It may be the first: who sleeps does not know its socket yet.
        self.progress_sleeper.wake();
        self.attendant.wake();
        added
    }

    pub(crate) fn remove_flow(&self, qp: &QueuePair, id: FlowId) -> Result<(), CoreError> {
        self.locked(|state| state.remove_flow(qp, id))?
    }

    /// Sees to it that there is a ring to a lane, and waits a moment for the peer to take it. False: packets go over the link.
    pub(crate) fn make_ring(&self, lane: u16, lease: u64) -> bool {
        loop {
            match self.locked(|state| state.ask_for_ring(lane, lease)) {
                Ok(Asked::Ready) => return true,
                Ok(Asked::No) | Err(_) => return false,
                // The answer comes by the relay.
                Ok(Asked::Offered) => {
                    progress::doze(self);
                    self.run_if_free(Turn::PROGRESS);
                }
            }
        }
    }

    pub(crate) fn query(&self, qp: &QueuePair) -> Result<QpAttr, CoreError> {
        self.look(|state| state.query(qp))
    }

    /// From now on the payload of large WRITEs of other processes on this host is fetched from where it is, by one copy instead of two. Only for
    /// who trusts these processes (see [`ferroce_link::ring::Loan`]).
    ///
    /// # Errors
    /// EIO: the lane has ended.
    pub fn borrow(&self) -> Result<(), CoreError> {
        self.locked(LaneState::borrow)
    }

    /// Waits until no thread is inside the lane, and takes back what peers were lent: what was resolved before is no longer in use.
    pub fn quiesce(&self) {
        self.look(LaneState::recall);
    }

    /// Waits for the lock, runs `change`, and answers the doorbells of those who did not wait for it meanwhile.
    ///
    /// # Errors
    /// EIO: the lane has ended.
    fn locked<R>(&self, change: impl FnOnce(&mut LaneState) -> R) -> Result<R, CoreError> {
        let state = self.state.lock();
        if self.is_closed() {
            return Err(CoreError::new(libc::EIO, FAILED));
        }
        let mut held = Held::new(self, state);
        let result = change(&mut held.state);
        held.leave();
        self.run_if_free(Turn::POST);
        Ok(result)
    }

    /// The same for who changes nothing: that can be done in a lane that has ended, too.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&LaneState) -> R) -> R {
        let state = self.state.lock();
        let result = look(&state);
        drop(state);
        self.run_if_free(Turn::POST);
        result
    }

    pub(crate) fn ring(&self, qp: &QueuePair) {
        if !qp.bell.swap(true, Ordering::AcqRel) {
            self.state.ring(qp.slot);
        }
        self.run_if_free(Turn::POST);
    }

    /// Sends what is owed, in a process that is about to end.
    pub fn settle(&self) {
        self.run_if_free(Turn::POST);
    }

    /// One turn for a polling program: packets, timers, doorbells, transmission. Does nothing if another thread is at it.
    pub fn turn(&self) {
        let polls = self.polls.fetch_add(1, Ordering::Relaxed);
        self.run_if_free(if polls.is_multiple_of(POLLS_PER_RELAY) { Turn::PROGRAM_ALL } else { Turn::PROGRAM });
    }

    /// For a program that polls in vain: lets others have the core. Where they take it for long, whoever yields waits for all of them,
    /// while a sleeper runs as soon as there is something for it: so the program's thread takes the seat of the attendant for a nap,
    /// when the answer of a peer on another core should have come. `nothing_since` tells since when no completion queue had anything
    /// on such a core; 0: it is not known.
    pub(crate) fn give_way(&self, nothing_since: &AtomicU64) {
        if self.poller_spin.offer_core() {
            return;
        }
        let (now, since) = (clock::now(), nothing_since.load(Ordering::Relaxed));
        if since == 0 {
            nothing_since.store(now, Ordering::Relaxed);
        } else if now.saturating_sub(since) < POLL_AWAKE_NS {
            // Stays awake.
        } else if self.sit_down() {
            progress::nap(self, self.attendant());
            self.wake_up();
            self.vacate();
        } else {
            // Another thread looks after the lane, and sleeps or naps already.
            std::thread::yield_now();
        }
    }

    /// For a program thread that waits for a completion event: takes the seat of the attendant if it is free.
    pub(crate) fn sit_down(&self) -> bool {
        if self.attended.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.progress() == Progress::OnDuty {
            self.progress_sleeper.wake();
        }
        true
    }

    /// For the attendant: waits awake for a moment, if that is worth while. Tells whether what it waits for came.
    pub(crate) fn spin(&self, is_there: &dyn Fn() -> bool) -> bool {
        self.attendant_spin.wait(|| {
            self.run_if_free(Turn::PROGRAM);
            is_there()
        })
    }

    /// For the attendant after its sleep: one more look.
    pub(crate) fn wake_up(&self) {
        self.rise(&self.attendant);
        self.run_if_free(Turn::PROGRAM_ALL);
    }

    /// The attendant goes after so many nanoseconds: the lane is the progress thread's again.
    pub(crate) fn stand_up(&self, waited: u64) {
        self.attendant_spin.learn(waited);
        self.vacate();
    }

    fn vacate(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.attended.store(false, Ordering::SeqCst);
        if self.progress() == Progress::Relieved {
            self.progress_sleeper.wake();
        }
    }

    pub(crate) fn attendant(&self) -> &Sleeper {
        &self.attendant
    }

    /// The other end of a descriptor to sleep on is gone for good (the service's relay after the service): it would wake us without end.
    pub(crate) fn note_hung_up(&self, place: usize) {
        if let Some(bit) = u32::try_from(place).ok().and_then(|place| 1u64.checked_shl(place)) {
            self.hung_up.fetch_or(bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_hung_up(&self, place: usize) -> bool {
        let bit = u32::try_from(place).ok().and_then(|place| 1u64.checked_shl(place));
        bit.is_some_and(|bit| self.hung_up.load(Ordering::Relaxed) & bit != 0)
    }

    pub(crate) fn is_attended(&self) -> bool {
        self.attended.load(Ordering::SeqCst)
    }

    /// After a broken invariant: the card is dead.
    pub(crate) fn fail(&self) {
        self.fail_holding(&self.state.lock());
    }

    /// Ends the lane, and tells every context that has a queue pair here.
    fn fail_holding(&self, state: &LaneState) {
        if self.is_closed() {
            return;
        }
        log::error!("lane {} ended by a broken invariant: this is a fault of Ferroce", self.shared.number);
        self.close();
        for events in state.event_queues() {
            events.push(AsyncEvent::DeviceFatal);
        }
    }

    pub(crate) fn set_progress(&self, progress: Progress) {
        self.progress.store(progress as u8, Ordering::SeqCst);
    }

    fn progress(&self) -> Progress {
        match self.progress.load(Ordering::SeqCst) {
            0 => Progress::Awake,
            1 => Progress::OnDuty,
            2 => Progress::Relieved,
            other => unreachable!("progress {other} was never stored"),
        }
    }

    pub(crate) fn progress_sleeper(&self) -> &Sleeper {
        &self.progress_sleeper
    }

    /// One turn for the progress thread. Tells whether packets came.
    pub(crate) fn turn_blocking(&self) -> bool {
        self.run_if_free(Turn::PROGRESS)
    }

    /// One of many turns for the progress thread while it waits awake.
    pub(crate) fn turn_awake(&self) -> bool {
        self.run_if_free(Turn::PROGRESS_AWAKE)
    }

    /// After [`progress::announce`] and a sleep, if there was one: it is over.
    pub(crate) fn rise(&self, sleeper: &Sleeper) {
        sleeper.rise();
        if let Some(rings) = &self.rings {
            rings.rise();
        }
    }

    /// One turn if no other thread is at it. Tells whether packets came.
    fn run_if_free(&self, turn: Turn) -> bool {
        let mut turn = turn;
        let mut came = false;
        self.state.run_if_free(|state| {
            let bells = self.state.take_bells();
            if self.is_closed() {
                return;
            }
            let now = clock::now();
            if turn.is_of_program() {
                self.last_turn.store(now, Ordering::Relaxed);
            }
            let mut held = Held::new(self, state);
            came |= held.state.run(&self.shared, now, turn, &bells);
            held.leave();
            turn = Turn::POST;
        });
        came
    }

    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// When the program last turned the lane; 0: never.
    pub(crate) fn last_turn(&self) -> Nanos {
        self.last_turn.load(Ordering::Relaxed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn next_deadline(&self) -> Option<u64> {
        Some(self.deadline.load(Ordering::SeqCst)).filter(|deadline| *deadline != NEVER)
    }

    /// What becomes readable when the link, the relay or, during a sleep that it knows of, a ring has packets, or a device frames.
    pub(crate) fn sleep_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sleep_fds.iter().map(AsFd::as_fd).chain(self.rings.iter().map(|rings| rings.fd())).chain(self.raw.fd())
    }

    pub(crate) fn ring_sleep(&self) -> Option<&RingSleep> {
        self.rings.as_deref()
    }
}

/// The locked state in the hands of who changes it. A panic leaves it half changed: then the lane ends before anybody else gets it.
struct Held<'a> {
    lane: &'a Lane,
    state: MutexGuard<'a, LaneState>,
    sound: bool,
}

impl<'a> Held<'a> {
    fn new(lane: &'a Lane, state: MutexGuard<'a, LaneState>) -> Held<'a> {
        Held { lane, state, sound: false }
    }

    /// Lets go of the lane and wakes who looks after it if they would oversleep.
    fn leave(mut self) {
        let (lane, deadline) = (self.lane, self.state.next_deadline().unwrap_or(NEVER));
        lane.deadline.store(deadline, Ordering::SeqCst);
        self.sound = true;
        drop(self);
        lane.progress_sleeper.mind(deadline);
        lane.attendant.mind(deadline);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.sound {
            self.lane.fail_holding(&self.state);
        }
    }
}

/// A queue pair that left RESET keeps its number out of use until it is destroyed.
pub(crate) fn is_connected(state: QpState) -> bool {
    !matches!(state, QpState::Reset | QpState::Init)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sleeper::tests::is_woken;

    #[test]
    fn who_polls_on_a_crowded_core_naps_in_the_attendants_seat() {
        let lane = crate::run::tests::idle_lane();
        lane.poller_spin.found_crowded(clock::now() + 60_000_000_000);
        let (polls, since) = (lane.polls(), AtomicU64::new(0));
        lane.give_way(&since);
        assert_ne!(since.load(Ordering::Relaxed), 0, "from now on");
        since.store(clock::now() + 60_000_000_000, Ordering::Relaxed);
        lane.give_way(&since);
        assert_eq!(lane.polls(), polls, "the answer may still come while it is awake");
        since.store(1, Ordering::Relaxed);
        lane.give_way(&since);
        assert!(lane.polls() >= polls + 2, "sat down and went");
        assert!(!lane.is_attended());
        assert!(lane.sit_down(), "somebody else's seat");
        lane.give_way(&since);
        assert!(lane.is_attended());
        assert!(!is_woken(lane.attendant()), "nothing is left of the nap");
        lane.close();
    }
}
