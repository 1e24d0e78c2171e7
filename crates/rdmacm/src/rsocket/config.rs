//! Defaults of the host: the files below /etc/rdma/rsocket that rsocket(7) names. What is missing or no number stays as rdma-core has it.

use std::sync::OnceLock;
use std::time::Duration;

use super::options::{BUFFER_MAX, Sizes};
use ferroce_rsocket::{LOW_WATER, from_scaled, to_scaled};

const FOLDER: &str = "/etc/rdma/rsocket";

/// Defaults.
pub(super) struct Config {
    pub(super) sizes: Sizes,
    /// How long a thread that must wait looks again and again before it sleeps.
    pub(super) polling: Duration,
}

pub(super) fn get() -> &'static Config {
    static ONCE: OnceLock<Config> = OnceLock::new();
    ONCE.get_or_init(|| read(|name| std::fs::read_to_string(format!("{FOLDER}/{name}")).ok()))
}

fn read(file: impl Fn(&str) -> Option<String>) -> Config {
    const QUEUE: u16 = 384;
    const INLINE: u16 = 64;
    const BUFFER: u32 = 1 << 17;
    const POLLING_US: u32 = 10;
    let number = |name: &str, default: u32| {
        file(name).and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(default)
    };
    let short = |name: &str, default: u16| u16::try_from(number(name, default.into())).unwrap_or(u16::MAX);
    Config {
        sizes: Sizes {
            send_queue: short("sqsize_default", QUEUE),
            receive_queue: short("rqsize_default", QUEUE),
            send_buffer: number("wmem_default", BUFFER).clamp(2 * LOW_WATER, BUFFER_MAX),
            receive_buffer: number("mem_default", BUFFER).clamp(2, BUFFER_MAX) & !1,
            inline: short("inline_default", INLINE),
            iomaps: from_scaled(to_scaled(number("iomap_size", 0))),
        },
        polling: Duration::from_micros(number("polling_time", POLLING_US).into()),
    }
}
