//! An opened device, and the card that all contexts of the process share.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ferroce_core::sync::{self, Condvar, Mutex, MutexGuard};
use ferroce_core::{AsyncEvent, AsyncQueue, CompChannel};
use ferroce_engine::{Attendance, Card, Lane, QueuePair};
use ferroce_service::client::{Client, LaneLease, StartOptions};
use ferroce_service::inspect::Inspector;
use ferroce_transport::PathAddr;
use ferroce_wire::LANE_SHIFT;

use crate::counters_file;
use crate::cq::Cq;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{self, Generation};
use crate::groups::Groups;
use crate::inspect::Inspection;
use crate::link::{self, SameHost};
use crate::objects::{self, Objects};
use crate::pd::Pd;
use crate::relay::LeaseRelay;
use crate::watch::Watch;
use crate::xrc::{Names, Xrcd, XrcdOpen};

/// The process's card. Kept for the life of the process once made: closing the last context and opening another is cheap. The lock is
/// held across a fork, so that the child finds it open; it is not held while a card is made, which takes long.
static CARD: Mutex<CardSlot> = Mutex::new(CardSlot::Empty);
/// The slot has changed.
static CARD_MADE: Condvar = Condvar::new();
/// Protection domain handles, unique in the process: keys are checked against them.
static NEXT_PD: AtomicU32 = AtomicU32::new(1);

/// Where the card is, or will be.
pub(crate) enum CardSlot {
    /// There is none.
    Empty,
    /// A thread of the process makes it. In a forked child that thread does not exist.
    Making(Generation),
    /// Here it is.
    Ready(ProcessCard),
}

pub(crate) struct ProcessCard {
    generation: Generation,
    card: Arc<Card>,
    watch: Arc<Watch>,
    /// Keeps the lease; its end gives the lane back.
    client: Client,
    neighbours: Option<Arc<Neighbours>>,
    groups: Arc<Groups>,
    objects: Arc<Objects>,
    xrc_names: Arc<Names>,
    /// Each lane's relay holds its lease.
    _leases: Vec<Arc<LaneLease>>,
}

/// An opened device (`struct ibv_context`).
#[derive(Debug)]
pub struct Context {
    device: Arc<Device>,
    card: Arc<Card>,
    /// Lanes of other processes at the same address; None: packets to them go over UDP like all others.
    neighbours: Option<Arc<Neighbours>>,
    groups: Arc<Groups>,
    events: Arc<AsyncQueue>,
    objects: Arc<Objects>,
    xrc_names: Arc<Names>,
    /// Lists it among the objects.
    _entry: objects::Entry,
    generation: Generation,
}

impl Context {
    pub(crate) fn open(device: Arc<Device>) -> Result<Arc<Context>> {
        let Parts { card, watch, neighbours, groups, objects, xrc_names } = process_card()?;
        let context = Arc::new(Context {
            _entry: objects.add_context(&device),
            objects,
            xrc_names,
            device,
            card,
            neighbours,
            groups,
            events: Arc::new(AsyncQueue::new()?),
            generation: Generation::current(),
        });
        watch.add(&context);
        Ok(context)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Was this context inherited by a fork? Then only closing it makes sense.
    pub fn is_stale(&self) -> bool {
        self.generation.is_stale()
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.generation.check()
    }

    pub(crate) fn card(&self) -> &Arc<Card> {
        &self.card
    }

    pub(crate) fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    pub(crate) fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }

    pub(crate) fn xrc_names(&self) -> &Names {
        &self.xrc_names
    }

    pub(crate) fn events(&self) -> &Arc<AsyncQueue> {
        &self.events
    }

