//! Acknowledging events, and waiting for it.
//!
//! An event carries the address of its object as a cookie. That is sound because the destroy functions first make Ferroce forget the
//! object, which drops unread events and tells how many were handed out, and then wait until the program has acknowledged as many.

/// The acknowledgement counter of an object with the mutex and the condition that guard it.
pub(crate) struct Acknowledged {
    /// Guards the counter.
    pub mutex: *mut libc::pthread_mutex_t,
    /// Signalled when the counter changes.
    pub cond: *mut libc::pthread_cond_t,
    /// Events acknowledged; wraps.
    pub counter: *mut u32,
}

/// The counter of a C object, by field name.
macro_rules! acknowledged {
    ($object:expr, $counter:ident) => {
        $crate::events::Acknowledged {
            mutex: &raw mut (*$object).mutex,
            cond: &raw mut (*$object).cond,
            counter: &raw mut (*$object).$counter,
        }
    };
}

pub(crate) use acknowledged;

impl Acknowledged {
    /// Counts events as acknowledged and wakes a destroy function that waits for them.
    ///
    /// # Safety
    ///
    /// The three pointers lead into one live C object whose mutex and condition were initialised.
    pub(crate) unsafe fn add(&self, count: u32) {
        // SAFETY: by the contract above; the counter is only touched with the mutex held.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            *self.counter = (*self.counter).wrapping_add(count);
            libc::pthread_cond_broadcast(self.cond);
            libc::pthread_mutex_unlock(self.mutex);
        }
    }

    /// Waits until at least `delivered` events were acknowledged. The counters of C wrap at 32 bits, so only the low ones count.
    ///
    /// # Safety
    ///
    /// As for [`Acknowledged::add`].
    pub(crate) unsafe fn wait(&self, delivered: u64) {
        // SAFETY: by the contract above; the counter is only read with the mutex held.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            while is_behind(self.counter.read_volatile(), delivered as u32) {
                libc::pthread_cond_wait(self.cond, self.mutex);
            }
            libc::pthread_mutex_unlock(self.mutex);
        }
    }
}

/// Serial number arithmetic: a program that acknowledges too much does not block itself for ever.
fn is_behind(acknowledged: u32, delivered: u32) -> bool {
    (delivered.wrapping_sub(acknowledged) as i32) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Object {
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        acknowledged: u32,
    }

    #[test]
    fn counters_wrap() {
        assert!(is_behind(0, 1));
        assert!(!is_behind(1, 1));
        assert!(!is_behind(2, 1));
        assert!(is_behind(u32::MAX, 2));
        assert!(!is_behind(2, u32::MAX));
    }

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let object = Box::into_raw(Box::new(Object {
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            acknowledged: u32::MAX,
        }));
        let address = object as usize;
        let other = std::thread::spawn(move || {
            let object = address as *mut Object;
            for _ in 0..3 {
                // SAFETY: the object lives until this thread was joined.
                unsafe { acknowledged!(object, acknowledged).add(1) };
            }
        });
        // SAFETY: as above. Three acknowledgements after u32::MAX make 2.
        unsafe { acknowledged!(object, acknowledged).wait(u64::from(u32::MAX) + 3) };
        other.join().unwrap();
        // SAFETY: the thread is gone; the box is ours again.
        assert_eq!(unsafe { Box::from_raw(object) }.acknowledged, 2);
    }
}
