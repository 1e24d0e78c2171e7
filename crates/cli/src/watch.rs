//! `--watch`: the same again, every so often.

use std::time::Duration;

use anyhow::Result;

use crate::output::Out;

/// Options of commands that can repeat themselves.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct WatchArgs {
    /// Show it again every SECONDS, until interrupted (1 if no number is given; 0.1 at least)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = interval)]
    watch: Option<Duration>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err("from 0.1 to 86400 seconds".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

impl WatchArgs {
    /// Shows once, or again and again; `clear`: on a terminal, each time in the place of the last.
    pub(crate) fn run(self, clear: bool, mut show: impl FnMut(&mut Out) -> Result<()>) -> Result<u8> {
        let mut out = Out::new();
        loop {
            if self.watch.is_some() && clear {
                out.clear()?;
            }
            show(&mut out)?;
            match self.watch {
                Some(interval) => std::thread::sleep(interval),
                None => return Ok(0),
            }
        }
    }

    /// Is it shown again and again?
    pub(crate) fn repeats(self) -> bool {
        self.watch.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "1e9", "inf", "nan", "x"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
