//! How many ids owners and users may have.

use std::collections::{BTreeMap, BTreeSet};

use crate::cm::Usage;
use crate::{Cm, CmId, DropReason, Owner, State};

/// Whose a process is, as its host numbers users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User {
    /// The user's number.
    pub number: u64,
    /// Whether it is a guest of the host: guests leave a part of everything to those that the host is for, and each guest a part to
    /// further ones.
    pub guest: bool,
}

/// Whether a guest that has `mine` may have one more where guests have `taken` of the `most` that there is for them: it leaves at least as
/// much to further guests as it has itself. So one has at most half of it, a second one half of what is left, and there is always
/// something for the next. The first one is granted as long as there is any.
pub fn leaves_room(mine: usize, taken: usize, most: usize) -> bool {
    let left = most.saturating_sub(taken);
    left > 0 && (mine == 0 || mine + 2 <= left)
}

/// What guests may have of so much: three quarters.
pub const fn part_of_guests(most: usize) -> usize {
    most / 4 * 3
}

/// How many ids of some kinds there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Those that listen.
    pub listeners: usize,
    /// Those with a connection that is being made, or that ask for a queue pair for datagrams, or are asked.
    pub pending: usize,
}

impl Kinds {
    /// One had that state, and has another; None: it is not there.
    pub(crate) fn change(&mut self, before: Option<State>, after: Option<State>) {
        let is = |state: Option<State>, kind: fn(State) -> bool| usize::from(state.is_some_and(kind));
        let listens = |state| state == State::Listen;
        self.listeners = self.listeners + is(after, listens) - is(before, listens);
        self.pending = self.pending + is(after, State::is_pending) - is(before, State::is_pending);
    }
}

/// Who has no room for one more id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Owner(usize),
    User(usize),
    Guests(usize),
    Host(usize),
}

impl Full {
    /// Whose ids these are.
    pub(crate) fn what(self) -> &'static str {
        match self {
            Full::Owner(_) => "ids for a process",
            Full::User(_) => "ids for a user",
            Full::Guests(_) => "ids for other users",
            Full::Host(_) => "ids on this host",
        }
    }

    /// How many there may be.
    pub(crate) fn limit(self) -> usize {
        let (Full::Owner(limit) | Full::User(limit) | Full::Guests(limit) | Full::Host(limit)) = self;
        limit
    }

    pub(crate) fn drop_reason(self) -> DropReason {
        match self {
            Full::Owner(_) => DropReason::OwnerLimit,
            Full::User(_) => DropReason::UserLimit,
            Full::Guests(_) | Full::Host(_) => DropReason::IdLimit,
        }
    }
}

/// Whose owners are, and how many ids users have.
#[derive(Debug, Default)]
pub(crate) struct Users {
    members: BTreeMap<Owner, User>,
    users: BTreeMap<User, Count>,
    /// Of all guests together.
    ids_of_guests: usize,
}

#[derive(Debug, Default)]
struct Count {
    owners: usize,
    ids: BTreeSet<CmId>,
    kinds: Kinds,
}

impl Users {
    fn enroll(&mut self, owner: Owner, user: User) {
        let before = self.members.insert(owner, user);
        assert!(before.is_none(), "{owner:?} is enrolled once");
        self.users.entry(user).or_default().owners += 1;
    }

    /// An owner without ids is gone.
    pub(crate) fn leave(&mut self, owner: Owner) {
        let Some(user) = self.members.remove(&owner) else { return };
        let count = self.users.get_mut(&user).expect("a member is counted");
        count.owners -= 1;
        if count.owners == 0 {
            self.users.remove(&user);
        }
    }

    pub(crate) fn count(&mut self, owner: Owner, id: CmId) {
        let Some(user) = self.members.get(&owner) else { return };
        self.users.get_mut(user).expect("a member is counted").ids.insert(id);
        self.ids_of_guests += usize::from(user.guest);
    }

    pub(crate) fn discount(&mut self, owner: Owner, id: CmId) {
        let Some(user) = self.members.get(&owner) else { return };
        self.users.get_mut(user).expect("a member is counted").ids.remove(&id);
        self.ids_of_guests -= usize::from(user.guest);
    }

    pub(crate) fn recount(&mut self, owner: Owner, before: Option<State>, after: Option<State>) {
        let Some(user) = self.members.get(&owner) else { return };
        self.users.get_mut(user).expect("a member is counted").kinds.change(before, after);
    }

    pub(crate) fn ids(&self, user: User) -> Option<&BTreeSet<CmId>> {
        self.users.get(&user).map(|count| &count.ids)
    }

