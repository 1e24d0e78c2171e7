//! The sockets of the port, and the kernel's order of them.
//!
//! The steering program names sockets by their index in the kernel's `SO_REUSEPORT` group. A socket is appended when it
//! is bound; when one goes, the last one takes its place. [`Group`] mirrors that order and keeps two rules, so that no
//! leased lane's socket ever moves:
//!
//! - The group's owner holds a copy of every socket as long as anybody else may, so that none goes by itself.
//! - A socket is closed only while the last one is a spare that nobody reads: that is the one that moves.
//!
//! A socket that was lent is never lent again, because a former holder with a copy would read the next one's packets.
//!
//! A closed socket that some process still holds against the rules of [`crate::client::LaneLease`] is a *ghost*: it
//! keeps its index until that process lets go, at a time that nobody tells. As many spares as there are ghosts stay at
//! the end for that.
//!
//! When keeper and service have died together, the sockets that programs have stay in the kernel's group without an owner:
//! *strangers*. Programs offer them to the next service ([`Group::adopt`]). While there are strangers nothing is closed, and
//! the order is found out by probing ([`probe`]) after each change. A lane whose socket has not been found is steered to
//! the service's own, which relays.
//!
//! No list of sockets is one look at everything, and whoever has a socket can do what he should not. So the map is compared with
//! what packets really do: after it was found out, for a while after that, and when a packet came to the wrong socket
//! ([`Doubt`]). If one lane's packets go astray, the order is found out anew.

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use serde::{Deserialize, Serialize};

use crate::doubt::Doubt;
use crate::store::{Held, Key, Store};
use crate::{LANE_MAX, ServiceError, owner, probe, steer, sys};

/// Sockets in the group, at most: every lane, as many whose former holders linger, and spares.
const SOCKETS_MAX: usize = 2 * (LANE_MAX as usize + 1) + 16;

/// Spare sockets kept at the end for the next lease.
const SPARES_KEPT: usize = 2;

/// Asked of the kernel for each receive buffer; it gives what `net.core.rmem_max` allows.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// How often the order is found out before it is left to the next sweep.
const SETTLE_ATTEMPTS: u32 = 3;

/// Identifies a socket of the group for as long as the service runs.
pub(crate) type SocketId = u64;

/// What a socket of the group is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    /// Strays.
    Service,
    /// Never lent.
    Spare,
    /// Packets of this lane go to it.
    Leased(u16),
    /// Was lent; its former holder may still have it.
    Lingering,
    /// Was lent; nobody should have it any more, and it is closed as soon as that moves only a spare.
    Done,
    /// Closed by us, but somebody still has it.
    Ghost,
    /// Its index is not known any more; never lent, kept until the group goes.
    Burnt,
    /// Somebody else's, that was not offered.
    Stranger,
}

impl Role {
    /// Whether it does no harm that the socket's index changes.
    fn may_move(self) -> bool {
        matches!(self, Role::Spare | Role::Burnt | Role::Stranger)
    }

    /// Whether a socket with this role may get that one. All changes of roles are here; new sockets are the service's own, spares, adopted
    /// (leased) or strangers.
    fn may_become(self, next: Role) -> bool {
        match (self, next) {
            // It is lent; it could not be steered to; it is given back; its holder has let go; or has not, as closing it shows.
            (Role::Spare, Role::Leased(_))
            | (Role::Leased(_), Role::Spare | Role::Lingering)
            | (Role::Lingering, Role::Done)
            | (Role::Done, Role::Ghost) => true,
            // It was given up too early.
            (given_up, Role::Leased(_)) => given_up.was_given_up(),
            // A ghost has gone, and nobody knows any more where this one is.
            (Role::Spare | Role::Burnt, Role::Burnt) => true,
            _ => false,
        }
    }

    /// Whether it was lent, and is not any more.
    fn was_given_up(self) -> bool {
        matches!(self, Role::Lingering | Role::Done | Role::Ghost)
    }
}

