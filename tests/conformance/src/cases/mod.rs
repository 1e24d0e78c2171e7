//! The cases as data. Sections and compliance statements are those of the InfiniBand Architecture Specification, volume 1,
//! release 1.2.1 and later; "A17" is its annex on RoCEv2.

mod access;
mod atomics;
mod datagram;
mod duplicates;
mod headers;
mod ipv6;
mod order;
mod reads;
mod ready;
mod requester;
mod responder;
mod retry;
mod shape;
mod windows;

use crate::bench::{Bench, Seen};

/// A case.
#[derive(Clone, Copy)]
pub struct Case {
    /// Unique name: subject, then what is special.
    pub name: &'static str,
    /// Clause of the specification.
    pub clause: &'static str,
    /// What the tester does.
    pub stimulus: &'static str,
    /// What the clause asks of the device.
    pub expectation: &'static str,
    /// Carries it out.
    pub run: fn(&mut Bench) -> Seen,
    /// Said in the table where rxe departs: why. Ferroce must follow.
    pub remark: &'static str,
}

const fn case(
    name: &'static str,
    clause: &'static str,
    stimulus: &'static str,
    expectation: &'static str,
    run: fn(&mut Bench) -> Seen,
) -> Case {
    Case { name, clause, stimulus, expectation, run, remark: "" }
}

impl Case {
    const fn remark(self, remark: &'static str) -> Case {
        Case { remark, ..self }
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    [
        responder::CASES,
        order::CASES,
        duplicates::CASES,
        reads::CASES,
        atomics::CASES,
        ready::CASES,
        access::CASES,
        shape::CASES,
        headers::CASES,
        requester::CASES,
        retry::CASES,
        datagram::CASES,
        windows::CASES,
        ipv6::CASES,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_case_cites_a_clause() {
        let cases = cases();
        let names: BTreeSet<&str> = cases.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), cases.len());
        for case in &cases {
            let cites = |start: &str| case.clause.starts_with(start);
            assert!(
                cites("9.") || cites("A17") || cites("11.") || cites("10.") || cites("7."),
                "{}: {}",
                case.name,
                case.clause
            );
            assert!(!case.stimulus.is_empty() && !case.expectation.is_empty(), "{}", case.name);
        }
    }
}
