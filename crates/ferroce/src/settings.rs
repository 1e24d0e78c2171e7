//! What variables of the environment make of programs, told to people before a program fails or does otherwise than expected.

use ferroce_service::environment;

use crate::error::Error;
use crate::link::SameHost;
use crate::{counters_file, link};

/// A variable that is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    /// What programs do by it, or why they cannot open a device with it.
    pub effect: Result<String, Error>,
}

/// Of each variable that changes what programs do and is set: how, or what is wrong with it. No file is made for it.
pub fn settings() -> Vec<Setting> {
    type Look = fn() -> Result<Option<&'static str>, Error>;
    let looks: [(&'static str, Look); 5] = [
        ("FERROCE_LOG", || {
            let is_level = |value: &std::ffi::OsStr| value.to_string_lossy().trim().parse::<log::LevelFilter>().is_ok();
            let told = "this is no level (error, warn, info, debug, trace or off), and taken for warn";
            Ok(environment::var_os("FERROCE_LOG").filter(|value| !is_level(value)).map(|_| told))
        }),
        ("FERROCE_SAME_HOST", || {
            Ok(match link::same_host()? {
                SameHost::Ring => None,
                SameHost::Udp => Some("packets between programs of this host go over UDP, not through memory"),
                SameHost::Fetch => Some(
                    "large WRITEs between programs of this host are fetched from the sender's memory: these programs trust each other",
                ),
            })
        }),
        ("FERROCE_FAULT", || {
            let told = "packets are lost, delayed or damaged on purpose, those between programs of this host, too";
            Ok(link::faults()?.map(|_| told))
        }),
        ("FERROCE_PCAP", || {
            let told = "programs capture their packets; those between programs of this host go over UDP, too";
            Ok(link::capture_could_be_written()?.then_some(told))
        }),
        ("FERROCE_COUNTERS", || {
            Ok(counters_file::could_be_written()?.then_some("programs leave their counters there as they end"))
        }),
    ];
    let seen = |(name, look): (&'static str, Look)| {
        let effect = look().transpose()?;
        let value = environment::var_os(name).unwrap_or_default();
        Some(Setting { name, effect: effect.map(|effect| format!("{name} is {value:?}: {effect}")) })
    };
    looks.into_iter().filter_map(seen).collect()
}
