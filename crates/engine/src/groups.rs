//! Which queue pairs of a lane are attached to multicast groups.

use std::collections::HashMap;
use std::net::IpAddr;

use ferroce_core::CoreError;
use ferroce_core::limits::MAX_MCAST_QP_ATTACH;
use smallvec::SmallVec;

/// A multicast group as a host sees it: what is sent to the same address of another interface is another group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// The group's address.
    pub addr: IpAddr,
    /// The interface that it was joined on.
    pub ifindex: u32,
}

/// Slots that get a copy of a packet; seldom more than a few.
pub(crate) type Members = SmallVec<[u16; 8]>;

/// The attachments.
#[derive(Debug, Default)]
pub(crate) struct Groups(HashMap<Group, Members>);

impl Groups {
    /// Attaches a queue pair; a second time changes nothing.
    pub(crate) fn attach(&mut self, group: Group, slot: u16) -> Result<(), CoreError> {
        let members = self.0.entry(group).or_default();
        if members.contains(&slot) {
            return Ok(());
        }
        if members.len() >= MAX_MCAST_QP_ATTACH as usize {
            return Err(CoreError::new(
                libc::ENOMEM,
                "the multicast group has max_mcast_qp_attach queue pairs of this process already",
            ));
        }
        members.push(slot);
        Ok(())
    }

    /// Detaches a queue pair.
    pub(crate) fn detach(&mut self, group: Group, slot: u16) {
        if let Some(members) = self.0.get_mut(&group) {
            members.retain(|member| *member != slot);
            if members.is_empty() {
                self.0.remove(&group);
            }
        }
    }

    /// The queue pair is gone.
    pub(crate) fn forget(&mut self, slot: u16) {
        self.0.retain(|_, members| {
            members.retain(|member| *member != slot);
            !members.is_empty()
        });
    }

    /// Who gets a packet to `addr` that came in by `ifindex`; by an interface that is not known (0): whoever joined on any.
    pub(crate) fn members(&self, addr: IpAddr, ifindex: u32) -> Members {
        if ifindex != 0 {
            return self.0.get(&Group { addr, ifindex }).cloned().unwrap_or_default();
        }
        let mut all = Members::new();
        for (_, members) in self.0.iter().filter(|(group, _)| group.addr == addr) {
            all.extend(members.iter().copied().filter(|slot| !all.contains(slot)).collect::<Members>());
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(last: u8, ifindex: u32) -> Group {
        Group { addr: IpAddr::from([239, 0, 0, last]), ifindex }
    }

    #[test]
    fn members_are_those_of_the_interface() {
        let mut groups = Groups::default();
        for (ifindex, slot) in [(1, 10), (1, 11), (1, 10), (2, 10), (2, 12)] {
            groups.attach(group(1, ifindex), slot).expect("there is room");
        }
        groups.attach(group(2, 1), 13).expect("there is room");
        let of = |groups: &Groups, last, ifindex| {
            let mut members = groups.members(group(last, 0).addr, ifindex).to_vec();
            members.sort_unstable();
            members
        };
        assert_eq!(of(&groups, 1, 1), [10, 11]);
        assert_eq!(of(&groups, 1, 2), [10, 12]);
        assert_eq!(of(&groups, 1, 3), [0; 0]);
        assert_eq!(of(&groups, 1, 0), [10, 11, 12], "each once");
        groups.detach(group(1, 1), 10);
        assert_eq!((of(&groups, 1, 1), of(&groups, 1, 2)), (vec![11], vec![10, 12]));
        groups.forget(10);
        groups.forget(11);
        assert_eq!(of(&groups, 1, 0), [12]);
        assert_eq!(groups.0.len(), 2, "empty groups go");
    }

    #[test]
    fn a_group_has_room_for_so_many() {
        let mut groups = Groups::default();
        for slot in 0..MAX_MCAST_QP_ATTACH as u16 {
            groups.attach(group(1, 1), slot).expect("there is room");
        }
        groups.attach(group(1, 1), 0).expect("it is there already");
        assert_eq!(groups.attach(group(1, 1), 1000).unwrap_err().errno, libc::ENOMEM);
        groups.detach(group(1, 1), 0);
        groups.attach(group(1, 1), 1000).expect("there is room again");
    }
}
