//! What stock programs print, as numbers.

use crate::failure::Failure;

/// One row of perftest's table of results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Message size in bytes.
    pub bytes: u64,
    /// Average bandwidth in MB/s (2^20 bytes), or average latency in us.
    pub average: f64,
}

/// The table of results of a perftest program; empty if it printed none.
pub fn perftest(stdout: &str) -> Result<Vec<Row>, Failure> {
    let mut column = None;
    let mut rows = Vec::new();
    for line in stdout.lines() {
        if line.trim_start().starts_with("#bytes") {
            column = Some(average_column(line)?);
            continue;
        }
        let Some(column) = column else { continue };
        let numbers: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
        let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) else { continue };
        let Some(&average) = numbers.get(column) else {
            return Err(Failure::new(format!("a row of the table is too short: {line:?}")));
        };
        rows.push(Row { bytes: numbers[0] as u64, average });
    }
    Ok(rows)
}

/// The column of the average, counted from 0, by the table's head.
fn average_column(head: &str) -> Result<usize, Failure> {
    let average = ["BW average", "t_avg"].iter().find_map(|name| head.find(name));
    let average = average.ok_or_else(|| Failure::new(format!("the table has no average: {head:?}")))?;
    // Columns have blanks in their names ("BW peak[MB/sec]"), but a known first word.
    const FIRST_WORDS: [&str; 9] =
        ["#bytes", "#iterations", "BW", "MsgRate", "t_min", "t_max", "t_typical", "t_avg", "t_stdev"];
    let before = head[..average].split_whitespace();
    Ok(before.filter(|word| FIRST_WORDS.iter().any(|first| word.starts_with(first))).count())
}

/// What an `ibv_*_pingpong` moved: bytes and iterations.
pub fn pingpong(stdout: &str) -> Option<(u64, u64)> {
    let number_before = |what: &str| {
        let line = stdout.lines().find(|line| line.contains(what))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some((number_before(" bytes in ")?, number_before(" iters in ")?))
}

/// The GIDs that `ibv_devinfo -v` lists for its first device: index and text.
pub fn gids(devinfo: &str) -> Vec<(u32, String)> {
    let first = devinfo.split("hca_id:").nth(1).unwrap_or(devinfo);
    first
        .lines()
        .filter_map(|line| {
            let rest = line.trim_start().strip_prefix("GID[")?;
            let (index, rest) = rest.split_once("]:")?;
            let gid = rest.trim().split([',', ' ']).next()?;
            Some((index.trim().parse().ok()?, gid.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : ferroce0
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0x3a4a89 RKey 0x000184 VAddr 0x007f0c6d5c2000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 2          5000             0.52               0.51 \t\t     0.267387
 4          5000             0.95               0.94 \t\t     0.246415
---------------------------------------------------------------------------------------
";
    const LATENCY: &str = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 2       1000          3.25           31.45        3.37     \t       3.62        \t0.75   \t\t5.00    \t\t31.45  
---------------------------------------------------------------------------------------
";
    const LATENCY_DURATION: &str = " #bytes        #iterations       t_avg[usec]    tps average\n 2             341052            4.40           113684.11\n";

    #[test]
    fn tables_of_perftest() {
        let rows = perftest(BANDWIDTH).expect("is a table");
        assert_eq!(rows, [Row { bytes: 2, average: 0.51 }, Row { bytes: 4, average: 0.94 }]);
        assert_eq!(perftest(LATENCY).expect("is a table"), [Row { bytes: 2, average: 3.62 }]);
        assert_eq!(perftest(LATENCY_DURATION).expect("is a table"), [Row { bytes: 2, average: 4.40 }]);
        assert_eq!(perftest("IB device not found\n").expect("no table"), []);
        perftest(" #bytes #iterations\n 2 1000\n").expect_err("has no average");
        perftest(" #bytes #iterations BW peak[MB/sec] BW average[MB/sec]\n 2 1000\n").expect_err("a short row");
    }

    #[test]
    fn what_a_pingpong_moved() {
        let out = "  local address:  LID 0x0000, QPN 0x000011, PSN 0x5b5fc0, GID ::ffff:10.0.0.1\n\
                   8192000 bytes in 0.02 seconds = 3276.80 Mbit/sec\n1000 iters in 0.02 seconds = 20.00 usec/iter\n";
        assert_eq!(pingpong(out), Some((8_192_000, 1000)));
        assert_eq!(pingpong("Couldn't get device\n"), None);
    }

    #[test]
    fn gids_of_the_first_device() {
        let out = "hca_id:\tferroce0\n\t\tport:\t1\n\t\t\tGID[  0]:\t\t::ffff:10.0.0.1, RoCE v2\n\
                   \t\t\tGID[  1]:\t\tfd00::1, RoCE v2\nhca_id:\tferroce1\n\t\t\tGID[  0]:\t\tfe80::1, RoCE v2\n";
        assert_eq!(gids(out), [(0, "::ffff:10.0.0.1".to_owned()), (1, "fd00::1".to_owned())]);
    }
}
