//! Packets that kernel rxe sent, as raw material.

use ferroce_testkit::Recording;
use ferroce_wire::{BTH_LEN, ICRC_LEN};

/// All packets of `tests/vectors`, from the BTH to the pad.
///
/// # Panics
/// The recordings cannot be read.
pub fn packets() -> Vec<Vec<u8>> {
    let recordings = Recording::all().unwrap_or_else(|error| panic!("{error}"));
    let frames = recordings.into_iter().flat_map(|recording| recording.frames);
    frames
        .filter_map(|frame| {
            let len = frame.datagram.payload.len().checked_sub(ICRC_LEN)?;
            (len >= BTH_LEN).then(|| frame.datagram.payload[..len].to_vec())
        })
        .collect()
}
