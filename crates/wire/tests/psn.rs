//! Arithmetic modulo 2^24.

use ferroce_wire::Psn;
use proptest::prelude::*;

const HALF: i64 = 1 << 23;

proptest! {
    #[test]
    fn stays_below_two_to_the_24(value: u32, n: u32) {
        let psn = Psn::new(value);
        for psn in [psn, psn.add(n), psn.sub(n)] {
            prop_assert!(psn.get() < 1 << 24);
        }
        prop_assert_eq!(psn.get(), value % (1 << 24));
    }

    #[test]
    fn add_and_sub_undo_each_other(value: u32, n: u32) {
        let psn = Psn::new(value);
        prop_assert_eq!(psn.add(n).sub(n), psn);
        prop_assert_eq!(psn.sub(n).add(n), psn);
    }

    #[test]
    fn diff_is_the_signed_distance(value: u32, n in -HALF..HALF) {
        let psn = Psn::new(value);
        let other = psn.add(n as u32);
        prop_assert_eq!(i64::from(other.diff(psn)), n);
        if n != -HALF {
            prop_assert_eq!(i64::from(psn.diff(other)), -n);
        }
    }

    #[test]
    fn prints_six_digits(value: u32) {
        let psn = Psn::new(value);
        prop_assert_eq!(psn.to_string(), format!("0x{:06x}", psn.get()));
        prop_assert_eq!(format!("{psn:?}"), psn.to_string());
    }
}

/// Kernel rxe and the specification agree: half the circle away counts as behind, one less as ahead.
#[test]
fn half_way_round() {
    let psn = Psn::new(0xfff_fff);
    assert_eq!(psn.add(1 << 23).diff(psn), -(1 << 23));
    assert_eq!(psn.add((1 << 23) - 1).diff(psn), (1 << 23) - 1);
    assert_eq!(psn.add(1), Psn::new(0));
    assert_eq!(Psn::new(0).sub(1), Psn::new(0xff_ffff));
}
