//! The only clock below the public API.

use std::sync::LazyLock;
use std::time::Instant;

use ferroce_transport::Nanos;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Monotonic nanoseconds since the first call in this process; never 0.
pub(crate) fn now() -> Nanos {
    let elapsed = START.elapsed();
    elapsed.as_secs() * 1_000_000_000 + u64::from(elapsed.subsec_nanos()) + 1
}
