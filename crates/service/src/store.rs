//! What outlives a crash of the service: descriptors in the keeper's hands, and its state in files in memory.
//!
//! The [`keeper`](crate::keeper) is the service's parent. It holds a copy of every descriptor that the service puts
//! there, so that no socket of the group moves when the service dies, and gives them all to the next one. State that is
//! not a descriptor is written to memory files that the keeper holds too, and does not read.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::seqpacket;

/// So long the service, which does nothing else meanwhile, waits for its keeper; one that is silent longer is taken for dead.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a kept descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Listener,
    /// Memory file.
    GroupState,
    /// Memory file.
    ServiceState,
    /// A socket of the group.
    Socket(u64),
    /// A client's connection.
    Client(u64),
    /// A client's pidfd.
    Pidfd(u64),
    /// The service's end of a relay, by its socket.
    Relay(u64),
}

impl Key {
    const KIND_SHIFT: u32 = 56;

    fn number(self) -> u64 {
        let (kind, id) = match self {
            Key::Listener => (0, 0),
            Key::GroupState => (1, 0),
            Key::ServiceState => (2, 0),
            Key::Socket(id) => (3, id),
            Key::Client(id) => (4, id),
            Key::Pidfd(id) => (5, id),
            Key::Relay(id) => (6, id),
        };
        kind << Self::KIND_SHIFT | id
    }

    fn of(number: u64) -> Option<Key> {
        let id = number & ((1 << Self::KIND_SHIFT) - 1);
        Some(match number >> Self::KIND_SHIFT {
            0 => Key::Listener,
            1 => Key::GroupState,
            2 => Key::ServiceState,
            3 => Key::Socket(id),
            4 => Key::Client(id),
            5 => Key::Pidfd(id),
            6 => Key::Relay(id),
            _ => return None,
        })
    }
}

/// Messages between service and keeper: a byte and a key's number, with a descriptor where the comment says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    /// To the service, at its start: kept from before (with descriptor).
    Held = 1,
    /// To the service: that was all.
    End = 2,
    /// To the keeper: keep this (with descriptor). Answered.
    Put = 3,
    /// To the keeper: close that. Answered when it is closed, or when closing it waits for whoever sent what is in it.
    Remove = 4,
    /// The keeper's answer.
    Done = 5,
    /// The keeper's answer: it could not.
    Failed = 6,
    /// To the keeper: this service ends in order, and no other is to follow. Answered.
    Leave = 7,
    /// To the keeper: this service gets round to its work. Not answered.
    Alive = 8,
}

impl Operation {
    fn of(byte: u8) -> Option<Operation> {
        [Self::Held, Self::End, Self::Put, Self::Remove, Self::Done, Self::Failed, Self::Leave, Self::Alive]
            .into_iter()
            .find(|operation| *operation as u8 == byte)
    }
}

/// A message between service and keeper.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) operation: Operation,
    pub(crate) key: Key,
    pub(crate) descriptor: Option<OwnedFd>,
}

pub(crate) fn send(
    socket: impl AsFd,
    operation: Operation,
    key: Key,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    send_with(socket, operation, key, descriptor, SendFlags::empty())
}

fn send_with(
    socket: impl AsFd,
    operation: Operation,
    key: Key,
    descriptor: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut bytes = [0; 9];
    bytes[0] = operation as u8;
    bytes[1..].copy_from_slice(&key.number().to_le_bytes());
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    seqpacket::send(socket, &[&bytes], &descriptors, flags)
}

/// The next message; blocks. CONNRESET: the other end is gone. AGAIN: there was none in the time that the socket's option says.
pub(crate) fn recv(socket: impl AsFd) -> Result<Message, Errno> {
    let mut bytes = [0; 9];
    let received = rustix::io::retry_on_intr(|| seqpacket::recv(&socket, &mut bytes, RecvFlags::empty()))?;
    if received.len == 0 {
        return Err(Errno::CONNRESET);
    }
    let number = u64::from_le_bytes(bytes[1..].try_into().expect("8 bytes"));
    match (Operation::of(bytes[0]), Key::of(number)) {
        (Some(operation), Some(key)) if received.len == bytes.len() => {
            Ok(Message { operation, key, descriptor: received.descriptors.into_iter().next() })
        }
        _ => Err(Errno::PROTO),
    }
}

/// The service's way to its keeper. Without one (in-process, or the keeper is gone) it does nothing.
#[derive(Debug, Default)]
pub(crate) struct Store {
    keeper: Mutex<Option<OwnedFd>>,
    group: Option<StateFile>,
    service: Option<StateFile>,
}

/// Descriptors from before.
pub(crate) type Held = BTreeMap<Key, OwnedFd>;

