//! Figures, and how they are shown.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::plan::{Measure, Test};
use crate::output::{Out, Table};

/// Times of single messages.
#[derive(Debug, Default)]
pub(super) struct Latency {
    /// Nanoseconds.
    samples: Vec<u64>,
}

impl Latency {
    pub(super) fn add(&mut self, round_trip: Duration, halve: bool) {
        let nanos = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        self.samples.push(if halve { nanos / 2 } else { nanos });
    }

    pub(super) fn count(&self) -> u64 {
        self.samples.len() as u64
    }

    fn quantiles(mut self) -> Option<Quantiles> {
        self.samples.sort_unstable();
        let last = self.samples.len().checked_sub(1)?;
        let at = |share: f64| self.samples[(last as f64 * share).round() as usize] as f64 / 1000.0;
        Some(Quantiles { min: at(0.0), median: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) })
    }
}

/// Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Quantiles {
    min: f64,
    median: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// What one measurement gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) messages: u64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbit_per_second: Option<f64>,
    messages_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Quantiles>,
}

impl Figures {
    pub(super) fn bandwidth(messages: u64, size: u32, took: Duration) -> Figures {
        let seconds = took.as_secs_f64().max(1e-9);
        let rate = messages as f64 / seconds;
        Figures {
            messages,
            seconds,
            gbit_per_second: Some(rate * f64::from(size) * 8.0 / 1e9),
            messages_per_second: rate,
            latency_us: None,
        }
    }

    pub(super) fn latency(latency: Latency, took: Duration) -> Figures {
        let seconds = took.as_secs_f64().max(1e-9);
        let messages = latency.count();
        Figures {
            messages,
            seconds,
            gbit_per_second: None,
            messages_per_second: messages as f64 / seconds,
            latency_us: latency.quantiles(),
        }
    }
}

/// One line of the report.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    #[serde(serialize_with = "as_text")]
    pub(super) test: Test,
    pub(super) bytes: u32,
    #[serde(flatten)]
    pub(super) rdma: Figures,
    /// TCP doing the same right after.
    pub(super) tcp: Option<Figures>,
}

fn as_text<S: serde::Serializer>(test: &Test, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(test)
}

/// The circumstances.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    /// Device, interface and address.
    pub(super) client: String,
    /// The same of the server.
    pub(super) server: String,
    pub(super) path_mtu: u32,
    pub(super) queue_pairs: u32,
    /// `polling` or `events`.
    pub(super) mode: &'static str,
}

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    results: &'a [Outcome],
}

/// For programs.
pub(super) fn json(out: &mut Out, setting: &Setting, results: &[Outcome]) -> Result<()> {
    out.json(&Report { setting, results })
}

/// For people: the circumstances.
pub(super) fn heading(setting: &Setting) -> String {
    format!(
        "{} -> {}; RC, path MTU {}, queue pairs {}, {}",
        setting.client, setting.server, setting.path_mtu, setting.queue_pairs, setting.mode
    )
}

/// For people: a table of results of one kind.
pub(super) fn table(measure: Measure, results: &[Outcome]) -> Table {
    let mut table = match measure {
        Measure::Bandwidth => {
            Table::new(&["TEST", ">BYTES", ">MESSAGES", ">Gbit/s", ">Mmsg/s", ">TCP Gbit/s", ">OF TCP"])
        }
        Measure::Latency => Table::new(&[
            "TEST",
            ">BYTES",
            ">MESSAGES",
            ">MIN us",
            ">MEDIAN us",
            ">99% us",
            ">MAX us",
            ">TCP MEDIAN us",
            ">TCP 99% us",
        ]),
    };
    for outcome in results.iter().filter(|outcome| outcome.test.measure == measure) {
        let mut cells = vec![outcome.test.to_string(), outcome.bytes.to_string(), outcome.rdma.messages.to_string()];
        match measure {
            Measure::Bandwidth => {
                let ours = outcome.rdma.gbit_per_second;
                let tcp = outcome.tcp.and_then(|tcp| tcp.gbit_per_second);
                cells.push(number(ours, 3));
                cells.push(number(Some(outcome.rdma.messages_per_second / 1e6), 4));
                cells.push(number(tcp, 3));
                cells.push(number(ours.zip(tcp).map(|(ours, tcp)| ours / tcp), 2));
            }
            Measure::Latency => {
                let ours = outcome.rdma.latency_us;
                let tcp = outcome.tcp.and_then(|tcp| tcp.latency_us);
                let values = [
                    ours.map(|q| q.min),
                    ours.map(|q| q.median),
                    ours.map(|q| q.p99),
                    ours.map(|q| q.max),
                    tcp.map(|q| q.median),
                    tcp.map(|q| q.p99),
                ];
                cells.extend(values.map(|value| number(value, 2)));
            }
        }
        table.row(cells);
    }
    table
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::super::plan::Verb;
    use super::*;

    fn latency_of(micros: impl IntoIterator<Item = u64>) -> Latency {
        let mut latency = Latency::default();
        for micro in micros {
            latency.add(Duration::from_micros(micro), false);
        }
        latency
    }

    #[test]
    fn quantiles_of_known_samples() {
        let quantiles = latency_of((1..=1001).rev()).quantiles().expect("there are samples");
        assert_eq!(quantiles, Quantiles { min: 1.0, median: 501.0, p99: 991.0, p999: 1000.0, max: 1001.0 });
        assert_eq!(latency_of([]).quantiles(), None);
    }

    #[test]
    fn a_ping_pong_is_halved() {
        let mut latency = Latency::default();
        latency.add(Duration::from_micros(10), true);
        assert_eq!(latency.quantiles().expect("there is one").median, 5.0);
    }

    #[test]
    fn bandwidth_in_gigabits() {
        let outcome = Outcome {
            test: Test { verb: Verb::Write, measure: Measure::Bandwidth },
            bytes: 125_000,
            rdma: Figures::bandwidth(1000, 125_000, Duration::from_secs(1)),
            tcp: Some(Figures::bandwidth(2000, 125_000, Duration::from_secs(1))),
        };
        assert_eq!(
            table(Measure::Bandwidth, std::slice::from_ref(&outcome)).lines(),
            [
                "TEST       BYTES  MESSAGES  Gbit/s  Mmsg/s  TCP Gbit/s  OF TCP",
                "write-bw  125000      1000   1.000  0.0010       2.000    0.50",
            ]
        );
        let json = serde_json::to_value(&outcome).expect("can be JSON");
        assert_eq!((&json["test"], &json["gbit_per_second"]), (&"write-bw".into(), &1.0.into()));
        assert_eq!(json["tcp"]["messages"], 2000);
    }
}