    /// Before a queue pair is connected along `path`: if the peer is another process at the same address, its packets shall go through
    /// memory. What prevents that is no error.
    pub(crate) fn prefer_ring(&self, pair: &QueuePair, path: &PathAddr, dest_qpn: u32) {
        let (lane, own) = (dest_qpn >> LANE_SHIFT, pair.qpn() >> LANE_SHIFT);
        let Some(neighbours) = self.neighbours.as_ref().filter(|_| path.src == path.dst && lane != own) else { return };
        if let Some(lease) = u16::try_from(lane).ok().and_then(|lane| neighbours.lease_of(lane)) {
            pair.prefer_ring(dest_qpn, lease);
        }
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn alloc_pd(self: &Arc<Self>) -> Result<Arc<Pd>> {
        self.check()?;
        Ok(Pd::new(Arc::clone(self), NEXT_PD.fetch_add(1, Ordering::Relaxed)))
    }

    /// Opens an XRC domain. Its name, if it has one, is a file's; other processes that open the file get domains of their own.
    ///
    /// # Errors
    /// EINVAL: there is one already (exclusive), or one without a name is not to be made. EAGAIN: there is none and it is not to be
    /// made. Those of `dup(2)` and `fstat(2)`.
    pub fn open_xrcd(self: &Arc<Self>, open: &XrcdOpen<'_>) -> Result<Arc<Xrcd>> {
        self.check()?;
        Xrcd::open(self, open)
    }

    /// Makes a completion channel.
    ///
    /// # Errors
    /// EMFILE and the like.
    pub fn create_comp_channel(&self) -> Result<Arc<CompChannel>> {
        self.check()?;
        Ok(Arc::new(CompChannel::new()?))
    }

    /// Waits until the channel has an event or something else happened, and runs the card meanwhile: so a packet wakes the waiting
    /// thread itself. Look at the channel again afterwards.
    ///
    /// # Errors
    /// EINTR: a signal handler ran. EIO in a forked child.
    pub fn attend(&self, channel: &CompChannel) -> Result<()> {
        Ok(self.attendance(channel)?.wait()?)
    }

    /// [`Context::attend`] in parts, for who wants to sleep by himself.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn attendance<'e>(&self, channel: &'e CompChannel) -> Result<Attendance<'e>> {
        self.check()?;
        Ok(self.card.attendance(channel.as_fd(), &|| channel.is_readable()))
    }

    /// Takes the next event of a completion channel and gives the cookie of its completion queue; waits for one unless the program made
    /// the channel's descriptor non-blocking.
    ///
    /// # Errors
    /// EAGAIN: non-blocking and none is there. EIO in a forked child.
    pub fn next_completion_event(&self, channel: &CompChannel) -> Result<u64> {
        while !channel.is_nonblocking() && !channel.is_readable() {
            match self.attend(channel) {
                Err(error) if error.errno() == libc::EINTR => {}
                attended => attended?,
            }
        }
        Ok(channel.next_event()?)
    }

    /// Makes a completion queue for at least `cqe` completions. `cookie` comes back in the channel's events.
    ///
    /// # Errors
    /// EINVAL: `cqe` is 0 or above the device's limit.
    pub fn create_cq(self: &Arc<Self>, cqe: u32, channel: Option<&Arc<CompChannel>>, cookie: u64) -> Result<Arc<Cq>> {
        self.check()?;
        Cq::new(Arc::clone(self), cqe, channel.cloned(), cookie, false)
    }

    /// The same for a queue whose completions tell when they were added: in [`crate::Completion::timestamp`], by [`Context::clock`].
    ///
    /// # Errors
    /// As for [`Context::create_cq`].
    pub fn create_cq_with_timestamps(
        self: &Arc<Self>,
        cqe: u32,
        channel: Option<&Arc<CompChannel>>,
        cookie: u64,
    ) -> Result<Arc<Cq>> {
        self.check()?;
        Cq::new(Arc::clone(self), cqe, channel.cloned(), cookie, true)
    }

    /// What the card's clock shows: nanoseconds of `CLOCK_MONOTONIC`, the same for all processes of the host.
    #[allow(clippy::unused_self)] // a card's clock is asked for through a context
    pub fn clock(&self) -> u64 {
        ferroce_engine::clock_now()
    }

    /// Becomes readable when an asynchronous event waits. Belongs to the context.
    pub fn async_fd(&self) -> RawFd {
        self.events.fd()
    }