#[derive(Debug)]
struct Slot {
    id: SocketId,
    inode: u64,
    role: Role,
    /// False: its place in the kernel's order is not known yet, and its position here means nothing.
    placed: bool,
    /// None: a ghost or a stranger.
    socket: Option<OwnedFd>,
}

impl Slot {
    fn set_role(&mut self, next: Role) {
        assert!(self.role.may_become(next), "{self:?} cannot become {next:?}");
        self.role = next;
    }
}

/// The group. The position of a slot is the kernel's index.
#[derive(Debug)]
pub(crate) struct Group {
    slots: Vec<Slot>,
    port: u16,
    v6: bool,
    next_id: SocketId,
    /// Inodes of the sockets at the port that are not ours.
    strangers: HashSet<u64>,
    /// The positions of the slots may be wrong: [`Group::settle`] is due.
    unsure: bool,
    doubt: Doubt,
    /// How often the order was found out by probing.
    probings: u64,
    /// The last failure that was told in the log.
    told: Option<String>,
    store: Arc<Store>,
}

/// What of a group is not a descriptor.
#[derive(Serialize, Deserialize)]
struct Saved {
    v6: bool,
    next_id: SocketId,
    slots: Vec<(SocketId, u64, Role)>,
    /// Or there are strangers.
    #[serde(default)]
    unsure: bool,
}

impl Group {
    /// Opens the port with the service's own socket. Where an earlier service's sockets live on, it joins them.
    pub(crate) fn open(port: u16, store: Arc<Store>) -> Result<Group, ServiceError> {
        let (socket, v6) = match bind_first_socket(true, port) {
            Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => (bind_first_socket(false, port), false),
            other => (other, true),
        };
        let socket = socket.map_err(|errno| port_error(port, errno))?;
        let inode = inode(&socket).map_err(|errno| port_error(port, errno))?;
        want_destinations(&socket, v6).map_err(|errno| port_error(port, errno))?;
        store.put(Key::Socket(0), &socket).map_err(|errno| port_error(port, errno))?;
        let slot = Slot { id: 0, inode, role: Role::Service, placed: true, socket: Some(socket) };
        let mut group = Group::new(port, v6, 1, vec![slot], store);
        group.strangers = group.look_for_strangers().unwrap_or_default();
        group.unsure = !group.strangers.is_empty();
        group.save();
        if group.unsure {
            log::warn!("{} sockets of an earlier service live on at UDP port {port}", group.strangers.len());
            group.settle();
        } else {
            group.attach().inspect_err(|_| group.store.remove(Key::Socket(0)))?;
        }
        Ok(group)
    }

    /// Takes over the group of a service that has crashed, whatever it was doing; None: it had none.
    ///
    /// Each change of the kernel's order is saved before the next one, so that at most one is not.
    pub(crate) fn resume(port: u16, store: Arc<Store>, held: &mut Held) -> Result<Option<Group>, ServiceError> {
        let saved: Option<Saved> = store.load_group();
        let Some(Saved { v6, next_id, slots, unsure }) = saved.filter(|_| held.contains_key(&Key::Socket(0))) else {
            // It may have been about to open the port.
            if held.remove(&Key::Socket(0)).is_some() {
                store.remove(Key::Socket(0));
            }
            return Ok(None);
        };
        let slots = slots
            .into_iter()
            .map(|(id, inode, role)| Slot { id, inode, role, placed: true, socket: held.remove(&Key::Socket(id)) })
            .collect();
        let mut group = Group::new(port, v6, next_id, slots, store);
        if unsure || group.position(Role::Stranger).is_some() {
            return Ok(Some(group.resume_unsure(held)));
        }
        // It closed a socket; the last one has taken its place.
        while let Some(at) = group.slots.iter().position(|slot| slot.socket.is_none() && slot.role != Role::Ghost) {
            group.closed(at);
        }
        // It appended a socket.
        let appended: Vec<SocketId> =
            held.keys().filter_map(|key| if let Key::Socket(id) = key { Some(*id) } else { None }).collect();
        for id in appended {
            let socket = held.remove(&Key::Socket(id)).expect("the key is there");
            let inode = inode(&socket).map_err(|errno| port_error(port, errno))?;
            group.slots.push(Slot { id, inode, role: Role::Spare, placed: true, socket: Some(socket) });
            group.next_id = group.next_id.max(id + 1);
            group.settle_ghosts(true);
        }
        group.save();
        group.attach()?;
        group.doubt.begin(Instant::now());
        Ok(Some(group))
    }

