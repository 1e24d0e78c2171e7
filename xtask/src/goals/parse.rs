//! What the programs print, as numbers.

use anyhow::{Context, Result};
use serde_json::Value;

use super::subject::{Measure, Sample};

/// The table of a perftest program that ran one size: the last row by the names of its columns.
pub(super) fn perftest(stdout: &str) -> Result<Sample> {
    let mut lines = stdout.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let columns = columns(lines.next().context("there is no table")?);
    let numbers = |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
    let row = lines.filter_map(numbers).filter(|row| !row.is_empty()).last().context("the table has no numbers")?;
    let value = |name: &str| {
        let place = columns.iter().position(|column| column.starts_with(name))?;
        row.get(place).copied()
    };
    let mut sample = Sample::new();
    let latencies =
        [("t_avg", Measure::Latency), ("t_typical", Measure::Median), ("99%", Measure::P99), ("99.9%", Measure::P999)];
    for (name, measure) in latencies {
        sample.extend(value(name).map(|us| (measure, us)));
    }
    if let Some(average) = value("BW average") {
        let bytes = value("#bytes").context("no size")?;
        // Each of the two columns has few digits where it is small.
        let millions = value("MsgRate").filter(|millions| *millions > 0.1);
        let millions = millions.unwrap_or(average * 1_048_576.0 / bytes / 1e6);
        sample.extend(rates(millions * 1e6, bytes));
    }
    if sample.is_empty() {
        anyhow::bail!("the table has no known column: {columns:?}");
    }
    Ok(sample)
}

/// Names of the columns, of which some have blanks in them: `BW average[MB/sec]`, `99% percentile[usec]`.
fn columns(head: &str) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    for word in head.split_whitespace() {
        match columns.last_mut() {
            Some(last) if ["peak", "average", "percentile"].iter().any(|more| word.starts_with(more)) => {
                *last = format!("{last} {word}");
            }
            _ => columns.push(word.to_owned()),
        }
    }
    columns
}

/// The JSON of `ferroce perf` with one test of one size, and how many messages it was.
pub(super) fn perf(json: &str) -> Result<(Sample, f64)> {
    let report: Value = serde_json::from_str(json).context("no JSON")?;
    let result = report["results"].get(0).context("the report has no result")?;
    let number = |name: &str| result[name].as_f64().with_context(|| format!("the report lacks {name}"));
    Ok((rates(number("messages_per_second")?, number("bytes")?).into(), number("messages")?))
}

/// What iperf3 reports in JSON, and how many messages of `bytes` it was.
pub(super) fn iperf3(json: &str, bytes: u32) -> Result<(Sample, f64)> {
    let report: Value = serde_json::from_str(json).context("no JSON")?;
    let received = &report["end"]["sum_received"];
    let number = |name: &str| received[name].as_f64().with_context(|| format!("the report lacks {name}"));
    let per_second = number("bits_per_second")? / 8.0 / f64::from(bytes);
    Ok((rates(per_second, f64::from(bytes)).into(), number("bytes")? / f64::from(bytes)))
}

/// Lines of a name and a number, as the programs of `xtask/programs` print them; gives the number of messages, too.
pub(super) fn own(stdout: &str, bytes: u32) -> Result<(Sample, f64)> {
    let value = |name: &str| {
        let line = stdout.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.trim().parse::<f64>().ok()
    };
    let known = [
        ("mean_us", Measure::Latency),
        ("median_us", Measure::Median),
        ("p99_us", Measure::P99),
        ("p999_us", Measure::P999),
        ("register_us", Measure::Time),
        ("core_percent", Measure::Core),
    ];
    let mut sample: Sample = known.into_iter().filter_map(|(name, measure)| Some((measure, value(name)?))).collect();
    let messages = value("messages").unwrap_or_default();
    if let Some(seconds) = value("seconds") {
        sample.extend(rates(messages / seconds, f64::from(bytes)));
    }
    if sample.is_empty() {
        anyhow::bail!("there is no known name");
    }
    Ok((sample, messages))
}

/// The CSV of ucx_perftest (`-f -v`): the last line has the figures of the whole run.
pub(super) fn ucx(csv: &str, bytes: u32) -> Result<Sample> {
    let mut lines = csv.lines().filter(|line| line.contains(','));
    let head = lines.next().context("there is no table")?;
    let last = lines.next_back().context("the table has no numbers")?;
    let value = |name: &str| -> Result<f64> {
        let place = head.split(',').position(|column| column == name).with_context(|| format!("no column {name}"))?;
        let word = last.split(',').nth(place).with_context(|| format!("a line is too short: {last:?}"))?;
        word.parse().with_context(|| format!("no number: {word:?}"))
    };
    let mut sample = Sample::from(rates(value("overall_mr")?, f64::from(bytes)));
    sample.insert(Measure::Latency, value("overall_lat")?);
    Ok(sample)
}

/// The table of fi_pingpong, whose times are those of one way.
pub(super) fn fabric(stdout: &str) -> Result<Sample> {
    let mut lines = stdout.lines().skip_while(|line| !line.starts_with("bytes"));
    let head = lines.next().context("there is no table")?;
    let place = head.split_whitespace().position(|name| name == "usec/xfer").context("no column usec/xfer")?;
    let row = lines.next().context("the table has no numbers")?;
    let word = row.split_whitespace().nth(place).with_context(|| format!("a line is too short: {row:?}"))?;
    Ok(Sample::from([(Measure::Latency, word.parse().with_context(|| format!("no number: {word:?}"))?)]))
}