    /// Takes the next asynchronous event; blocks unless the program made the descriptor non-blocking.
    ///
    /// # Errors
    /// EAGAIN, EINTR.
    pub fn next_async_event(&self) -> Result<AsyncEvent> {
        self.check()?;
        Ok(self.events.next_event()?)
    }

    /// Takes the next asynchronous event if there is one; never sleeps.
    ///
    /// # Errors
    /// EAGAIN: there is none and the program made the descriptor non-blocking. EIO in a forked child.
    pub fn try_async_event(&self) -> Result<Option<AsyncEvent>> {
        self.check()?;
        match self.events.try_event() {
            None if self.events.is_nonblocking() => Err(Error::new(libc::EAGAIN, "no event")),
            taken => Ok(taken),
        }
    }

    /// Counters of all lanes of this process and of their links, by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut sum: Vec<(&'static str, u64)> = Vec::new();
        for lane in self.card.lanes() {
            let counters = lane.counters().into_iter().chain(lane.link_stats().iter());
            for (at, (name, value)) in counters.enumerate() {
                match sum.get_mut(at) {
                    Some(entry) => entry.1 += value,
                    None => sum.push((name, value)),
                }
            }
        }
        sum
    }
}

impl Drop for Context {
    /// With `FERROCE_COUNTERS=FILE` a process leaves its counters behind.
    fn drop(&mut self) {
        if !self.is_stale() {
            counters_file::leave(|| self.counters());
        }
    }
}

/// For the exit of the process: sends the ACKs that wait for the program's answer, and ends captures after a whole record. Waits for
/// nothing but their readers, for two seconds at most.
pub fn settle_before_exit() {
    let card = CARD.try_lock().and_then(|slot| match &*slot {
        CardSlot::Ready(process) if !process.generation.is_stale() => Some(Arc::clone(&process.card)),
        _ => None,
    });
    if let Some(card) = card {
        card.settle();
        ferroce_link::finish_captures();
    }
}

/// The process's connection to the service, which knows its lane by it; made on first use, with the card.
///
/// # Errors
/// As for opening a device.
pub fn service() -> Result<Client> {
    process_card()?;
    match &*CARD.lock() {
        CardSlot::Ready(process) if !process.generation.is_stale() => Ok(process.client.clone()),
        _ => Err(Error::stale()),
    }
}

/// Keeps the slot consistent across a fork.
pub(crate) fn hold() -> MutexGuard<'static, CardSlot> {
    CARD.lock()
}

/// The card of this process, made on first use and made anew in a forked child.
fn process_card() -> Result<Parts> {
    let now = Generation::current();
    let mut slot = CARD.lock();
    loop {
        match &*slot {
            CardSlot::Ready(process) if process.generation == now => return Ok(process.parts()),
            CardSlot::Making(generation) if *generation == now => slot = sync::wait(&CARD_MADE, slot),
            _ => break,
        }
    }
    // A forked child must not drop what it inherited: the locks in it may be held by threads that do not exist here.
    std::mem::forget(std::mem::replace(&mut *slot, CardSlot::Making(now)));
    drop(slot);
    let mut maker = Maker { made: CardSlot::Empty };
    let process = make_card(now)?;
    let parts = process.parts();
    maker.made = CardSlot::Ready(process);
    Ok(parts)
}

/// Who has announced to make the card: whatever becomes of it, those who wait are told.
struct Maker {
    made: CardSlot,
}

impl Drop for Maker {
    fn drop(&mut self) {
        *CARD.lock() = std::mem::replace(&mut self.made, CardSlot::Empty);
        CARD_MADE.notify_all();
    }
}

/// Tells under which leases the lanes of other processes are.
#[derive(Debug)]
struct Neighbours {
    client: Client,
    /// When the service was last asked in vain.
    silent_since: Mutex<Option<Instant>>,
}

