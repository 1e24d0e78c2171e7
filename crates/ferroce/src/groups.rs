//! Multicast groups that the process is in: joined, by way of the service, for the first queue pair and left after the last.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ferroce_core::sync::Mutex;
use ferroce_engine::Group;
use ferroce_service::client::Client;

use crate::error::Result;

/// The memberships of the process's lanes.
#[derive(Debug)]
pub(crate) struct Groups {
    client: Client,
    /// How many queue pairs of a lane are in a group. The lock is held while the service is asked: joins and leaves keep their order.
    users: Mutex<HashMap<(u16, Group), u32>>,
}

impl Groups {
    pub(crate) fn new(client: Client) -> Groups {
        Groups { client, users: Mutex::new(HashMap::new()) }
    }

    /// One queue pair of the lane more.
    pub(crate) fn join(&self, lane: u16, group: Group) -> Result<()> {
        match self.users.lock().entry((lane, group)) {
            Entry::Occupied(mut users) => *users.get_mut() += 1,
            Entry::Vacant(place) => {
                self.client.join_group(lane, group.addr, group.ifindex)?;
                place.insert(1);
            }
        }
        Ok(())
    }

    /// One less. The membership ends with the lane at the latest, so that nobody needs to know of a failure.
    pub(crate) fn leave(&self, lane: u16, group: Group) {
        let mut users = self.users.lock();
        let Entry::Occupied(mut entry) = users.entry((lane, group)) else { return };
        *entry.get_mut() -= 1;
        if *entry.get() == 0 {
            entry.remove();
            if let Err(error) = self.client.leave_group(lane, group.addr, group.ifindex) {
                log::debug!("lane {lane} stays in {}: {error}", group.addr);
            }
        }
    }
}
