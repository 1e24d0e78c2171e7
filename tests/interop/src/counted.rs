//! What both ends count while a line runs, and what that must be.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use program_tests::failure::Failure;

use crate::table::{Fault, Row};

/// Counters of Ferroce that must stay 0 on a good network.
const FERROCE_ZERO: &[&str] =
    &["rx_too_short", "rx_bad_version", "rx_bad_pad", "rx_bad_datagram", "tx_unreachable", "tx_fault"];

/// Counters of what the fault middleware did.
const FAULTS: &[&str] = &["fault_lost", "fault_duplicated", "fault_reordered", "fault_corrupted"];

/// What both ends counted during a line.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// rxe's counters, as differences.
    pub kernel: BTreeMap<String, u64>,
    /// Ferroce's.
    pub ferroce: BTreeMap<String, u64>,
}

impl Counted {
    /// By rxe's counters before and after, and the file in which Ferroce's programs left theirs.
    pub fn new(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>, notes: &Path) -> Counted {
        let grown =
            |(name, value): (&String, &u64)| (name.clone(), value - before.get(name).unwrap_or(value).min(value));
        Counted { kernel: after.iter().map(grown).collect(), ferroce: ferroce_counters(notes) }
    }

    fn of(map: &BTreeMap<String, u64>, name: &str) -> u64 {
        map.get(name).copied().unwrap_or(0)
    }

    /// Did the kernel see any packet?
    pub fn any(&self) -> bool {
        Counted::of(&self.kernel, "rcvd_pkts") + Counted::of(&self.kernel, "sent_pkts") > 0
    }

    /// Packets that reached the kernel's UDP port and that rxe dropped before it counted them: a wrong ICRC, or no such
    /// queue pair any more.
    pub fn dropped_by_kernel(&self) -> u64 {
        Counted::of(&self.kernel, "udp_datagrams").saturating_sub(Counted::of(&self.kernel, "rcvd_pkts"))
    }

    /// An error if a counter says that the ends do not understand each other, or that the row was not what it is for.
    pub fn check(&self, row: &Row) -> Result<(), Failure> {
        self.check_icrc(row.fault)?;
        match row.fault {
            None => self.check_good_network(),
            Some(_) if FAULTS.iter().any(|name| Counted::of(&self.ferroce, name) > 0) => Ok(()),
            Some(fault) => Err(Failure::new(format!("no packet suffered by {}", fault.spec))),
        }
    }

    /// Each ICRC that one end made is right for the other, unless it was corrupted on the way.
    fn check_icrc(&self, fault: Option<Fault>) -> Result<(), Failure> {
        let corrupts = fault.is_some_and(|fault| fault.corrupts);
        let check = |who: &str, wrong: u64, checked: u64| match (wrong, checked) {
            (_, 0) => Err(Failure::new(format!("{who} checked no ICRC"))),
            (0, _) if corrupts => Err(Failure::new(format!("{who} found no wrong ICRC in corrupted packets"))),
            (1.., _) if !corrupts => Err(Failure::new(format!("{who} found {wrong} wrong ICRCs of {checked}"))),
            _ => Ok(()),
        };
        check("rxe", Counted::of(&self.kernel, "icrc_errors"), Counted::of(&self.kernel, "icrc_checked"))?;
        check("Ferroce", Counted::of(&self.ferroce, "rx_icrc_errors"), Counted::of(&self.ferroce, "rx_packets"))
    }

    fn check_good_network(&self) -> Result<(), Failure> {
        for name in FERROCE_ZERO {
            if Counted::of(&self.ferroce, name) > 0 {
                return Err(Failure::new(format!("Ferroce counts {} {name}", self.ferroce[*name])));
            }
        }
        // Gaps that are no fault: a full socket buffer makes one, and so does rxe for what is under way when it says that no
        // receive is posted.
        let gaps = [
            ("out_of_seq_request", Counted::of(&self.kernel, "send_rnr_err")),
            ("rcvd_seq_err", Counted::of(&self.ferroce, "rx_drop_full")),
            ("send_err", 0),
        ];
        for (name, allowed) in gaps {
            let value = Counted::of(&self.kernel, name);
            if value > allowed {
                return Err(Failure::new(format!("rxe counts {value} {name}")));
            }
        }
        // Acknowledgements may come when the queue pair is gone: a few at the end.
        const LATE: u64 = 64;
        let (dropped, got) = (self.dropped_by_kernel(), Counted::of(&self.kernel, "rcvd_pkts"));
        if dropped > LATE.min(got / 4 + 2) {
            return Err(Failure::new(format!("rxe dropped {dropped} packets of {}", got + dropped)));
        }
        Ok(())
    }