impl Store {
    /// Takes over what the keeper has; the two states are None at the first start.
    pub(crate) fn open(keeper: OwnedFd) -> Result<(Store, Held), Errno> {
        let mut held = Held::new();
        loop {
            match recv(&keeper)? {
                Message { operation: Operation::Held, key, descriptor: Some(descriptor) } => {
                    held.insert(key, descriptor);
                }
                Message { operation: Operation::End, .. } => break,
                _ => return Err(Errno::PROTO),
            }
        }
        let mut state = |key| held.remove(&key).map(StateFile::new).ok_or(Errno::PROTO);
        let (group, service) = (state(Key::GroupState)?, state(Key::ServiceState)?);
        limit_patience(&keeper)?;
        Ok((Store { keeper: Mutex::new(Some(keeper)), group: Some(group), service: Some(service) }, held))
    }

    /// Has the descriptor kept. NOBUFS: the keeper has no room. TOOMANYREFS: this user can send no more descriptors for the moment.
    pub(crate) fn put(&self, key: Key, descriptor: impl AsFd) -> Result<(), Errno> {
        self.ask(Operation::Put, key, Some(descriptor.as_fd()))
    }

    /// Has the kept descriptor closed; it is when this returns, but for a connection whose closing waits ([`Operation::Remove`]).
    pub(crate) fn remove(&self, key: Key) {
        // It fails only for what was never put.
        let _ = self.ask(Operation::Remove, key, None);
    }

    pub(crate) fn save_group(&self, state: &impl Serialize) {
        save(self.group.as_ref(), state);
    }

    pub(crate) fn save_service(&self, state: &impl Serialize) {
        save(self.service.as_ref(), state);
    }

    pub(crate) fn load_group<T: DeserializeOwned>(&self) -> Option<T> {
        self.group.as_ref().and_then(StateFile::load)
    }

    pub(crate) fn load_service<T: DeserializeOwned>(&self) -> Option<T> {
        self.service.as_ref().and_then(StateFile::load)
    }

    /// Takes a new keeper in place of one that is gone, and gives it all there is: the states, and what `descriptors` has.
    pub(crate) fn change_keeper<'a>(
        &self,
        keeper: OwnedFd,
        descriptors: impl Iterator<Item = (Key, BorrowedFd<'a>)>,
    ) -> Result<(), Errno> {
        limit_patience(&keeper)?;
        let states = [(Key::GroupState, &self.group), (Key::ServiceState, &self.service)];
        let states = states.into_iter().filter_map(|(key, state)| Some((key, state.as_ref()?.file.as_fd())));
        for (key, descriptor) in states {
            tell(&keeper, Operation::Put, key, Some(descriptor))?;
        }
        for (key, descriptor) in descriptors {
            tell(&keeper, Operation::Put, key, Some(descriptor))?;
        }
        *self.keeper.lock() = Some(keeper);
        Ok(())
    }

    /// Runs `watch` on the keeper's socket, which hangs up when the keeper is gone; None: there is no keeper.
    pub(crate) fn with_keeper<R>(&self, watch: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        self.keeper.lock().as_ref().map(|keeper| watch(keeper.as_fd()))
    }

    /// The service ends in order: no other is to follow.
    pub(crate) fn leave(&self) {
        // Whoever has no keeper is followed by nobody anyway.
        let _ = self.ask(Operation::Leave, Key::Listener, None);
    }

    /// Lets the keeper know that the service gets round to its work.
    pub(crate) fn beat(&self) {
        if let Some(keeper) = self.keeper.lock().as_ref() {
            // A keeper that reads nothing shows elsewhere.
            let _ = send_with(keeper, Operation::Alive, Key::Listener, None, SendFlags::DONTWAIT);
        }
    }

    /// The keeper is gone.
    pub(crate) fn forget_keeper(&self) {
        *self.keeper.lock() = None;
    }