fn rates(per_second: f64, bytes: f64) -> [(Measure, f64); 2] {
    [(Measure::Messages, per_second / 1e6), (Measure::Rate, per_second * bytes * 8.0 / 1e9)]
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lines of real output; what is not looked at was left out.

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : ferroce0
 TX depth        : 128
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0x3a4a89 RKey 0x000184 VAddr 0x007f0c6d5c2000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 8          5000             2.52               2.04 \t\t     0.267387
---------------------------------------------------------------------------------------
";
    const LARGE: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 8388608    384              9000.12            8000.00            0.001000
";
    const LATENCY: &str = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 2       1000          3.25           31.45        3.37     \t       3.62        \t0.75   \t\t5.00    \t\t31.45  
---------------------------------------------------------------------------------------
";
    const IPERF3: &str = r#"{"start": {}, "end": {"sum_sent": {"bytes": 1}, "sum_received": {"start": 0, "end": 1.009238,
        "seconds": 1.009238, "bytes": 3145728, "bits_per_second": 25165824.0, "sender": true}}}"#;
    const PERF: &str = r#"{"client": "ferroce0 (lo, 127.0.0.1)", "path_mtu": 4096, "queue_pairs": 1, "mode": "events",
        "results": [{"test": "write-bw", "bytes": 65536, "messages": 205, "seconds": 0.205, "gbit_per_second": 0.524288,
        "messages_per_second": 1000.0, "tcp": null}]}"#;
    const UCX: &str = "\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
10000,6.558,29.278,26.808,0.07,0.07,34156,37302
200000,0.761,3.054,3.055,2.50,2.50,327434,250000
";
    const FABRIC: &str = "\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      2k      =2k      250k        2.27s      0.11     567.89       0.00
";

    #[test]
    fn perftest_s_tables() {
        let small = perftest(BANDWIDTH).expect("is a table");
        assert_eq!(small[&Measure::Messages], 0.267387);
        assert!((small[&Measure::Rate] - 0.267387 * 0.064).abs() < 1e-9, "{small:?}");
        let large = perftest(LARGE).expect("is a table");
        assert!((large[&Measure::Rate] - 67.108864).abs() < 1e-9, "not from the rate of messages: {large:?}");
        let latency = perftest(LATENCY).expect("is a table");
        let values = [Measure::Latency, Measure::Median, Measure::P99, Measure::P999].map(|measure| latency[&measure]);
        assert_eq!(values, [3.62, 3.37, 5.0, 31.45]);
    }

    #[test]
    fn what_is_no_table_is_an_error() {
        for wrong in ["", "IB device not found\n", " #bytes #iterations\n", " #bytes #iterations\n 2 1000\n"] {
            assert!(perftest(wrong).is_err(), "{wrong:?}");
        }
        for wrong in ["", "iterations,overall_lat\n", "iterations,overall_lat\n1,2\n", "overall_lat,overall_mr\n1\n"] {
            assert!(ucx(wrong, 8).is_err(), "{wrong:?}");
        }
        for wrong in ["", "bytes #sent\n64 2k\n", "bytes #sent usec/xfer\n", "bytes usec/xfer\n64\n"] {
            assert!(fabric(wrong).is_err(), "{wrong:?}");
        }
        assert!(iperf3("", 8).is_err() && iperf3("{\"end\": {}}", 8).is_err());
        assert!(own("", 8).is_err() && own("messages 5\n", 8).is_err());
    }

    #[test]
    fn ferroce_perf_s_report() {
        let (sample, messages) = perf(PERF).expect("is a report");
        assert_eq!((sample[&Measure::Messages], messages), (0.001, 205.0));
        assert!((sample[&Measure::Rate] - 0.524288).abs() < 1e-9, "{sample:?}");
        assert!(perf("{\"results\": []}").is_err() && perf("{\"results\": [{}]}").is_err() && perf("").is_err());
    }

    #[test]
    fn iperf3_s_report() {
        let (sample, messages) = iperf3(IPERF3, 1 << 20).expect("is a report");
        assert_eq!(messages, 3.0);
        assert_eq!(sample, Sample::from([(Measure::Messages, 3e-6), (Measure::Rate, 0.025165824)]));
    }

    #[test]
    fn the_whole_run_of_ucx() {
        let sample = ucx(UCX, 8).expect("is a table");
        let wanted = [(Measure::Rate, 0.016), (Measure::Messages, 0.25), (Measure::Latency, 3.055)];
        assert_eq!(sample, Sample::from(wanted));
    }

    #[test]
    fn fi_pingpong_s_table() {
        assert_eq!(fabric(FABRIC).expect("is a table"), Sample::from([(Measure::Latency, 567.89)]));
    }

    #[test]
    fn lines_of_our_own_programs() {
        let (sample, messages) = own("messages 4000000\nseconds 2.000000\n", 8).expect("has lines");
        assert_eq!((sample[&Measure::Messages], sample[&Measure::Rate], messages), (2.0, 0.128, 4e6));
        let text = "messages 29114\nmean_us 17.256\nmedian_us 3.770\np99_us 11.808\np999_us 4055.855\n";
        let (sample, messages) = own(text, 2).expect("has lines");
        let values = [Measure::Latency, Measure::Median, Measure::P99, Measure::P999].map(|measure| sample[&measure]);
        assert_eq!((values, messages), ([17.256, 3.770, 11.808, 4055.855], 29114.0));
        let core = Sample::from([(Measure::Core, 0.25)]);
        assert_eq!(own("core_percent 0.250000\n", 0).expect("has lines").0, core);
        let time = Sample::from([(Measure::Time, 12.5)]);
        assert_eq!(own("register_us 12.500\n", 4096).expect("has lines").0, time);
    }
}