    fn new(port: u16, v6: bool, next_id: SocketId, slots: Vec<Slot>, store: Arc<Store>) -> Group {
        Group {
            slots,
            port,
            v6,
            next_id,
            strangers: HashSet::new(),
            unsure: false,
            doubt: Doubt::default(),
            probings: 0,
            told: None,
            store,
        }
    }

    /// [`Self::resume`] where the order was being found out: it is found out anew.
    fn resume_unsure(mut self, held: &mut Held) -> Group {
        self.slots.retain(|slot| slot.socket.is_some());
        let appended: Vec<SocketId> =
            held.keys().filter_map(|key| if let Key::Socket(id) = key { Some(*id) } else { None }).collect();
        for id in appended {
            // A spare, or an offered one, whose program has no answer yet and offers it again.
            drop(held.remove(&Key::Socket(id)));
            self.store.remove(Key::Socket(id));
            self.next_id = self.next_id.max(id + 1);
        }
        self.unsure = true;
        self.settle();
        self
    }

    /// Takes a socket that an earlier service lent, and steers its lane to it again, at the latest after [`Self::settle`]. One that came
    /// before and was given up, because the service crashed before it said so or believed that its holder was gone, comes back under
    /// its id.
    ///
    /// EINVAL: it is not one that can be in the group, or is lent already.
    pub(crate) fn adopt(&mut self, lane: u16, socket: OwnedFd) -> Result<SocketId, ServiceError> {
        assert!(self.position(Role::Leased(lane)).is_none(), "lane {lane} is leased already");
        let refused = |why: &str| ServiceError::new(libc::EINVAL, format!("the socket of lane {lane} {why}"));
        let failed = |errno| ServiceError::system(format!("the socket of lane {lane} cannot be used"), errno);
        let inode = inode(&socket).map_err(failed)?;
        let given_up = self.slots.iter().position(|slot| slot.inode == inode && slot.role.was_given_up());
        if given_up.is_none() && !self.look_for_strangers().is_some_and(|strangers| strangers.contains(&inode)) {
            return Err(refused("is none of UDP port's, or is lent already"));
        }
        if !is_bound_like_ours(&socket, self.port) {
            return Err(refused("is not bound as those of the group are"));
        }
        let id = given_up.map_or(self.next_id, |at| self.slots[at].id);
        self.store.put(Key::Socket(id), &socket).map_err(failed)?;
        match given_up {
            Some(at) => {
                let slot = &mut self.slots[at];
                slot.set_role(Role::Leased(lane));
                (slot.placed, slot.socket) = (false, Some(socket));
            }
            None => {
                self.slots.push(Slot { id, inode, role: Role::Leased(lane), placed: false, socket: Some(socket) });
                self.next_id += 1;
            }
        }
        self.unsure = true;
        self.save();
        Ok(id)
    }

    /// Finds the order of the sockets out again, if it is not certain.
    pub(crate) fn settle(&mut self) {
        if !self.unsure {
            return;
        }
        // Who takes over from a service that crashes now must know.
        self.save();
        let mut outcome = Ok(());
        for _ in 0..SETTLE_ATTEMPTS {
            outcome = self.find_order().and_then(|lost| {
                self.attach()?;
                // What could not be found is looked for again, and by the next sweep at the latest.
                self.unsure = lost || !self.is_right();
                Ok(())
            });
            if outcome.is_err() || !self.unsure {
                break;
            }
        }
        if self.unsure {
            self.doubt.postpone(Instant::now());
        } else {
            self.doubt.begin(Instant::now());
        }
        self.save();
        self.tell(outcome);
    }