    /// Counters that are not 0, for a report.
    pub fn show(&self) -> String {
        let side = |name: &str, map: &BTreeMap<String, u64>| {
            let parts: Vec<String> =
                map.iter().filter(|(_, value)| **value > 0).map(|(name, value)| format!("{name} {value}")).collect();
            format!("{name} counted: {}", parts.join(", "))
        };
        format!("{}\n{}", side("rxe", &self.kernel), side("Ferroce", &self.ferroce))
    }
}

/// Sum over all processes that left counters.
fn ferroce_counters(path: &Path) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for line in fs::read_to_string(path).unwrap_or_default().lines() {
        let mut fields = line.split('\t').skip(1);
        if let (Some(name), Some(Ok(value))) = (fields.next(), fields.next().map(str::parse::<u64>)) {
            *counters.entry(name.to_owned()).or_default() += value;
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::ROWS;

    /// Both ends checked ICRCs, and besides this.
    fn counted(kernel: &[(&str, u64)], ferroce: &[(&str, u64)]) -> Counted {
        let map = |pairs: &[&[(&str, u64)]]| pairs.concat().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        Counted { kernel: map(&[&[("icrc_checked", 9)], kernel]), ferroce: map(&[&[("rx_packets", 9)], ferroce]) }
    }

    fn row(on: impl Fn(Option<Fault>) -> bool) -> &'static Row {
        ROWS.iter().find(|row| on(row.fault)).expect("there is such a row")
    }

    #[test]
    fn gaps_fail_unless_a_reason_is_known() {
        let good = row(|fault| fault.is_none());
        let check = |kernel: &[_], ferroce: &[_]| counted(kernel, ferroce).check(good);
        check(&[("rcvd_pkts", 100), ("udp_datagrams", 101)], &[]).expect("one came late");
        check(&[("rcvd_seq_err", 1)], &[]).expect_err("a gap");
        check(&[("rcvd_seq_err", 1)], &[("rx_drop_full", 9)]).expect("the buffer was full");
        check(&[("out_of_seq_request", 1)], &[]).expect_err("a gap");
        check(&[("out_of_seq_request", 1), ("send_rnr_err", 1)], &[]).expect("no receive was posted");
        check(&[("rcvd_pkts", 10), ("udp_datagrams", 30)], &[]).expect_err("rxe dropped most");
        check(&[], &[("rx_bad_pad", 1)]).expect_err("rxe's packets are well made");
    }

    #[test]
    fn a_wrong_icrc_fails_unless_it_was_made_wrong() {
        let good = row(|fault| fault.is_none());
        counted(&[], &[("rx_icrc_errors", 1)]).check(good).expect_err("rxe's ICRC is right");
        counted(&[("icrc_errors", 1)], &[]).check(good).expect_err("Ferroce's ICRC is right");
        Counted::default().check(good).expect_err("nothing was checked");
        let lost = ("fault_lost", 1);
        let bad = row(|fault| fault.is_some_and(|fault| !fault.corrupts));
        counted(&[], &[lost]).check(bad).expect("lost packets have no ICRC");
        counted(&[], &[]).check(bad).expect_err("the network was good");
        counted(&[("icrc_errors", 1)], &[lost]).check(bad).expect_err("those that came are right");
        let corrupt = row(|fault| fault.is_some_and(|fault| fault.corrupts));
        let both = counted(&[("icrc_errors", 1)], &[("rx_icrc_errors", 1), ("fault_corrupted", 2)]);
        both.check(corrupt).expect("both saw it");
        counted(&[], &[("rx_icrc_errors", 1), ("fault_corrupted", 2)]).check(corrupt).expect_err("rxe did not");
    }
}
