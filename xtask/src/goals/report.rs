//! What came of the rows: as tables, and as JSON.

use serde_json::{Value, json};

use super::Measured;
use super::profile::{Profile, Profiler};
use super::rows::{Row, Set};
use super::subject::Measure;
use crate::bench::median;

/// A row and what was measured for it.
pub(super) struct Outcome<'a> {
    pub(super) row: &'a Row,
    /// Why it cannot be measured here, if so.
    pub(super) missing: Option<String>,
    /// Values of all runs.
    pub(super) ours: Vec<f64>,
    pub(super) theirs: Vec<f64>,
    pub(super) errors: Vec<String>,
}

impl<'a> Outcome<'a> {
    pub(super) fn new(row: &'a Row, missing: Option<String>) -> Outcome<'a> {
        Outcome { row, missing, ours: Vec::new(), theirs: Vec::new(), errors: Vec::new() }
    }

    /// Takes the numbers of a run, and tells them in words.
    pub(super) fn add(&mut self, ours: Measured, theirs: Option<Measured>) -> String {
        let measure = self.row.measure;
        let ours = take(ours, measure, &mut self.ours, &mut self.errors);
        let theirs = theirs.map(|theirs| take(theirs, measure, &mut self.theirs, &mut self.errors));
        match theirs {
            Some(theirs) => format!("{ours} against {theirs}"),
            None => ours,
        }
    }

    /// Ours by theirs, of the medians.
    fn ratio(&self) -> Option<f64> {
        let ratio = median(&self.ours) / median(&self.theirs);
        ratio.is_finite().then_some(ratio)
    }

    /// The ratio is what is wanted; `None` if nothing is wanted or known.
    fn is_met(&self) -> Option<bool> {
        Some(self.row.wanted?.is_met(self.ratio()?))
    }

    fn remark(&self) -> String {
        match (&self.missing, self.errors.last(), self.is_met()) {
            (Some(why), ..) => why.lines().next().unwrap_or_default().to_owned(),
            (None, Some(_), _) => format!("failed, {} of the measurements", self.errors.len()),
            (None, None, Some(true)) => "reached".into(),
            (None, None, Some(false)) => "not reached".into(),
            (None, None, None) => String::new(),
        }
    }

    fn line(&self) -> String {
        let (label, with) = (self.row.label(), self.row.with());
        let cells = [
            label,
            self.row.measure.name().into(),
            self.row.measure.unit().into(),
            middle(&self.ours),
            spread(&self.ours),
            with,
            middle(&self.theirs),
            spread(&self.theirs),
            self.ratio().map(number).unwrap_or_default(),
            self.row.wanted.map(|wanted| wanted.to_string()).unwrap_or_default(),
            self.remark(),
        ];
        format!("| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))
    }

    fn json(&self) -> Value {
        let side = |name: String, values: &[f64]| {
            let (low, high) = ends(values).unzip();
            let middle = (!values.is_empty()).then(|| median(values));
            json!({ "name": name, "median": middle, "min": low, "max": high, "values": values })
        };
        json!({
            "set": self.row.set.to_string(),
            "row": self.row.label(),
            "measure": self.row.measure.name(),
            "unit": self.row.measure.unit(),
            "ours": side("Ferroce".into(), &self.ours),
            "theirs": self.row.theirs.map(|_| side(self.row.with(), &self.theirs)),
            "ratio": self.ratio(),
            "wanted": self.row.wanted.map(|wanted| wanted.to_string()),
            "reached": self.is_met(),
            "missing": self.missing,
            "errors": self.errors,
        })
    }
}

/// Puts the number of `measure` to `values`, or the error to `errors`; tells which.
fn take(measured: Measured, measure: Measure, values: &mut Vec<f64>, errors: &mut Vec<String>) -> String {
    let value = measured.and_then(|sample| {
        sample.get(&measure).copied().ok_or_else(|| format!("the program does not tell its {}", measure.name()))
    });
    match value {
        Ok(value) => {
            values.push(value);
            format!("{} {}", number(value), measure.unit())
        }
        Err(why) => {
            errors.push(why.clone());
            format!("(failed: {why})")
        }
    }
}

/// The tables, a line each; sets with a heading of their own.
pub(super) fn table(outcomes: &[Outcome<'_>]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut set = None;
    for outcome in outcomes {
        if set.replace(outcome.row.set) != Some(outcome.row.set) {
            lines.extend(heading(outcome.row.set));
        }
        lines.push(outcome.line());
    }
    lines
}

fn heading(set: Set) -> [String; 5] {
    [
        String::new(),
        format!("**{set}**"),
        String::new(),
        "| what | measure | unit | Ferroce | min to max | compared with | there | min to max | ratio | wanted | |"
            .into(),
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|---|".into(),
    ]
}

/// A subject and what both ends of it did under a profiler.
pub(super) struct Profiled {
    pub(super) name: String,
    pub(super) profiler: Profiler,
    /// `None`: inside a virtual machine, where nothing counts.
    pub(super) ends: Option<Result<[Profile; 2], String>>,
}

impl Profiled {
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.ends, Some(Err(_)))
    }

    /// A line of progress.
    pub(super) fn in_words(&self) -> String {
        match &self.ends {
            None => "inside a virtual machine, has none".into(),
            Some(Err(why)) => format!("(failed: {why})"),
            Some(Ok(ends)) => {
                let instructions = ends.iter().map(|end| {
                    let (per, units) = end.per();
                    let user = end.counts.instructions_user.map_or("?".into(), |user| number(user / units));
                    format!("{} {user} instructions of a {}", end.end.name(), per.name())
                });
                instructions.collect::<Vec<_>>().join(", ")
            }
        }
    }

    fn lines(&self) -> Vec<String> {
        let name = self.name.replace('|', "\\|");
        match &self.ends {
            None => vec![format!("| {name} | | none: inside a virtual machine | | | | | | | | |")],
            Some(Err(why)) => {
                // What the programs complained of comes first.
                let why = why.lines().next_back().unwrap_or_default().replace('|', "\\|");
                vec![format!("| {name} | | failed: {why} | | | | | | | | |")]
            }
            Some(Ok(ends)) => ends.iter().map(|end| line_of_end(&name, end)).collect(),
        }
    }

    fn json(&self) -> Value {
        let ends = self.ends.as_ref().and_then(|ends| ends.as_ref().ok());
        let why = match &self.ends {
            None => Some("inside a virtual machine nothing counts"),
            Some(Err(why)) => Some(why.as_str()),
            Some(Ok(_)) => None,
        };
        json!({
            "name": self.name,
            "profiler": self.profiler.name(),
            "ends": ends.map(|ends| ends.each_ref().map(json_of_end)),
            "missing": why,
        })
    }
}

fn line_of_end(name: &str, end: &Profile) -> String {
    let (per, units) = end.per();
    let file = end.report.file_name().unwrap_or_default().to_string_lossy();
    let counts = end.counts.all().map(|count| quotient(count, units));
    let whole = |count: f64| if count > 0.0 { format!("{count:.0}") } else { String::new() };
    let traffic = [end.packets.sent, end.packets.received, end.messages].map(whole);
    format!(
        "| {name} | {} | {} | {} | {} | {file} |",
        end.end.name(),
        per.name(),
        counts.join(" | "),
        traffic.join(" | ")
    )
}

fn json_of_end(end: &Profile) -> Value {
    let (per, units) = end.per();
    let [user, kernel, cycles, misses] = end.counts.all().map(|count| count.map(|count| count / units));
    json!({
        "end": end.end.name(),
        "per": per.name(),
        "instructions_user": user,
        "instructions_kernel": kernel,
        "cycles": cycles,
        "cache_misses": misses,
        "packets_sent": end.packets.sent,
        "packets_received": end.packets.received,
        "messages": end.messages,
        "report": end.report.to_string_lossy(),
    })
}

fn quotient(count: Option<f64>, units: f64) -> String {
    count.map(|count| number(count / units)).unwrap_or_default()
}

/// The table of profiles, a line each.
pub(super) fn profiles(profiled: &[Profiled]) -> Vec<String> {
    let Some(first) = profiled.first() else { return Vec::new() };
    let misses = match first.profiler {
        Profiler::Perf => "cache misses",
        Profiler::Callgrind => "cache misses, simulated",
    };
    let mut lines = vec![
        String::new(),
        format!("**profiles, by {}**", first.profiler.name()),
        String::new(),
        format!(
            "| what | end | for each | instructions, user | instructions, kernel | cycles | {misses} | packets sent | packets received | messages | report |"
        ),
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|".into(),
    ];
    lines.extend(profiled.iter().flat_map(Profiled::lines));
    lines
}

/// For programs: where, how, all rows, and profiles if there are any.
pub(super) fn json(outcomes: &[Outcome<'_>], profiled: &[Profiled], runs: u32, seconds: f64) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rows: Vec<Value> = outcomes.iter().map(Outcome::json).collect();
    let profiles: Vec<Value> = profiled.iter().map(Profiled::json).collect();
    let report = json!({ "cores": cores, "runs": runs, "seconds": seconds, "rows": rows, "profiles": profiles });
    serde_json::to_string_pretty(&report).expect("plain data")
}

fn middle(values: &[f64]) -> String {
    if values.is_empty() { String::new() } else { number(median(values)) }
}

fn spread(values: &[f64]) -> String {
    ends(values).map(|(low, high)| format!("{} to {}", number(low), number(high))).unwrap_or_default()
}

fn ends(values: &[f64]) -> Option<(f64, f64)> {
    let low = values.iter().copied().min_by(f64::total_cmp)?;
    let high = values.iter().copied().max_by(f64::total_cmp)?;
    Some((low, high))
}

/// Three digits that count, or all before the point.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 0.1 => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::counted::{Counts, Packets};
    use crate::goals::profile::End;
    use crate::goals::rows::{Wanted, rows};
    use crate::goals::subject::Sample;

    fn sample(gbit: f64) -> Measured {
        Ok(Sample::from([(Measure::Rate, gbit)]))
    }

    /// A row that wants at least 4 times as much.
    fn row() -> Row {
        let row = rows().remove(0);
        assert_eq!((row.measure, row.wanted), (Measure::Rate, Some(Wanted::AtLeast(4.0))));
        row
    }

    #[test]
    fn medians_are_compared() {
        let row = row();
        let mut outcome = Outcome::new(&row, None);
        for (ours, theirs) in [(1.0, 4.0), (3.0, 8.0), (2.0, 4.0)] {
            outcome.add(sample(ours), Some(sample(theirs)));
        }
        let line = outcome.line();
        let wanted = "| 2.00 | 1.00 to 3.00 | TCP (iperf3) | 4.00 | 4.00 to 8.00 | 0.500 | >= 4 | not reached |";
        assert!(line.ends_with(wanted), "{line}");
        outcome.ours = vec![16.0];
        assert!(outcome.line().ends_with("| >= 4 | reached |"), "{}", outcome.line());
    }

    #[test]
    fn a_line_has_a_cell_for_each_heading() {
        let row = row();
        let lines = table(&[Outcome::new(&row, Some("no netem\nbecause".into()))]);
        let cells = |line: &str| line.matches('|').count();
        assert!(lines[3..].iter().all(|line| cells(line) == 12), "{lines:#?}");
        assert!(lines[5].ends_with("| no netem |"), "{lines:#?}");
    }

    #[test]
    fn failures_are_told_and_nothing_is_reached_by_them() {
        let row = row();
        let mut outcome = Outcome::new(&row, None);
        assert!(outcome.add(Err("it ended".into()), Some(sample(1.0))).contains("it ended"));
        assert!(outcome.add(Ok(Sample::new()), Some(sample(1.0))).contains("does not tell its rate"));
        assert!(outcome.line().ends_with("| failed, 2 of the measurements |"), "{}", outcome.line());
        assert_eq!(outcome.is_met(), None);
        outcome.add(sample(8.0), Some(sample(1.0)));
        assert!(
            outcome.line().ends_with("| failed, 2 of the measurements |"),
            "not reached by one of three: {}",
            outcome.line()
        );
    }

    #[test]
    fn json_has_what_the_table_has() {
        let row = row();
        let mut outcome = Outcome::new(&row, None);
        outcome.add(sample(8.0), Some(sample(2.0)));
        let nothing = Outcome::new(&row, Some("no netem".into()));
        let report: Value = serde_json::from_str(&json(&[outcome, nothing], &[], 1, 0.5)).expect("is JSON");
        let [first, second] = [&report["rows"][0], &report["rows"][1]];
        assert_eq!((&first["ratio"], &first["reached"], &first["wanted"]), (&json!(4.0), &json!(true), &json!(">= 4")));
        assert_eq!(first["theirs"]["values"], json!([2.0]));
        assert_eq!((&second["missing"], &second["ours"]["median"]), (&json!("no netem"), &Value::Null));
        assert_eq!((&report["runs"], &report["seconds"]), (&json!(1), &json!(0.5)));
    }

    #[test]
    fn profiles_are_shown_by_packet_or_why_there_are_none() {
        let counts = Counts {
            instructions_user: Some(900.0),
            instructions_kernel: Some(90.0),
            cycles: None,
            cache_misses: Some(1.0),
        };
        let end = |end, sent, messages| Profile {
            end,
            counts,
            packets: Packets { sent, received: 0.0 },
            messages,
            report: "/kept/a.txt".into(),
        };
        let ends = [end(End::Server, 9.0, 3.0), end(End::Client, 0.0, 3.0)];
        let all = [Some(Ok(ends)), Some(Err("it\nended".to_owned())), None].map(|ends| Profiled {
            name: "WRITE".into(),
            profiler: Profiler::Perf,
            ends,
        });
        let lines = profiles(&all);
        assert!(
            lines.contains(&"| WRITE | server | packet | 100 | 10.0 |  | 0.111 | 9 |  | 3 | a.txt |".to_owned()),
            "{lines:#?}"
        );
        assert!(
            lines.contains(&"| WRITE | client | message | 300 | 30.0 |  | 0.333 |  |  | 3 | a.txt |".to_owned()),
            "{lines:#?}"
        );
        assert!(lines[3..].iter().all(|line| line.matches('|').count() == 12), "{lines:#?}");
        assert!(all[1].has_failed() && !all[0].has_failed() && !all[2].has_failed());
        let report: Value = serde_json::from_str(&json(&[], &all, 1, 0.5)).expect("is JSON");
        let first = &report["profiles"][0]["ends"][0];
        assert_eq!(
            (&first["per"], &first["instructions_user"], &first["cycles"]),
            (&json!("packet"), &json!(100.0), &Value::Null)
        );
        assert_eq!(report["profiles"][1]["missing"], json!("it\nended"));
        assert!(profiles(&[]).is_empty());
    }

    #[test]
    fn numbers_have_the_digits_that_count() {
        let shown = [1234.5, 56.78, 5.678, 0.5678, 0.01234].map(number);
        assert_eq!(shown, ["1234", "56.8", "5.68", "0.568", "0.0123"]);
    }
}
