//! What both ends count while a line runs, and what that must be.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use program_tests::failure::Failure;

use crate::ends::Side;
use crate::table::{Kind, Row};

/// Counters of Ferroce that must stay 0 on a good network.
const FERROCE_ZERO: &[&str] =
    &["rx_too_short", "rx_bad_version", "rx_bad_pad", "rx_bad_datagram", "tx_unreachable", "tx_fault"];

/// Counters of what the fault middleware did.
const FAULTS: &[&str] = &["fault_lost", "fault_duplicated", "fault_reordered", "fault_corrupted"];
/// Counters of rxe that tell of it.
const KERNEL_FAULTS: &[&str] = &["out_of_seq_request", "duplicate_request", "rcvd_seq_err", "completer_retry_err"];

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

    /// An error if a counter says that the ends do not understand each other, or that the row was not what it is for. `died`
    /// is the side of which the program was ended by force.
    pub fn check(&self, row: &Row, died: Option<Side>) -> Result<(), Failure> {
        for (name, least) in row.at_least {
            let value = Counted::of(&self.kernel, name);
            if value < *least {
                return Err(Failure::new(format!("rxe counts {value} {name}, not {least} or more")));
            }
        }
        self.check_icrc(row, died)?;
        match row.fault {
            None => self.check_good_network(died),
            Some(_) if self.suffered() => Ok(()),
            Some(fault) => Err(Failure::new(format!("no packet suffered by {}", fault.spec))),
        }
    }

    /// Was the network bad?
    fn suffered(&self) -> bool {
        FAULTS.iter().any(|name| Counted::of(&self.ferroce, name) > 0)
            || KERNEL_FAULTS.iter().any(|name| Counted::of(&self.kernel, name) > 0)
    }

    /// Each ICRC that one end made is right for the other, unless it was corrupted on the way.
    fn check_icrc(&self, row: &Row, died: Option<Side>) -> Result<(), Failure> {
        let corrupts = row.fault.is_some_and(|fault| fault.corrupts);
        // `got` tells, by another counter, whether there was anything to check.
        let check = |who: &str, wrong: u64, checked: u64, got: u64| match wrong {
            _ if checked == 0 && got > 0 => Err(Failure::new(format!("{who} got {got} packets and checked no ICRC"))),
            0 if corrupts => Err(Failure::new(format!("{who} found no wrong ICRC in corrupted packets"))),
            1.. if !corrupts => Err(Failure::new(format!("{who} found {wrong} wrong ICRCs of {checked}"))),
            _ => Ok(()),
        };
        let kernel = |name| Counted::of(&self.kernel, name);
        check("rxe", kernel("icrc_errors"), kernel("icrc_checked"), kernel("rcvd_pkts"))?;
        // A program leaves counters when it closes its device. These end without.
        let leaves_none =
            died == Some(Side::Ferroce) || row.rdmacm || row.kind == Kind::Perftest || row.program == "status";
        if leaves_none && self.ferroce.is_empty() {
            return Ok(());
        }
        let ferroce = |name| Counted::of(&self.ferroce, name);
        check("Ferroce", ferroce("rx_icrc_errors"), ferroce("rx_packets"), kernel("sent_pkts"))
    }

    fn check_good_network(&self, died: Option<Side>) -> Result<(), Failure> {
        for name in FERROCE_ZERO {
            if Counted::of(&self.ferroce, name) > 0 {
                return Err(Failure::new(format!("Ferroce counts {} {name}", self.ferroce[*name])));
            }
        }
        let ferroce_died = died == Some(Side::Ferroce);
        // Gaps that are no fault: a full socket buffer makes one, and so does rxe for what is under way when it says that no
        // receive is posted.
        let gaps = [
            ("out_of_seq_request", Counted::of(&self.kernel, "send_rnr_err")),
            // What a program dropped that was ended by force, nobody knows.
            ("rcvd_seq_err", if ferroce_died { u64::MAX } else { Counted::of(&self.ferroce, "rx_drop_full") }),
            ("send_err", 0),
        ];
        for (name, allowed) in gaps {
            let value = Counted::of(&self.kernel, name);
            if value > allowed {
                return Err(Failure::new(format!("rxe counts {value} {name}")));
            }
        }
        if died == Some(Side::Kernel) {
            // What still comes for its queue pair is dropped.
            return Ok(());
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
    use crate::table::{Fault, ROWS};

    /// Both ends checked ICRCs, and besides this.
    fn counted(kernel: &[(&str, u64)], ferroce: &[(&str, u64)]) -> Counted {
        let map = |pairs: &[&[(&str, u64)]]| pairs.concat().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let always = [("icrc_checked", 9), ("rcvd_pkts", 9), ("udp_datagrams", 9), ("sent_pkts", 9)];
        Counted { kernel: map(&[&always, kernel]), ferroce: map(&[&[("rx_packets", 9)], ferroce]) }
    }

    fn row(on: impl Fn(Option<Fault>) -> bool) -> &'static Row {
        ROWS.iter().find(|row| on(row.fault)).expect("there is such a row")
    }

    #[test]
    fn gaps_fail_unless_a_reason_is_known() {
        let good = row(|fault| fault.is_none());
        let check = |kernel: &[_], ferroce: &[_]| counted(kernel, ferroce).check(good, None);
        check(&[("rcvd_pkts", 100), ("udp_datagrams", 101)], &[]).expect("one came late");
        check(&[("rcvd_seq_err", 1)], &[]).expect_err("a gap");
        check(&[("rcvd_seq_err", 1)], &[("rx_drop_full", 9)]).expect("the buffer was full");
        check(&[("out_of_seq_request", 1)], &[]).expect_err("a gap");
        check(&[("out_of_seq_request", 1), ("send_rnr_err", 1)], &[]).expect("no receive was posted");
        check(&[("rcvd_pkts", 10), ("udp_datagrams", 30)], &[]).expect_err("rxe dropped most");
        check(&[], &[("rx_bad_pad", 1)]).expect_err("rxe's packets are well made");
    }

    #[test]
    fn a_program_that_was_ended_leaves_no_counters_and_a_queue_pair_that_is_gone() {
        let good = row(|fault| fault.is_none());
        let alone = Counted { ferroce: BTreeMap::new(), ..counted(&[("rcvd_seq_err", 1)], &[]) };
        alone.check(good, Some(Side::Ferroce)).expect("Ferroce's buffer may have been full");
        alone.check(good, Some(Side::Kernel)).expect_err("Ferroce's program lives");
        let dropped = counted(&[("rcvd_pkts", 10), ("udp_datagrams", 300)], &[]);
        dropped.check(good, Some(Side::Kernel)).expect("nobody is there");
        dropped.check(good, Some(Side::Ferroce)).expect_err("rxe's program lives");
        counted(&[("icrc_errors", 1)], &[]).check(good, Some(Side::Kernel)).expect_err("Ferroce's ICRC is right");
    }

    #[test]
    fn a_row_must_have_done_what_it_is_for() {
        let row = ROWS.iter().find(|row| !row.at_least.is_empty()).expect("there is such a row");
        counted(&[], &[]).check(row, None).expect_err("was not done");
        counted(row.at_least, &[]).check(row, None).expect("was done");
    }

    #[test]
    fn a_wrong_icrc_fails_unless_it_was_made_wrong() {
        let good = ROWS.iter().find(|row| row.kind == Kind::Own && row.fault.is_none()).expect("there is such a row");
        counted(&[], &[("rx_icrc_errors", 1)]).check(good, None).expect_err("rxe's ICRC is right");
        counted(&[("icrc_errors", 1)], &[]).check(good, None).expect_err("Ferroce's ICRC is right");
        counted(&[("icrc_checked", 0)], &[]).check(good, None).expect_err("the probe does not work");
        counted(&[], &[("rx_packets", 0)]).check(good, None).expect_err("Ferroce left no counters");
        counted(&[("sent_pkts", 0)], &[("rx_packets", 0)]).check(good, None).expect("rxe had nothing to say");
        let lost = ("fault_lost", 1);
        let bad = row(|fault| fault.is_some_and(|fault| !fault.corrupts));
        counted(&[], &[lost]).check(bad, None).expect("lost packets have no ICRC");
        counted(&[], &[]).check(bad, None).expect_err("the network was good");
        counted(&[("duplicate_request", 1)], &[]).check(bad, None).expect("something came twice");
        counted(&[("icrc_errors", 1)], &[lost]).check(bad, None).expect_err("those that came are right");
        let corrupt = row(|fault| fault.is_some_and(|fault| fault.corrupts));
        let both = counted(&[("icrc_errors", 1)], &[("rx_icrc_errors", 1), ("fault_corrupted", 2)]);
        both.check(corrupt, None).expect("both saw it");
        counted(&[], &[("rx_icrc_errors", 1), ("fault_corrupted", 2)]).check(corrupt, None).expect_err("rxe did not");
    }
}
