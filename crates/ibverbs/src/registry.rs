//! Objects by the numbers that C knows them by: for the import of objects into another context of the process, and for advice, which
//! names regions by key.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use ferroce::sync::Mutex;

use crate::start::Held;

/// Live objects of one kind, by handle. An object leaves when its last reference is dropped; nobody is kept alive here.
/// The table is made with the first object.
pub(crate) struct Registry<T>(Mutex<Option<HashMap<u32, Weak<T>>>>);

impl<T> Registry<T> {
    /// Without objects.
    pub(crate) const fn new() -> Registry<T> {
        Registry(Mutex::new(None))
    }

    /// Makes an object known. A handle is used again only after its object is gone.
    pub(crate) fn add(&self, handle: u32, object: &Arc<T>) {
        let mut slot = self.0.lock();
        let objects = slot.get_or_insert_default();
        // Clearing out what is gone costs a constant for each object added.
        if objects.len() == objects.capacity() {
            objects.retain(|_, object| object.strong_count() > 0);
        }
        objects.insert(handle, Arc::downgrade(object));
    }

    /// The object with a handle, if it is alive.
    pub(crate) fn get(&self, handle: u32) -> Option<Arc<T>> {
        self.0.lock().as_ref()?.get(&handle)?.upgrade()
    }

    /// The first live object that fits.
    pub(crate) fn find(&self, fits: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        self.0.lock().as_ref()?.values().filter_map(Weak::upgrade).find(|object| fits(object))
    }

    /// Keeps the table consistent across a fork.
    pub(crate) fn hold(&'static self) -> Held {
        Box::new(self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_leave_by_themselves() {
        static OBJECTS: Registry<u8> = Registry::new();
        let one = Arc::new(1);
        OBJECTS.add(7, &one);
        assert_eq!(OBJECTS.get(7).as_deref(), Some(&1));
        assert_eq!(OBJECTS.find(|object| *object == 1).as_deref(), Some(&1));
        drop(one);
        assert!(OBJECTS.get(7).is_none());
        for handle in 0..10_000 {
            OBJECTS.add(handle, &Arc::new(2));
        }
        assert!(OBJECTS.0.lock().as_ref().is_some_and(|objects| objects.len() < 1_000), "what is gone is cleared out");
        assert!(OBJECTS.find(|_| true).is_none());
    }
}