    /// Says a failure once, not with every sweep.
    fn tell(&mut self, outcome: Result<(), ServiceError>) {
        let failure = outcome.err().map(|error| error.to_string());
        if let Some(what) = failure.as_ref().filter(|_| failure != self.told) {
            log::warn!("UDP port {}: packets reach their lanes by the relay only: {what}", self.port);
        }
        self.told = failure;
    }

    /// Whether packets come to the sockets that they are steered to, and no stranger has come or gone. Where that cannot be
    /// seen, it is taken to be so.
    fn is_right(&self) -> bool {
        if self.look_for_strangers().is_some_and(|strangers| strangers != self.strangers) {
            return false;
        }
        let own = self.slots.iter().filter(|slot| slot.role == Role::Service).map(|slot| (0, slot));
        let lanes = self.slots.iter().filter_map(|slot| match slot.role {
            Role::Leased(lane) if slot.placed => Some((lane, slot)),
            _ => None,
        });
        let steered: Vec<(u16, BorrowedFd<'_>)> =
            own.chain(lanes).filter_map(|(lane, slot)| Some((lane, slot.socket.as_ref()?.as_fd()))).collect();
        match probe::astray(self.port, &steered) {
            Ok(astray) if astray.is_empty() => true,
            Ok(astray) => {
                log::warn!("UDP port {}: packets of lanes {astray:?} went to other sockets", self.port);
                false
            }
            Err(error) => {
                log::debug!("UDP port {}: cannot see where packets go: {error}", self.port);
                true
            }
        }
    }

    /// A packet came to another socket than its lane's: the next sweep looks into it, if it has not just done so.
    pub(crate) fn raise_doubt(&mut self) {
        self.doubt.raise();
    }

    /// How often the order of the sockets was found out by probing.
    pub(crate) fn probings(&self) -> u64 {
        self.probings
    }

    /// Puts the slots in the kernel's order. True: some socket was not found.
    fn find_order(&mut self) -> Result<bool, ServiceError> {
        self.probings += 1;
        let strangers = self.look_for_strangers();
        let bound = strangers.as_ref().map_or(SOCKETS_MAX, |strangers| strangers.len() + self.slots.len());
        self.slots.retain(|slot| slot.socket.is_some());
        self.slots.iter_mut().for_each(|slot| slot.placed = false);
        let sockets: Vec<BorrowedFd<'_>> =
            self.slots.iter().filter_map(|slot| Some(slot.socket.as_ref()?.as_fd())).collect();
        let found = probe::indices(self.port, bound as u32, &sockets)
            .map_err(|error| ServiceError::system("cannot find out the order of its sockets", sys::errno(&error)))?;
        let mut known: Vec<(Option<u32>, Slot)> = found.into_iter().zip(std::mem::take(&mut self.slots)).collect();
        // Those without a place at the end.
        known.sort_by_key(|(index, _)| index.unwrap_or(u32::MAX));
        let mut lost = false;
        for (index, slot) in known {
            lost |= index.is_none();
            while index.is_some_and(|index| self.slots.len() < index as usize) {
                let (id, role) = (SocketId::MAX, Role::Stranger);
                self.slots.push(Slot { id, inode: 0, role, placed: false, socket: None });
            }
            self.slots.push(Slot { placed: index.is_some(), ..slot });
        }
        self.strangers = strangers.unwrap_or_default();
        let gaps = self.position(Role::Stranger).is_some();
        Ok(lost || (gaps && self.strangers.is_empty()))
    }

    /// Whether others hold sockets of the group.
    pub(crate) fn has_strangers(&self) -> bool {
        self.unsure || !self.strangers.is_empty()
    }

    /// Inodes of sockets at the port that are not ours; None where the kernel does not tell.
    fn look_for_strangers(&self) -> Option<HashSet<u64>> {
        let ours: HashSet<u64> = self.slots.iter().map(|slot| slot.inode).collect();
        Some(self.bound_inodes()?.difference(&ours).copied().collect())
    }

    /// Sockets that lanes are steered to.
    pub(crate) fn leased(&self) -> impl Iterator<Item = (SocketId, u16)> {
        self.slots.iter().filter_map(|slot| match slot.role {
            Role::Leased(lane) => Some((slot.id, lane)),
            _ => None,
        })
    }

    /// Sockets of lanes that were given back and may still be held by their former holder.
    pub(crate) fn unmapped(&self) -> impl Iterator<Item = SocketId> {
        self.slots.iter().filter(|slot| slot.role == Role::Lingering).map(|slot| slot.id)
    }

    fn save(&self) {
        let slots = self.slots.iter().map(|slot| (slot.id, slot.inode, slot.role)).collect();
        let unsure = self.has_strangers();
        self.store.save_group(&Saved { v6: self.v6, next_id: self.next_id, slots, unsure });
    }

    /// The socket that gets what no lane wants.
    pub(crate) fn own_socket(&self) -> BorrowedFd<'_> {
        let own = &self.slots[self.own_index()];
        own.socket.as_ref().expect("the service's socket is open").as_fd()
    }

