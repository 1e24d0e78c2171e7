//! Classic pcap files (the format of libpcap since 1998).

use std::time::Duration;

use crate::Malformed;

/// One record of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Since the epoch of the capturing clock.
    pub time: Duration,
    /// The Ethernet frame.
    pub frame: Vec<u8>,
}

/// Reads a little-endian capture of whole Ethernet frames, in microseconds or nanoseconds.
pub fn read_pcap(file: &[u8]) -> Result<Vec<Record>, Malformed> {
    const ETHERNET: u32 = 1;
    let mut reader = Words { rest: file };
    let magic = reader.word()?;
    let nanos_per_tick = match magic {
        0xa1b2_c3d4 => 1000,
        0xa1b2_3c4d => 1,
        _ => return Err(Malformed::new("pcap header", format!("magic {magic:#x}"))),
    };
    let (_version, _zone, _accuracy, _snap_len) = (reader.word()?, reader.word()?, reader.word()?, reader.word()?);
    let link_type = reader.word()?;
    if link_type != ETHERNET {
        return Err(Malformed::new("pcap header", format!("link type {link_type} is not Ethernet")));
    }
    let mut records = Vec::new();
    while !reader.rest.is_empty() {
        let place = format!("pcap record {}", records.len() + 1);
        let (seconds, ticks, captured, on_wire) = (reader.word()?, reader.word()?, reader.word()?, reader.word()?);
        if captured != on_wire {
            return Err(Malformed::new(place, format!("only {captured} of {on_wire} bytes were captured")));
        }
        let Some((frame, rest)) = reader.rest.split_at_checked(captured as usize) else {
            return Err(Malformed::new(place, "the file ends inside the frame"));
        };
        reader.rest = rest;
        let nanos = ticks.checked_mul(nanos_per_tick).filter(|nanos| *nanos < 1_000_000_000);
        let nanos = nanos.ok_or_else(|| Malformed::new(place, "a fraction of a second of a second or more"))?;
        records.push(Record { time: Duration::new(seconds.into(), nanos), frame: frame.to_vec() });
    }
    Ok(records)
}

struct Words<'a> {
    rest: &'a [u8],
}

impl Words<'_> {
    fn word(&mut self) -> Result<u32, Malformed> {
        let Some((word, rest)) = self.rest.split_first_chunk::<4>() else {
            return Err(Malformed::new("pcap", "the file ends inside a header"));
        };
        self.rest = rest;
        Ok(u32::from_le_bytes(*word))
    }
}
