//! Tests of whole queue pairs, over the simulated wire.

mod random;
mod rc_data;