    fn own_index(&self) -> usize {
        self.position(Role::Service).expect("the group has the service's own socket")
    }

    /// Every socket that a keeper must have.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = (Key, BorrowedFd<'_>)> {
        self.slots.iter().filter_map(|slot| Some((Key::Socket(slot.id), slot.socket.as_ref()?.as_fd())))
    }

    /// Steers a lane to a socket that nobody had before, and gives a copy of it.
    pub(crate) fn lease(&mut self, lane: u16) -> Result<(SocketId, OwnedFd), ServiceError> {
        assert!((1..=LANE_MAX).contains(&lane), "lane {lane}");
        assert!(self.position(Role::Leased(lane)).is_none(), "lane {lane} is leased already");
        let at = self.spare_to_lend()?;
        let slot = &mut self.slots[at];
        let socket = slot.socket.as_ref().expect("spares are open");
        let copy = rustix::io::fcntl_dupfd_cloexec(socket, 3)
            .map_err(|errno| ServiceError::system("cannot lend a socket", errno))?;
        slot.set_role(Role::Leased(lane));
        let id = slot.id;
        self.save();
        if let Err(error) = self.attach() {
            self.slots[at].set_role(Role::Spare);
            self.save();
            return Err(error);
        }
        Ok((id, copy))
    }

    /// A socket of the group, to be set up.
    pub(crate) fn socket(&self, id: SocketId) -> Option<BorrowedFd<'_>> {
        self.slots.iter().find(|slot| slot.id == id)?.socket.as_ref().map(AsFd::as_fd)
    }

    /// Steers nothing to the socket any more; its former holder may still have it.
    pub(crate) fn unmap(&mut self, id: SocketId) {
        self.slot_mut(id).set_role(Role::Lingering);
        self.save();
        if let Err(error) = self.attach() {
            // The old program stays: the lane's packets go to a socket that nobody reads. No other lane is touched.
            log::warn!("a returned lane stays mapped until the next change: {error}");
        }
    }

    /// The former holder of an unmapped socket has let go.
    pub(crate) fn let_go(&mut self, id: SocketId) {
        self.slot_mut(id).set_role(Role::Done);
        self.save();
        self.sweep();
    }

    /// Closes what can be closed without moving a lane. Cheap when there is nothing to do.
    pub(crate) fn sweep(&mut self) {
        self.look_into_doubt();
        if self.has_strangers() {
            return self.follow_strangers();
        }
        self.settle_ghosts(false);
        while let Some(at) = self.position(Role::Done) {
            // Also behind the last one: it may turn out to be a ghost.
            if self.movable_tail() <= self.ghosts() {
                if let Err(error) = self.append_spare() {
                    log::warn!("a returned socket stays open until the next attempt: {error}");
                    return;
                }
                continue;
            }
            self.close(at);
        }
        if self.ghosts() == 0 {
            while self.slots.iter().rev().take_while(|slot| slot.role == Role::Spare).count() > SPARES_KEPT {
                self.close(self.slots.len() - 1);
            }
        }
    }

    /// When a stranger goes, another socket takes its place.
    fn follow_strangers(&mut self) {
        if self.look_for_strangers().is_some_and(|strangers| strangers != self.strangers) {
            self.unsure = true;
        } else if !self.doubt.pause_is_over(Instant::now()) {
            // Looking for the order disturbs all lanes.
            return;
        }
        self.settle();
    }

    /// Compares the map with what packets do, if that is due.
    fn look_into_doubt(&mut self) {
        let now = Instant::now();
        if self.unsure || !self.doubt.is_due(now) {
            return;
        }
        if self.is_right() {
            self.doubt.relieve(now);
        } else {
            self.unsure = true;
            self.settle();
        }
    }

    /// Sockets in the group.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Sockets of returned lanes that some process still holds.
    pub(crate) fn lingering(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot.role, Role::Lingering | Role::Ghost)).count()
    }

    /// Whether [`Self::sweep`] should be called again soon.
    pub(crate) fn wants_sweep(&self) -> bool {
        self.has_strangers() || self.unsettled() || self.doubt.is_pending()
    }

    /// Whether some process still has a socket of ours that must not move.
    pub(crate) fn unsettled(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.role, Role::Done | Role::Ghost))
    }

    fn position(&self, role: Role) -> Option<usize> {
        self.slots.iter().position(|slot| slot.role == role)
    }

    fn slot_mut(&mut self, id: SocketId) -> &mut Slot {
        self.slots.iter_mut().find(|slot| slot.id == id).expect("the socket is in the group")
    }

    fn ghosts(&self) -> usize {
        self.slots.iter().filter(|slot| slot.role == Role::Ghost).count()
    }

    /// Sockets at the end that may move, because nobody reads them.
    fn movable_tail(&self) -> usize {
        self.slots.iter().rev().take_while(|slot| slot.role.may_move()).count()
    }

    /// The position of a spare whose index is certain and stays so. (Where indices cannot be found out, one that is served by
    /// the relay until they can.)
    fn spare_to_lend(&mut self) -> Result<usize, ServiceError> {
        loop {
            self.sweep();
            let certain = self.slots.len() - self.ghosts();
            let spares = || (0..certain).filter(|at| self.slots[*at].role == Role::Spare);
            let found = spares().find(|at| self.slots[*at].placed);
            if let Some(at) = found.or_else(|| spares().next().filter(|_| self.unsure)) {
                return Ok(at);
            }
            self.append_spare()?;
        }
    }

    fn append_spare(&mut self) -> Result<(), ServiceError> {
        if self.slots.len() >= SOCKETS_MAX {
            return Err(ServiceError::new(
                libc::ENOSPC,
                format!(
                    "no lane: the service holds {SOCKETS_MAX} sockets, {} of them for processes that keep sockets of \
                     lanes that were given back (forked children of programs that have gone); end those processes",
                    self.lingering()
                ),
            ));
        }
        self.settle_ghosts(false);
        let failed = |errno| ServiceError::system(format!("no lane: cannot open UDP port {}", self.port), errno);
        let socket = bind_socket(self.v6, self.port).map_err(failed)?;
        let inode = inode(&socket).map_err(failed)?;
        self.store.put(Key::Socket(self.next_id), &socket).map_err(failed)?;
        let placed = !self.has_strangers();
        self.slots.push(Slot { id: self.next_id, inode, role: Role::Spare, placed, socket: Some(socket) });
        self.next_id += 1;
        // There may be some behind the last one that we know.
        if self.has_strangers() || self.look_for_strangers().is_some_and(|strangers| !strangers.is_empty()) {
            self.unsure = true;
            self.settle();
        } else {
            self.settle_ghosts(true);
            self.save();
        }
        Ok(())
    }

    /// Closes a socket of ours; the last one, a spare or itself, takes its place.
    fn close(&mut self, at: usize) {
        let last = self.slots.len() - 1;
        assert!(at == last || self.slots[last].role.may_move(), "only a spare may move");
        drop(self.slots[at].socket.take());
        self.store.remove(Key::Socket(self.slots[at].id));
        self.closed(at);
    }

    /// Takes note of a socket that neither this process nor the keeper has any more.
    fn closed(&mut self, at: usize) {
        let Slot { role, inode, .. } = self.slots[at];
        assert!(matches!(role, Role::Done | Role::Spare), "{:?} was in use", self.slots[at]);
        if role == Role::Done && self.bound_inodes().is_some_and(|bound| bound.contains(&inode)) {
            log::warn!("a process keeps the socket of a lane that it gave back");
            self.slots[at].set_role(Role::Ghost);
        } else {
            self.slots.swap_remove(at);
        }
        self.save();
    }

    /// Takes note of ghosts that have gone. `appended`: it may have been before or after the last socket was appended.
    fn settle_ghosts(&mut self, appended: bool) {
        if self.ghosts() == 0 {
            return;
        }
        let Some(bound) = self.bound_inodes() else {
            return;
        };
        let gone: Vec<usize> = (0..self.slots.len())
            .filter(|at| self.slots[*at].role == Role::Ghost && !bound.contains(&self.slots[*at].inode))
            .collect();
        if gone.is_empty() {
            return;
        }
        // As many sockets as have gone moved from the end into the holes. They are spares; with several of them it is
        // unknown which went where, and with one just appended, which stayed.
        let certain = gone.len() == 1 && !appended;
        assert!(self.movable_tail() >= gone.len() + usize::from(appended), "spares follow the ghosts");
        for at in &gone {
            let mut moved = self.slots.pop().expect("the tail is longer than the holes");
            if !certain {
                moved.set_role(Role::Burnt);
            }
            self.slots[*at] = moved;
        }
        if appended && let Some(last) = self.slots.last_mut() {
            last.set_role(Role::Burnt);
        }
        self.save();
    }

    /// Inodes of the sockets that are bound to the port; None where the kernel does not tell.
    fn bound_inodes(&self) -> Option<HashSet<u64>> {
        Some(owner::sockets_of_port(self.port)?.into_iter().map(|socket| socket.inode).collect())
    }

    fn attach(&self) -> Result<(), ServiceError> {
        if !self.slots[self.own_index()].placed {
            return Err(ServiceError::new(libc::EAGAIN, "the service's own socket was not found in the group"));
        }
        let mut lanes: Vec<(u16, u32)> = (0u32..)
            .zip(&self.slots)
            .filter_map(|(index, slot)| match slot.role {
                Role::Leased(lane) if slot.placed => Some((lane, index)),
                _ => None,
            })
            .collect();
        lanes.sort_unstable();
        let program = steer::program(&lanes, self.own_index() as u32);
        sys::attach_reuseport_program(self.own_socket(), &program).map_err(|error| {
            let what = format!("cannot attach the program that steers packets to {} lanes", lanes.len());
            ServiceError::system(what, sys::errno(&error))
        })
    }
}