impl Neighbours {
    /// The lease of a lane; None also when the service does not say.
    fn lease_of(&self, lane: u16) -> Option<u64> {
        /// So long a service is waited for: connecting queue pairs works without it.
        const PATIENCE: Duration = Duration::from_millis(500);
        /// So long one that does not answer is left alone.
        const PAUSE: Duration = Duration::from_secs(2);
        // Held until the answer, so that of many threads one waits, and the others do as it found.
        let mut silent_since = self.silent_since.lock();
        if silent_since.is_some_and(|since| since.elapsed() < PAUSE) {
            return None;
        }
        let lease = self.client.lease_of_within(lane, PATIENCE);
        *silent_since = lease.as_ref().err().map(|error| {
            log::debug!("no ring to lane {lane}: {error}");
            Instant::now()
        });
        lease.ok().flatten()
    }
}

/// What a context has of the process's card.
struct Parts {
    card: Arc<Card>,
    watch: Arc<Watch>,
    neighbours: Option<Arc<Neighbours>>,
    groups: Arc<Groups>,
    objects: Arc<Objects>,
    xrc_names: Arc<Names>,
}

impl ProcessCard {
    fn parts(&self) -> Parts {
        Parts {
            card: Arc::clone(&self.card),
            watch: Arc::clone(&self.watch),
            neighbours: self.neighbours.clone(),
            groups: Arc::clone(&self.groups),
            objects: Arc::clone(&self.objects),
            xrc_names: Arc::clone(&self.xrc_names),
        }
    }
}

fn make_card(generation: Generation) -> Result<ProcessCard> {
    counters_file::check()?;
    let client =
        Client::connect_or_start(&StartOptions { candidates: service_candidates(), ..StartOptions::default() })?;
    let mut lease = client.lease_lane()?;
    let card = Arc::new(Card::new(lease.seed()));
    let rx = lease.take_rx();
    let mut sleep_fds = rx.iter().map(|fd| fd.try_clone()).collect::<std::io::Result<Vec<_>>>()?;
    sleep_fds.push(lease.relay_fd().try_clone_to_owned()?);
    let lease = Arc::new(lease);
    let relay = Box::new(LeaseRelay { lease: Arc::clone(&lease), buffer: Vec::new() });
    let not_for_children: Vec<RawFd> =
        rx.iter().chain(&sleep_fds).map(|fd| fd.as_raw_fd()).chain(lease.not_for_children()).collect();
    let link = link::make(rx)?;
    let (keys, wake) = (Arc::clone(card.keys()), link::wake_socket()?);
    let wake_fd = wake.as_ref().map(|wake| wake.as_fd().as_raw_fd());
    let lane = Lane::open(lease.lane(), lease.seed(), keys, link, Some(relay), sleep_fds, wake)?;
    if link::same_host()? == SameHost::Fetch {
        lane.borrow()?;
    }
    card.add_lane(lane);
    let objects = Arc::new(Objects::new(generation));
    // Nobody needs to look into a program for it to work.
    let inspector = Inspector::listen(lease.lane(), lease.id()).inspect_err(|error| log::warn!("{error}")).ok();
    let inspector_fd = inspector.as_ref().map(|inspector| inspector.fd().as_raw_fd());
    let inspection = inspector.map(|inspector| Inspection::new(inspector, &card, &objects));
    let watch = Watch::start(client.clone(), inspection)?;
    let neighbours = wake_fd.map(|_| Arc::new(Neighbours { client: client.clone(), silent_since: Mutex::new(None) }));
    // Only now that they stay open for good: a number noted for a closed descriptor would close one of the program's in its child.
    fork::close_in_child(not_for_children.into_iter().chain(wake_fd).chain(inspector_fd));
    let groups = Arc::new(Groups::new(client.clone()));
    let xrc_names = Arc::default();
    Ok(ProcessCard { generation, card, watch, neighbours, groups, objects, xrc_names, client, _leases: vec![lease] })
}

/// Where `ferroced` lies relative to the file that holds this code: `lib/libibverbs.so.1` beside `bin/ferroced`, or a program
/// beside it.
fn service_candidates() -> Vec<std::path::PathBuf> {
    let Some(dir) = crate::library::path().and_then(|path| path.parent().map(std::path::Path::to_path_buf)) else {
        return Vec::new();
    };
    vec![dir.join("../bin/ferroced"), dir.join("ferroced"), dir.join("../ferroced")]
}
