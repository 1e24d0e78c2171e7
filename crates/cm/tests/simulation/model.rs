//! What a program may be told about one id, and when.

use std::collections::BTreeSet;

use ferroce_cm::EventKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Active,
    Passive,
    Resolver,
    Answerer,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) role: Role,
    events: BTreeSet<&'static str>,
    accepted: bool,
    over: bool,
    destroyed: bool,
}

impl Model {
    pub(crate) fn new(role: Role) -> Model {
        Model { role, events: BTreeSet::new(), accepted: false, over: false, destroyed: false }
    }

    pub(crate) fn accept(&mut self) {
        self.accepted = true;
    }

    pub(crate) fn destroy(&mut self) {
        assert!(!self.destroyed);
        self.destroyed = true;
    }

    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed
    }

    /// An event comes; panics if it may not.
    pub(crate) fn event(&mut self, kind: &EventKind) {
        let name = kind.name();
        let fits = match kind {
            EventKind::ConnectRequest(_) => matches!(self.role, Role::Passive | Role::Answerer),
            EventKind::ConnectResponse { .. } => self.role == Role::Active && !self.over,
            EventKind::Established => self.role == Role::Passive && self.accepted && !self.over,
            EventKind::Resolved { .. } | EventKind::NotResolved { .. } => self.role == Role::Resolver && !self.over,
            EventKind::Rejected { .. } => matches!(self.role, Role::Active | Role::Passive) && !self.over,
            EventKind::Unreachable => {
                !self.over
                    && match self.role {
                        Role::Active => !self.events.contains("CONNECT_RESPONSE"),
                        Role::Passive => self.accepted && !self.events.contains("ESTABLISHED"),
                        Role::Resolver => true,
                        Role::Answerer => false,
                    }
            }
            EventKind::ConnectError => self.role == Role::Active && !self.over && self.events.is_empty(),
            EventKind::Disconnected { .. } => {
                !self.over
                    && match self.role {
                        Role::Active => self.events.contains("CONNECT_RESPONSE"),
                        Role::Passive => self.accepted,
                        Role::Resolver | Role::Answerer => false,
                    }
            }
            EventKind::TimewaitExit => matches!(self.role, Role::Active | Role::Passive) && self.over,
        };
        assert!(!self.destroyed, "{name} after the id was given up");
        assert!(fits, "{name} after {:?} of {:?}", self.events, self.role);
        assert!(self.events.insert(name), "{name} twice");
        self.over |= matches!(
            kind,
            EventKind::Resolved { .. }
                | EventKind::NotResolved { .. }
                | EventKind::Rejected { .. }
                | EventKind::Unreachable
                | EventKind::ConnectError
                | EventKind::Disconnected { .. }
        );
    }
}