/// A socket of the group: bound, not blocking.
fn bind_socket(v6: bool, port: u16) -> Result<OwnedFd, Errno> {
    let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    let option = |level, name, value| {
        sys::set_int_option(socket.as_fd(), level, name, value).map_err(|error| sys::errno(&error))
    };
    // Multicast would be delivered to every socket of the group, whoever joined.
    option(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
    if v6 {
        sockopt::set_ipv6_v6only(&socket, false)?;
        option(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0)?;
        // Linux's RoCEv2 and cards leave the UDP checksum out (the ICRC is the better one), which IPv6 forbids by default.
        if let Err(errno) = option(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1) {
            log::debug!(
                "this kernel drops packets of IPv6 without a UDP checksum, as rdma_rxe and cards send them: {errno}"
            );
        }
    }
    // The kernel merges a flow's packets if one socket of the group wants that, and asks any of them (it has not steered the
    // packets yet). Were they not of one mind, a socket more or less would end the merging of other lanes' flows in mid-train,
    // and what was merged so far would arrive after what follows it.
    if let Err(errno) = option(libc::SOL_UDP, libc::UDP_GRO, 1) {
        log::debug!("this kernel does not merge datagrams: {errno}");
    }
    sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES)?;
    if v6 {
        rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0))?;
    } else {
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    }
    Ok(socket)
}

