//! The rings of a lane: to which lanes of other processes on this host packets go through memory.
//!
//! A ring belongs to a lease, not to a lane number, which is another process's after the first has ended. There is at most one for
//! each peer; who needs it first offers it, over the service's relay. If both do at once, the offer of the lower lane number holds.
//! Packets are taken from a ring as soon as it is offered: the peer may use it before we hear that it accepted.
//!
//! What a lane writes into its rings touches memory, a page in each at least. The memory behind that page is given back, that of the ring first
//! which was used least recently, when all rings of the lane have taken more than [`Rings::spare_max`]. Two lanes never come to that.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferroce_link::ring::{Arrival, CAPACITY, Lending, PACKET_MAX, Refusal, Ring, WakeSocket, Waker, Watch};
use ferroce_link::{LinkStats, SendError};
use ferroce_transport::{Nanos, Train};
use parking_lot::Mutex;

use crate::relay::{Relay, RingCall, RingWord};

/// How long an offer is waited for.
const ACCEPT_NS: Nanos = 10_000_000;
/// How long a peer that did not answer is left alone.
const SILENT_NS: Nanos = 1_000_000_000;
/// Bytes taken from one ring in one turn.
const RECEIVE_BYTES: usize = 128 << 10;
/// So much is shown to the peer before the flush: it can begin to read.
const SHOW_BYTES: usize = 32 << 10;
/// Memory that lanes of a host, of which each talks with each other, may have together for packets of theirs that were read, beyond one page in
/// each direction of each ring.
const SPARE_ALL: usize = 32 << 20;
/// How long nobody tries again to give memory back after rings were found that still hold packets.
const TRY_AGAIN_NS: Nanos = 50_000_000;
/// Rings that are looked at for a peer that is dead or never answered, when one is added.
const SWEEP: usize = 16;

/// Names a ring of the lane, also after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingId {
    place: usize,
    id: u64,
}

/// What [`Rings::ask`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// There is a ring.
    Ready,
    /// One was offered; ask again.
    Offered,
    /// There is none, and for now there will be none.
    No,
}

/// A ring and who is at its other end.
#[derive(Debug)]
struct Peer {
    lane: u16,
    lease: u64,
    /// Of the ring, as both ends call it.
    id: u64,
    ring: Ring,
    stage: Stage,
    /// What [`Ring::spare`] last said.
    spare: usize,
    /// When it was last written into, in trains of the lane.
    used: u64,
}

#[derive(Debug)]
enum Stage {
    /// By us, at that time; not accepted yet.
    Offered { memory: OwnedFd, at: Nanos },
    /// Both ends have it.
    Ready(Waker),
}

impl Peer {
    fn new(lane: u16, lease: u64, id: u64, ring: Ring, stage: Stage) -> Peer {
        Peer { lane, lease, id, ring, stage, spare: 0, used: 0 }
    }

    /// Brings the sum of all rings up to date.
    fn count_spare(&mut self, sum: &mut usize) {
        let spare = self.ring.spare();
        *sum = *sum - self.spare + spare;
        self.spare = spare;
    }

