//! What a process has made of each kind, for whoever looks into it (`ferroce res`). Touched when objects are made and ended only.
//!
//! Queue pairs and memory regions are not here: the card lists its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use ferroce_core::sync::Mutex;

use crate::device::Device;
use crate::fork::Generation;

/// The objects of a process's card.
#[derive(Debug)]
pub(crate) struct Objects {
    listed: Mutex<Listed>,
    /// A forked child must not take the parent's lock: a thread that does not exist there may hold it.
    generation: Generation,
}

/// Objects by number. The queues are weak: looking must not keep alive what the program destroys.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    next: u32,
    /// Open contexts, with the interface index of their device.
    pub(crate) contexts: BTreeMap<u32, u32>,
    /// Devices that were ever opened, by interface index.
    pub(crate) devices: BTreeMap<u32, Arc<Device>>,
    /// Protection domains, by handle, with the interface index of their device.
    pub(crate) pds: BTreeMap<u32, u32>,
    pub(crate) cqs: BTreeMap<u32, Queue<ferroce_core::Cq>>,
    pub(crate) srqs: BTreeMap<u32, Queue<ferroce_core::Srq>>,
}

/// A queue of a device.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    pub(crate) ifindex: u32,
    /// Protection domain; 0: none.
    pub(crate) pd: u32,
    pub(crate) queue: Weak<T>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Context,
    Pd,
    Cq,
    Srq,
}

/// An object that is listed until this is dropped.
#[derive(Debug)]
pub(crate) struct Entry {
    objects: Arc<Objects>,
    kind: Kind,
    number: u32,
}

impl Objects {
    pub(crate) fn new(generation: Generation) -> Objects {
        Objects { listed: Mutex::default(), generation }
    }

    pub(crate) fn add_context(self: &Arc<Self>, device: &Arc<Device>) -> Entry {
        self.add(Kind::Context, |listed, number| {
            listed.devices.insert(device.ifindex(), Arc::clone(device));
            listed.contexts.insert(number, device.ifindex());
        })
    }

    pub(crate) fn add_pd(self: &Arc<Self>, handle: u32, ifindex: u32) -> Entry {
        self.listed.lock().pds.insert(handle, ifindex);
        Entry { objects: Arc::clone(self), kind: Kind::Pd, number: handle }
    }

    pub(crate) fn add_cq(self: &Arc<Self>, ifindex: u32, queue: &Arc<ferroce_core::Cq>) -> Entry {
        let queue = Queue { ifindex, pd: 0, queue: Arc::downgrade(queue) };
        self.add(Kind::Cq, |listed, number| drop(listed.cqs.insert(number, queue)))
    }

    pub(crate) fn add_srq(self: &Arc<Self>, ifindex: u32, pd: u32, queue: &Arc<ferroce_core::Srq>) -> Entry {
        let queue = Queue { ifindex, pd, queue: Arc::downgrade(queue) };
        self.add(Kind::Srq, |listed, number| drop(listed.srqs.insert(number, queue)))
    }

    fn add(self: &Arc<Self>, kind: Kind, add: impl FnOnce(&mut Listed, u32)) -> Entry {
        let mut listed = self.listed.lock();
        listed.next += 1;
        let number = listed.next;
        add(&mut listed, number);
        Entry { objects: Arc::clone(self), kind, number }
    }

    /// Looks at everything.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Listed) -> R) -> R {
        look(&self.listed.lock())
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.objects.generation.is_stale() {
            return;
        }
        let mut listed = self.objects.listed.lock();
        match self.kind {
            Kind::Context => drop(listed.contexts.remove(&self.number)),
            Kind::Pd => drop(listed.pds.remove(&self.number)),
            Kind::Cq => drop(listed.cqs.remove(&self.number)),
            Kind::Srq => drop(listed.srqs.remove(&self.number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_listed_as_long_as_they_live() {
        let objects = Arc::new(Objects::new(Generation::current()));
        let events = Arc::new(ferroce_core::AsyncQueue::new().expect("an event queue"));
        let queue = Arc::new(ferroce_core::Cq::new(16, None, events, 0).expect("a completion queue"));
        let (pd, first, second) = (objects.add_pd(7, 3), objects.add_cq(3, &queue), objects.add_cq(3, &queue));
        let counts = || objects.look(|listed| (listed.pds.len(), listed.cqs.len(), listed.srqs.len()));
        assert_eq!(counts(), (1, 2, 0));
        assert_eq!(objects.look(|listed| listed.pds[&7]), 3);
        drop(first);
        drop(pd);
        assert_eq!(counts(), (0, 1, 0));
        drop(queue);
        assert!(objects.look(|listed| listed.cqs.values().all(|cq| cq.queue.upgrade().is_none())));
        drop(second);
        assert_eq!(counts(), (0, 0, 0));
    }
}