    pub(crate) fn ids_of_guests(&self) -> usize {
        self.ids_of_guests
    }

    /// The counts are those of the owners' ids.
    ///
    /// # Panics
    /// They are not.
    pub(crate) fn check(&self, usages: &BTreeMap<Owner, Usage>) {
        for (user, count) in &self.users {
            let owners = || self.members.iter().filter(|(_, of)| *of == user).map(|(owner, _)| owner);
            let usages = || owners().filter_map(|owner| usages.get(owner));
            assert_eq!(count.owners, owners().count(), "{user:?}");
            assert_eq!(count.ids, usages().flat_map(|usage| &usage.ids).copied().collect(), "{user:?}");
            let kinds = usages().fold(Kinds::default(), |sum, Usage { kinds, .. }| Kinds {
                listeners: sum.listeners + kinds.listeners,
                pending: sum.pending + kinds.pending,
            });
            assert_eq!(count.kinds, kinds, "{user:?}");
        }
        let guests = self.users.iter().filter(|(user, _)| user.guest);
        assert_eq!(self.ids_of_guests, guests.map(|(_, count)| count.ids.len()).sum::<usize>());
    }
}

impl Cm {
    /// Says whose an owner is, before it has ids. Owners that nobody said this of are limited for themselves only.
    /// [`Cm::release_owner`] ends it.
    ///
    /// # Panics
    /// The owner is enrolled already, or has ids.
    pub fn enroll(&mut self, owner: Owner, user: User) {
        assert!(!self.owners.contains_key(&owner), "{owner:?} has ids that were not counted");
        self.users.enroll(owner, user);
    }

    /// Ids of an owner.
    pub fn ids_of_owner(&self, owner: Owner) -> usize {
        self.owners.get(&owner).map_or(0, |usage| usage.ids.len())
    }

    /// Ids of all owners of a user.
    pub fn ids_of_user(&self, user: User) -> usize {
        self.users.ids(user).map_or(0, BTreeSet::len)
    }

    /// An owner's ids by kind.
    pub fn kinds_of_owner(&self, owner: Owner) -> Kinds {
        self.owners.get(&owner).map(|usage| usage.kinds).unwrap_or_default()
    }

    /// Those of all owners of a user.
    pub fn kinds_of_user(&self, user: User) -> Kinds {
        self.users.users.get(&user).map(|count| count.kinds).unwrap_or_default()
    }

    /// Ids that do not linger.
    pub fn ids_with_owners(&self) -> usize {
        self.ids.len() - self.lingering()
    }

    /// Ids of all guests together.
    pub fn ids_of_guests(&self) -> usize {
        self.users.ids_of_guests()
    }

    /// Whether an owner may have one more id.
    pub(crate) fn room_for_id(&self, owner: Owner) -> Result<(), Full> {
        let limits = &self.config.limits;
        let refuse_if = |full: bool, who: Full| if full { Err(who) } else { Ok(()) };
        refuse_if(self.ids_of_owner(owner) >= limits.ids_per_owner, Full::Owner(limits.ids_per_owner))?;
        refuse_if(self.ids_with_owners() >= limits.ids, Full::Host(limits.ids))?;
        let Some(user) = self.users.members.get(&owner).copied() else { return Ok(()) };
        let (mine, taken) = (self.ids_of_user(user), self.users.ids_of_guests());
        refuse_if(user.guest && taken >= limits.ids_of_guests, Full::Guests(limits.ids_of_guests))?;
        match limits.ids_per_user {
            Some(limit) => refuse_if(mine >= limit, Full::User(limit)),
            None => refuse_if(user.guest && !leaves_room(mine, taken, limits.ids_of_guests), Full::User(mine)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One after the other takes all that it gets.
    fn greedy(most: usize, guests: usize) -> Vec<usize> {
        let mut has = Vec::new();
        for _ in 0..guests {
            let before: usize = has.iter().sum();
            let mut mine = 0;
            while leaves_room(mine, before + mine, most) {
                mine += 1;
            }
            has.push(mine);
        }
        has
    }

    #[test]
    fn each_guest_leaves_as_much_as_it_has() {
        assert_eq!(greedy(767, 4), [383, 192, 96, 48]);
        assert_eq!(greedy(8, 5), [4, 2, 1, 1, 0]);
        assert_eq!(greedy(1, 2), [1, 0]);
        assert_eq!(greedy(0, 1), [0]);
        assert_eq!(greedy(3072, 20).iter().filter(|has| **has > 0).count(), 13, "there is something for many");
    }
}