/// The relay needs the destination address of strays.
fn want_destinations(socket: &OwnedFd, v6: bool) -> Result<(), Errno> {
    let on = |level, name| sys::set_int_option(socket.as_fd(), level, name, 1).map_err(|error| sys::errno(&error));
    on(libc::IPPROTO_IP, libc::IP_PKTINFO)?;
    if v6 {
        on(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)?;
    }
    Ok(())
}

/// The first socket of a group. Those of another user's service that is just ending go by themselves.
fn bind_first_socket(v6: bool, port: u16) -> Result<OwnedFd, Errno> {
    const ATTEMPTS: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(10);
    for _ in 1..ATTEMPTS {
        match bind_socket(v6, port) {
            Err(Errno::ADDRINUSE) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    bind_socket(v6, port)
}

/// Whether a socket is open for the port at every address, as those of the group are, and takes packets from everybody.
fn is_bound_like_ours(socket: &OwnedFd, port: u16) -> bool {
    let local = rustix::net::getsockname(socket).ok().and_then(|name| SocketAddr::try_from(name).ok());
    let is_datagram = sockopt::socket_type(socket) == Ok(SocketType::DGRAM);
    let connected = rustix::net::getpeername(socket).is_ok_and(|name| name.is_some());
    is_datagram && !connected && local.is_some_and(|local| local.ip().is_unspecified() && local.port() == port)
}

fn port_error(port: u16, errno: Errno) -> ServiceError {
    if errno == Errno::ADDRINUSE {
        port_in_use(port, &owner::sockets_of_port(port).unwrap_or_default())
    } else {
        ServiceError::system(format!("cannot open UDP port {port}"), errno)
    }
}

/// Who holds a port that no service of this network namespace has; None: nobody.
pub(crate) fn is_held(port: u16) -> Option<ServiceError> {
    let holders = owner::sockets_of_port(port).filter(|holders| !holders.is_empty())?;
    // Programs whose service has died have sockets of the next one's.
    let is_taken = |v6| matches!(bind_socket(v6, port), Err(Errno::ADDRINUSE));
    (is_taken(true) || is_taken(false)).then(|| port_in_use(port, &holders))
}

fn port_in_use(port: u16, holders: &HashSet<owner::PortSocket>) -> ServiceError {
    ServiceError::new(
        libc::EADDRINUSE,
        format!(
            "UDP port {port}, which RoCEv2 needs, is in use by {}; end that program (for the kernel's rdma_rxe: \
             `rdma link delete`), or run in a network namespace of your own (`unshare -rn`)",
            owner::describe(holders)
        ),
    )
}

fn inode(socket: &OwnedFd) -> Result<u64, Errno> {
    Ok(rustix::fs::fstat(socket)?.st_ino)
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