    fn ask(&self, operation: Operation, key: Key, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let keeper = self.keeper.lock();
        let Some(socket) = keeper.as_ref() else {
            return Ok(());
        };
        match tell(socket, operation, key, descriptor) {
            // It lives: it has no room, or this user can send no more descriptors for the moment.
            refused @ Err(Errno::NOBUFS | Errno::TOOMANYREFS) => refused,
            Err(errno) => {
                log::warn!("the keeper is gone ({errno})");
                // The socket stays: its hang-up brings a new keeper, which is given everything anew. One that is only silent does not
                // hang up by itself.
                let _ = rustix::net::shutdown(socket, Shutdown::Both);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

fn limit_patience(keeper: &OwnedFd) -> Result<(), Errno> {
    [Timeout::Recv, Timeout::Send]
        .into_iter()
        .try_for_each(|timeout| sockopt::set_socket_timeout(keeper, timeout, Some(PATIENCE)))
}

/// Has a keeper do something. NOBUFS: it could not. TOOMANYREFS: it was not asked. Other errors: it is gone, or silent.
fn tell(keeper: &OwnedFd, operation: Operation, key: Key, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    send(keeper, operation, key, descriptor)?;
    match recv(keeper)?.operation {
        Operation::Done => Ok(()),
        _ => Err(Errno::NOBUFS),
    }
}

fn save(file: Option<&StateFile>, state: &impl Serialize) {
    if let Some(file) = file {
        let bytes = serde_json::to_vec(state).expect("states have string keys and no failing serializer");
        if let Err(errno) = file.write(&bytes) {
            log::error!("cannot save the state: {errno}");
        }
    }
}

/// A memory file with two places, written in turns: the newer whole one counts, whenever its writer was killed.
#[derive(Debug)]
pub(crate) struct StateFile {
    file: OwnedFd,
    /// Of the newest place; 0: nothing is written yet.
    sequence: Mutex<u64>,
}

impl StateFile {
    /// Room of a place; the file is sparse.
    const PLACE_BYTES: u64 = 16 << 20;
    /// What it has room for.
    pub(crate) const STATE_BYTES_MAX: usize = (Self::PLACE_BYTES - Self::HEADER_BYTES) as usize;
    /// Sequence number and length. Written last and in one piece.
    const HEADER_BYTES: u64 = 16;

    pub(crate) fn create(name: &str) -> Result<OwnedFd, Errno> {
        rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
    }

    pub(crate) fn new(file: OwnedFd) -> StateFile {
        let newest = (0..2).map(|place| Self::header(&file, place).0).max().unwrap_or(0);
        StateFile { file, sequence: Mutex::new(newest) }
    }

    fn header(file: &OwnedFd, place: u64) -> (u64, u64) {
        let mut bytes = [0; Self::HEADER_BYTES as usize];
        match rustix::io::pread(file, &mut bytes[..], place * Self::PLACE_BYTES) {
            Ok(read) if read == bytes.len() => {
                let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
                (number(0), number(8))
            }
            _ => (0, 0),
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.len() as u64 > Self::PLACE_BYTES - Self::HEADER_BYTES {
            return Err(Errno::FBIG);
        }
        let mut sequence = self.sequence.lock();
        let next = *sequence + 1;
        let start = (next % 2) * Self::PLACE_BYTES;
        let mut at = 0;
        while at < bytes.len() {
            at += rustix::io::pwrite(&self.file, &bytes[at..], start + Self::HEADER_BYTES + at as u64)?;
        }
        let mut header = [0; Self::HEADER_BYTES as usize];
        header[..8].copy_from_slice(&next.to_le_bytes());
        header[8..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        rustix::io::pwrite(&self.file, &header, start)?;
        *sequence = next;
        Ok(())
    }

    fn load<T: DeserializeOwned>(&self) -> Option<T> {
        let place = *self.sequence.lock() % 2;
        let (sequence, len) = Self::header(&self.file, place);
        if sequence == 0 || len > Self::PLACE_BYTES {
            return None;
        }
        let mut bytes = vec![0; len as usize];
        let mut at = 0;
        while at < bytes.len() {
            let offset = place * Self::PLACE_BYTES + Self::HEADER_BYTES + at as u64;
            match rustix::io::pread(&self.file, &mut bytes[at..], offset) {
                Ok(read) if read > 0 => at += read,
                _ => return None,
            }
        }
        serde_json::from_slice(&bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_the_wire() {
        let keys = [
            Key::Listener,
            Key::GroupState,
            Key::ServiceState,
            Key::Socket(7),
            Key::Client(1 << 40),
            Key::Pidfd(3),
            Key::Relay(9),
        ];
        for key in keys {
            assert_eq!(Key::of(key.number()), Some(key));
        }
        assert_eq!(Key::of(u64::MAX), None);
    }

    #[test]
    fn the_newest_whole_state_counts() {
        let file = StateFile::create("test").unwrap();
        let again = || StateFile::new(rustix::io::dup(&file).unwrap());
        assert_eq!(again().load::<Vec<u32>>(), None);
        let state = again();
        for round in 0..5u32 {
            state.write(&serde_json::to_vec(&vec![round; round as usize]).unwrap()).unwrap();
            assert_eq!(again().load(), Some(vec![round; round as usize]));
        }
        // A writer that was killed before it wrote the header changes nothing.
        let next = (*state.sequence.lock() + 1) % 2;
        rustix::io::pwrite(&file, b"garbage", next * StateFile::PLACE_BYTES + StateFile::HEADER_BYTES).unwrap();
        assert_eq!(again().load(), Some(vec![4u32; 4]));
    }

    #[test]
    fn without_a_keeper_nothing_fails() {
        let store = Store::default();
        store.put(Key::Client(1), std::io::stdin()).unwrap();
        store.remove(Key::Client(1));
        store.save_group(&1);
        assert_eq!(store.load_group::<u32>(), None);
    }
}