    fn show(&mut self, stats: &mut LinkStats) {
        if self.ring.show(stats)
            && let Stage::Ready(waker) = &self.stage
        {
            stats.ring_wakeups += 1;
            waker.wake();
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Rings {
    lane: u16,
    peers: Vec<Option<Peer>>,
    by_lane: HashMap<u16, usize>,
    sleep: Arc<RingSleep>,
    /// Places of rings with trains that their peers do not see yet.
    hidden: Vec<usize>,
    /// Place where the next sweep begins.
    sweep: usize,
    /// Bytes of memory that could be given back, of all rings.
    spare: usize,
    /// Before that time it is not tried to give any back.
    keep_until: Nanos,
    /// Trains that were written into rings.
    trains: u64,
    /// The payload of large WRITEs is fetched from who sends them.
    borrows: bool,
    scratch: Box<[u8; PACKET_MAX]>,
    stats: LinkStats,
}

impl Rings {
    pub(crate) fn new(lane: u16, sleep: Arc<RingSleep>) -> Rings {
        Rings {
            lane,
            peers: Vec::new(),
            by_lane: HashMap::new(),
            sleep,
            hidden: Vec::new(),
            sweep: 0,
            spare: 0,
            keep_until: 0,
            trains: 0,
            borrows: false,
            scratch: Box::new([0; PACKET_MAX]),
            stats: LinkStats::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_lane.is_empty()
    }

    pub(crate) fn stats(&self) -> &LinkStats {
        &self.stats
    }

    /// Counts packets whose payload could not be had from who lent it.
    pub(crate) fn count_unfetched(&mut self, count: u64) {
        self.stats.ring_rx_unfetched += count;
    }

    /// Counts a packet that came from a ring for a queue pair that has nothing to do with it.
    pub(crate) fn count_strangers(&mut self, count: u64) {
        self.stats.ring_rx_stranger += count;
    }

    /// The ring to a lane under this lease, if both ends have it.
    pub(crate) fn to(&self, lane: u16, lease: u64) -> Option<RingId> {
        let place = *self.by_lane.get(&lane)?;
        let peer = self.peers[place].as_ref().filter(|peer| peer.lease == lease && peer.ring.is_usable())?;
        matches!(peer.stage, Stage::Ready(_)).then_some(RingId { place, id: peer.id })
    }

    /// From now on the payload of large WRITEs is fetched from who sends them, where the system allows it.
    pub(crate) fn borrow(&mut self) {
        self.borrows = true;
    }

    /// Takes back what was lent through all rings.
    pub(crate) fn recall(&self) {
        self.peers.iter().flatten().for_each(|peer| peer.ring.recall());
    }

    /// For who lends memory through a ring.
    pub(crate) fn lending(&self, ring: RingId) -> Option<Lending> {
        let peer = self.peers[ring.place].as_ref().filter(|peer| peer.id == ring.id)?;
        Some(peer.ring.lending())
    }

    /// Sees to it that there is a ring to a lane, as far as that is in our hands.
    pub(crate) fn ask(&mut self, lane: u16, lease: u64, now: Nanos, relay: &mut dyn Relay) -> Asked {
        let known = self.by_lane.get(&lane).copied();
        if let Some(place) = known {
            let peer = self.peers[place].as_mut().expect("a known lane has its ring");
            if peer.lease == lease {
                return match &mut peer.stage {
                    // Another one would end like it: the peer, or this process, writes what it must not.
                    _ if !peer.ring.is_usable() => Asked::No,
                    Stage::Ready(_) => Asked::Ready,
                    Stage::Offered { at, .. } if now < *at + ACCEPT_NS => Asked::Offered,
                    Stage::Offered { at, .. } if now < *at + SILENT_NS => Asked::No,
                    Stage::Offered { at, memory } => {
                        *at = now;
                        let word = RingWord::Offer(memory.as_fd());
                        relay.tell(&RingCall { lane, lease, id: peer.id, wake: self.sleep.socket.name(), word });
                        Asked::Offered
                    }
                };
            }
        }
        match Ring::offer() {
            Ok((ring, memory)) => {
                let id = rand::random();
                let word = RingWord::Offer(memory.as_fd());
                relay.tell(&RingCall { lane, lease, id, wake: self.sleep.socket.name(), word });
                self.insert(Peer::new(lane, lease, id, ring, Stage::Offered { memory, at: now }), now);
                Asked::Offered
            }
            Err(error) => {
                log::debug!("no ring to lane {lane}: {error}");
                Asked::No
            }
        }
    }

    /// Hears what another lane has to say.
    pub(crate) fn hear(&mut self, call: RingCall<OwnedFd>, now: Nanos, relay: &mut dyn Relay) {
        let known = self.by_lane.get(&call.lane).copied();
        let known = known.filter(|place| self.peers[*place].as_ref().is_some_and(|peer| peer.lease == call.lease));
        match (&call.word, known) {
            (RingWord::Accept, Some(place)) => self.accepted(place, &call),
            (RingWord::Accept, None) => self.stats.ring_refused += 1,
            (RingWord::Offer(memory), None) => self.offered(&call, memory, now, relay),
            (RingWord::Offer(memory), Some(place)) => {
                let peer = self.peers[place].as_ref().expect("a known lane has its ring");
                match &peer.stage {
                    // It did not hear that we took it.
                    Stage::Ready(_) if peer.id == call.id => self.accept(&call, relay),
                    Stage::Ready(_) => self.stats.ring_refused += 1,
                    Stage::Offered { .. } if self.lane < call.lane => {}
                    Stage::Offered { .. } => self.offered(&call, memory, now, relay),
                }
            }
        }
    }

    fn offered(&mut self, call: &RingCall<OwnedFd>, memory: &OwnedFd, now: Nanos, relay: &mut dyn Relay) {
        // First, for a ring that was taken is there for good.
        let waker = match Waker::connect(call.wake) {
            Ok(waker) => waker,
            Err(error) => {
                log::debug!("no ring to lane {}: {error}", call.lane);
                self.stats.ring_refused += 1;
                return;
            }
        };
        match Ring::accept(memory) {
            Ok(ring) => {
                self.insert(Peer::new(call.lane, call.lease, call.id, ring, Stage::Ready(waker)), now);
                self.accept(call, relay);
            }
            Err(refusal) => {
                self.stats.ring_refused += 1;
                // That is nobody's fault: we were late.
                let level = if refusal == Refusal::Withdrawn { log::Level::Debug } else { log::Level::Warn };
                log::log!(level, "lane {} offers memory for a ring that is not taken: {refusal}", call.lane);
            }
        }
    }

    fn accept(&self, call: &RingCall<OwnedFd>, relay: &mut dyn Relay) {
        let wake = self.sleep.socket.name();
        relay.tell(&RingCall { lane: call.lane, lease: call.lease, id: call.id, wake, word: RingWord::Accept });
    }

    fn accepted(&mut self, place: usize, call: &RingCall<OwnedFd>) {
        let peer = self.peers[place].as_mut().expect("a known lane has its ring");
        match (&peer.stage, Waker::connect(call.wake)) {
            (Stage::Offered { .. }, Ok(waker)) if peer.id == call.id => peer.stage = Stage::Ready(waker),
            // Said twice, because we asked twice.
            (Stage::Ready(_), _) if peer.id == call.id => {}
            _ => self.stats.ring_refused += 1,
        }
    }

    /// Adds a ring, in place of an older one to the same lane.
    fn insert(&mut self, mut peer: Peer, now: Nanos) {
        if self.borrows {
            peer.ring.borrow();
        }
        self.sweep(now);
        if let Some(place) = self.by_lane.get(&peer.lane).copied() {
            self.remove(place);
        }
        let place = self.peers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.peers.push(None);
            self.peers.len() - 1
        });
        self.sleep.add(peer.id, peer.ring.watch());
        self.by_lane.insert(peer.lane, place);
        self.peers[place] = Some(peer);
    }

    fn remove(&mut self, place: usize) {
        if let Some(peer) = self.peers[place].take() {
            self.by_lane.remove(&peer.lane);
            self.sleep.remove(peer.id);
            self.spare -= peer.spare;
        }
    }

    /// Removes some rings whose peer has ended or did not take the offer in time, so that there are hardly more than peers alive.
    fn sweep(&mut self, now: Nanos) {
        for _ in 0..SWEEP.min(self.peers.len()) {
            self.sweep = (self.sweep + 1) % self.peers.len();
            let gone = |peer: &Peer| match &peer.stage {
                // What it left behind is read first.
                Stage::Ready(waker) => waker.is_gone() && peer.ring.is_empty(),
                // A peer that took it may use it, although its answer was lost.
                Stage::Offered { at, .. } => now >= *at + SILENT_NS && peer.ring.withdraw(),
            };
            if self.peers[self.sweep].as_ref().is_some_and(gone) {
                self.remove(self.sweep);
            }
        }
    }

    /// Writes a train into a ring. The peer sees it at once if it is much, at the latest after [`Rings::flush`]: an answer and the ACK
    /// behind it come together. Into a ring that is no more, or is another lane's, nothing goes: it is lost, as in the network.
    ///
    /// # Errors
    /// [`SendError::Fault`]: memory of the train is gone; nothing of it goes.
    pub(crate) fn send(&mut self, to: RingId, lane: u16, train: &Train) -> Result<(), SendError> {
        let peer = self.peers.get_mut(to.place).and_then(Option::as_mut);
        let Some(peer) = peer.filter(|peer| peer.id == to.id && peer.lane == lane) else {
            self.stats.ring_tx_drop_broken += u64::from(train.packets);
            return Ok(());
        };
        let sent = peer.ring.send(train, &mut self.stats);
        self.trains += 1;
        peer.used = self.trains;
        peer.count_spare(&mut self.spare);
        if peer.ring.hidden() >= SHOW_BYTES {
            peer.show(&mut self.stats);
        } else if !self.hidden.contains(&to.place) {
            self.hidden.push(to.place);
        }
        sent
    }

    /// Shows the peers what was written for them, and wakes those who sleep.
    pub(crate) fn flush(&mut self) {
        for place in self.hidden.drain(..) {
            if let Some(peer) = &mut self.peers[place] {
                peer.show(&mut self.stats);
            }
        }
    }

    /// What the rings of this lane may keep, if all lanes that it talks with talk as much with each other.
    fn spare_max(&self) -> usize {
        (SPARE_ALL / (self.by_lane.len() + 1)).max(CAPACITY)
    }

    /// When memory is to be given back, if so.
    pub(crate) fn next_due(&self) -> Option<Nanos> {
        (self.spare > self.spare_max()).then_some(self.keep_until)
    }

    /// Gives memory of rings back that were not used lately, if all have too much: what is in use again soon would be had anew each time, so half
    /// of all that may be kept stays.
    pub(crate) fn give_back(&mut self, now: Nanos) {
        if self.next_due().is_none_or(|due| now < due) {
            return;
        }
        let mut places: Vec<usize> = (0..self.peers.len()).collect();
        places.sort_by_key(|place| self.peers[*place].as_ref().map(|peer| peer.used));
        let enough = self.spare_max() / 2;
        for place in places {
            let Some(peer) = self.peers[place].as_mut().filter(|peer| peer.spare > 0) else { continue };
            peer.ring.give_back(&mut self.stats);
            peer.count_spare(&mut self.spare);
            if self.spare <= enough {
                return;
            }
        }
        self.keep_until = now + TRY_AGAIN_NS;
    }

    /// Gives what came to `sink`, with the lane that it came from. Gives the number of packets.
    pub(crate) fn receive(&mut self, sink: &mut dyn FnMut(u16, Arrival<'_>)) -> usize {
        let mut packets = 0;
        for peer in self.peers.iter_mut().flatten() {
            let lane = peer.lane;
            packets += peer.ring.recv(RECEIVE_BYTES, &mut self.scratch, &mut self.stats, &mut |arrival| {
                sink(lane, arrival);
            });
        }
        packets
    }
}

/// What a thread that sleeps needs of the rings, without the lane's lock.
#[derive(Debug)]
pub(crate) struct RingSleep {
    socket: WakeSocket,
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    /// Threads that sleep, or are about to.
    sleepers: u32,
    rings: Vec<(u64, Watch)>,
}

impl RingSleep {
    pub(crate) fn new(socket: WakeSocket) -> RingSleep {
        RingSleep { socket, watched: Mutex::default() }
    }

    /// Readable when a peer wakes us.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Somebody is about to sleep: from now on the peers wake us. False: there is something already. [`RingSleep::rise`] has to follow
    /// in any case.
    pub(crate) fn lie_down(&self) -> bool {
        let mut watched = self.watched.lock();
        watched.sleepers += 1;
        watched.rings.iter().for_each(|(_, ring)| ring.announce_sleep());
        !watched.rings.iter().any(|(_, ring)| ring.has_something())
    }

    /// A sleeper is up again, and will look at the rings.
    pub(crate) fn rise(&self) {
        let mut watched = self.watched.lock();
        watched.sleepers -= 1;
        // Before a peer may wake us again. Most often it was one.
        self.socket.drain(watched.rings.len().max(1));
        if watched.sleepers == 0 {
            watched.rings.iter().for_each(|(_, ring)| ring.announce_awake());
        } else {
            watched.rings.iter().for_each(|(_, ring)| ring.announce_sleep());
        }
    }

    fn add(&self, id: u64, ring: Watch) {
        let mut watched = self.watched.lock();
        if watched.sleepers > 0 {
            ring.announce_sleep();
        }
        watched.rings.push((id, ring));
    }

    fn remove(&self, id: u64) {
        self.watched.lock().rings.retain(|(known, _)| *known != id);
    }
}

#[cfg(test)]
mod tests {
    use ferroce_core::Buffer;
    use ferroce_link::ring::WakeName;
    use ferroce_transport::{Payload, Side, Span};
    use ferroce_wire::{Bth, NetHeader, Opcode, Psn, Reth};

    use super::*;
    use crate::relay::Relayed;
    use ferroce_wire::Headers;

    const LEASE: u64 = 0x1111;

    /// Lanes whose programs make no rings: the offers are kept, and nobody answers.
    #[derive(Debug, Default)]
    struct Silence(Vec<(u64, OwnedFd)>);

    impl Relay for Silence {
        fn forward(&mut self, _net: &NetHeader, _packet: &[u8]) {
            panic!("no packet is on a wrong lane");
        }

        fn receive(&mut self, _sink: &mut dyn FnMut(Relayed<'_>)) {}

        fn tell(&mut self, call: &RingCall<BorrowedFd<'_>>) {
            let RingWord::Offer(memory) = call.word else { return };
            self.0.push((call.id, memory.try_clone_to_owned().expect("a descriptor")));
        }
    }

    fn rings() -> Rings {
        Rings::new(1, Arc::new(RingSleep::new(WakeSocket::bind().expect("a socket"))))
    }

    fn watched(rings: &Rings) -> usize {
        rings.sleep.watched.lock().rings.len()
    }

    #[test]
    fn offers_that_nobody_takes_are_withdrawn() {
        let (mut rings, mut peers) = (rings(), Silence::default());
        let each = SILENT_NS / 10;
        for n in 0..100 {
            assert_eq!(rings.ask(2 + n, LEASE, Nanos::from(n) * each, &mut peers), Asked::Offered);
        }
        assert!(rings.by_lane.len() <= 2 * 10, "{} of 100 are kept", rings.by_lane.len());
        assert_eq!(watched(&rings), rings.by_lane.len());
        let refused = Ring::accept(&peers.0[0].1).map(drop);
        assert_eq!(refused, Err(Refusal::Withdrawn), "whoever comes late sees that");
        // The peer is asked anew.
        assert_eq!(rings.ask(2, LEASE, 100 * each, &mut peers), Asked::Offered);
        Ring::accept(&peers.0.last().expect("an offer").1).expect("a new one");
    }

    /// 64 KiB in packets of 4 KiB.
    fn train(buffer: &Buffer) -> Train {
        let len = buffer.len() as u32;
        let bth = |opcode| Bth::new(opcode, 0x4011, Psn::new(0));
        let mut head = Headers::new(bth(Opcode::RC_WRITE_FIRST));
        head.reth = Some(Reth { va: 0x1000, rkey: 7, len });
        Train {
            head,
            body: Opcode::RC_WRITE_MIDDLE,
            tail: Some(Headers::new(bth(Opcode::RC_WRITE_LAST))),
            packets: len / 4096,
            mtu: 4096,
            len,
            payload: Payload::Gather([Span { addr: buffer.addr(), len }].into_iter().collect()),
            path: None,
            from: Side::Requester,
        }
    }

    /// Rings of one lane to others, the ends of these, and the memory.
    struct Star {
        rings: Rings,
        places: Vec<RingId>,
        ends: Vec<(Ring, OwnedFd)>,
        buffer: Buffer,
    }

    impl Star {
        fn new(peers: u16) -> Star {
            let (mut rings, mut offers) = (rings(), Silence::default());
            let wake = WakeSocket::bind().expect("a socket");
            let (mut places, mut ends) = (Vec::new(), Vec::new());
            for lane in 2..peers + 2 {
                assert_eq!(rings.ask(lane, LEASE, 0, &mut offers), Asked::Offered);
                let (id, memory) = offers.0.remove(0);
                ends.push((Ring::accept(&memory).expect("it is there"), memory));
                let accepted = RingCall { lane, lease: LEASE, id, wake: wake.name(), word: RingWord::Accept };
                rings.hear(accepted, 0, &mut offers);
                places.push(rings.to(lane, LEASE).expect("both ends have it"));
            }
            Star { rings, places, ends, buffer: Buffer::new(64 << 10) }
        }

        fn send(&mut self, at: usize) {
            let sent = self.rings.send(self.places[at], at as u16 + 2, &train(&self.buffer));
            sent.expect("the buffer is there");
            self.rings.flush();
        }

        fn read(&mut self, at: usize) -> usize {
            let (mut scratch, mut stats) = (Box::new([0; PACKET_MAX]), LinkStats::default());
            self.ends[at].0.recv(1 << 20, &mut scratch, &mut stats, &mut |_| {})
        }

        /// Bytes of memory that all rings have.
        fn memory(&self) -> usize {
            let blocks = self.ends.iter().map(|(_, memory)| blocks_of(memory));
            blocks.sum::<u64>() as usize * 512
        }
    }

    fn blocks_of(memory: &OwnedFd) -> u64 {
        use std::os::unix::fs::MetadataExt;
        std::fs::File::from(memory.try_clone().expect("a descriptor")).metadata().expect("it is a file").blocks()
    }

    /// What one of 64 processes that all talk with each other has for its part: its rings' words for half, a page of each direction, and the rest.
    #[test]
    fn rings_to_63_lanes_keep_no_more_than_a_64th_of_64_mib() {
        let mut star = Star::new(63);
        for now in 0..3 {
            for at in 0..63 {
                star.send(at);
                assert_eq!(star.read(at), 16);
                star.rings.give_back(now);
                let words = 63 * 4096;
                assert!(
                    star.rings.spare <= CAPACITY && star.memory() - words / 2 <= 1 << 20,
                    "{} bytes",
                    star.memory()
                );
            }
        }
        assert!(star.rings.stats.ring_given_back > 63, "{}", star.rings.stats.ring_given_back);
        assert_eq!(star.rings.next_due(), None);
    }

    #[test]
    fn what_was_not_read_stays_and_is_looked_at_again_in_time() {
        let mut star = Star::new(63);
        (0..63).for_each(|at| star.send(at));
        star.rings.give_back(7);
        assert_eq!((star.rings.stats.ring_given_back, star.rings.next_due()), (0, Some(7 + TRY_AGAIN_NS)));
        assert!((0..63).all(|at| star.read(at) == 16));
        star.rings.give_back(6 + TRY_AGAIN_NS);
        assert_eq!(star.rings.stats.ring_given_back, 0, "that is too early");
        star.rings.give_back(7 + TRY_AGAIN_NS);
        assert!(star.rings.spare <= CAPACITY / 2 && star.rings.next_due().is_none());
        // The newest ones stay.
        assert!(star.rings.peers[62].as_ref().is_some_and(|peer| peer.spare > 0));
        assert!(star.rings.peers[0].as_ref().is_some_and(|peer| peer.spare == 0));
    }

    #[test]
    fn few_rings_keep_all_they_have() {
        let mut star = Star::new(3);
        for _ in 0..20 {
            for at in 0..3 {
                (0..7).for_each(|_| star.send(at));
                while star.read(at) > 0 {}
                star.rings.give_back(0);
            }
        }
        assert_eq!(star.rings.stats.ring_given_back, 0);
        assert!(star.rings.spare > 3 * 400 * 1024, "{}", star.rings.spare);
        // A ring that ends takes its part with it.
        let (place, spare) = (star.places[0].place, star.rings.spare);
        star.rings.remove(place);
        assert!(star.rings.spare < spare);
    }

    #[test]
    fn an_offer_whose_answer_is_lost_stays_and_what_it_brings_is_read() {
        let (mut rings, mut peers) = (rings(), Silence::default());
        assert_eq!(rings.ask(2, LEASE, 0, &mut peers), Asked::Offered);
        let (id, memory) = peers.0.remove(0);
        let _taken = Ring::accept(&memory).expect("it is there");
        assert_eq!(rings.ask(3, LEASE, 5 * SILENT_NS, &mut peers), Asked::Offered);
        assert_eq!(rings.by_lane.len(), 2);
        let word = RingWord::Accept;
        let wake = WakeSocket::bind().expect("a socket");
        let late = RingCall { lane: 2, lease: LEASE, id, wake: wake.name(), word };
        rings.hear(late, 5 * SILENT_NS, &mut peers);
        assert_eq!(rings.ask(2, LEASE, 5 * SILENT_NS, &mut peers), Asked::Ready);
        let nowhere = RingCall { lane: 3, lease: LEASE, id, wake: WakeName([0; 16]), word: RingWord::Accept };
        rings.hear(nowhere, 5 * SILENT_NS, &mut peers);
        assert_eq!(rings.stats.ring_refused, 1);
    }
}
