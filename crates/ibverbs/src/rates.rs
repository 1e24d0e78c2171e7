//! Rates of address handles: `enum ibv_rate` to and from multiples of 2.5 Gbit/s and Mbit/s.

use std::ffi::c_int;

/// `enum ibv_rate`, multiple of the base rate, Mbit/s as the standard counts them.
const RATES: [(c_int, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 6, 14_062),
    (12, 22, 56_250),
    (13, 45, 112_500),
    (14, 67, 168_750),
    (15, 10, 25_781),
    (16, 40, 103_125),
    (17, 80, 206_250),
    (18, 120, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

/// `IBV_RATE_MAX`: what an unknown rate becomes.
const RATE_MAX: c_int = 0;

/// `ibv_rate_to_mult(3)`: -1 for an unknown rate.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.1)
}

/// `mult_to_ibv_rate(3)`.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    RATES.iter().find(|entry| entry.1 == mult).map_or(RATE_MAX, |entry| entry.0)
}

/// `ibv_rate_to_mbps(3)`: -1 for an unknown rate.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.2)
}

/// `mbps_to_ibv_rate(3)`.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|entry| entry.2 == mbps).map_or(RATE_MAX, |entry| entry.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rate_survives_both_round_trips() {
        for (rate, ..) in RATES {
            assert_eq!(mult_to_ibv_rate(ibv_rate_to_mult(rate)), rate);
            assert_eq!(mbps_to_ibv_rate(ibv_rate_to_mbps(rate)), rate);
        }
    }

    #[test]
    fn strangers() {
        assert_eq!(ibv_rate_to_mult(0), -1);
        assert_eq!(ibv_rate_to_mbps(99), -1);
        assert_eq!(mult_to_ibv_rate(3), RATE_MAX);
        assert_eq!(mbps_to_ibv_rate(-1), RATE_MAX);
    }
}
