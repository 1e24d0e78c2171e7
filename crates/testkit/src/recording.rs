//! A recording: a capture and the text that explains it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Args, Datagram, Malformed, Record, Script, read_pcap};

/// What the text says of a frame's ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcrcNote {
    /// Right.
    Right,
    /// Wrong on purpose.
    Wrong,
    /// As rxe computes it for FLUSH, which is wrong.
    FlushQuirk,
}

/// What the wire did to a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Recorded, but the receiver never saw it.
    Dropped,
    /// The second copy of a frame.
    Duplicated,
    /// Recorded when delivered, not when sent.
    Delayed,
    /// The wire changed something.
    Altered(String),
    /// The wire made it up; neither end sent it.
    Injected(String),
}

/// A recorded frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// As the text counts: from 1.
    pub number: usize,
    /// Since the first frame.
    pub time: Duration,
    /// Its UDP datagram.
    pub datagram: Datagram,
    /// What the text says of its ICRC.
    pub icrc: IcrcNote,
    /// What the wire did to it.
    pub fates: Vec<Fate>,
    /// The text's decoding, line by line, without indentation.
    pub decoded: Vec<String>,
}

impl Frame {
    /// The `name=value` words of the decoding.
    pub fn says(&self) -> Args {
        Args::parse(&self.decoded.join(" "))
    }

    /// Whether the receiver saw the frame.
    pub fn arrived(&self) -> bool {
        !self.fates.contains(&Fate::Dropped)
    }

    /// Whether an end of the recording sent the frame, as it is: not made, copied or altered by the wire.
    pub fn is_original(&self) -> bool {
        !self.fates.iter().any(|fate| matches!(fate, Fate::Duplicated | Fate::Altered(_) | Fate::Injected(_)))
    }
}

/// A capture with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Name of the two files, without extension.
    pub name: String,
    /// What both ends did.
    pub script: Script,
    /// What the wire carried.
    pub frames: Vec<Frame>,
}

impl Recording {
    /// The folder `tests/vectors` of this repository.
    pub fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
    }

    /// Reads all recordings, by name.
    pub fn all() -> Result<Vec<Recording>, Malformed> {
        let folder = Recording::folder();
        let unreadable = |error| Malformed::new(folder.display(), error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|extension| extension == "txt") {
                names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
            }
        }
        names.sort();
        names.iter().map(|name| Recording::read(name)).collect()
    }

    /// Reads one recording of [`Recording::folder`].
    pub fn read(name: &str) -> Result<Recording, Malformed> {
        let file = |extension: &str| Recording::folder().join(name).with_extension(extension);
        let read = |path: PathBuf| fs::read(&path).map_err(|error| Malformed::new(path.display(), error));
        let text = String::from_utf8(read(file("txt"))?).map_err(|error| Malformed::new(name, error))?;
        // Where nothing went over the wire there is no capture.
        let pcap = file("pcap");
        let records = if pcap.exists() { read_pcap(&read(pcap)?)? } else { Vec::new() };
        Recording::join(name, &text, records)
    }

    fn join(name: &str, text: &str, records: Vec<Record>) -> Result<Recording, Malformed> {
        let (head, body) =
            text.split_once("\n\n").ok_or_else(|| Malformed::new(name, "no empty line before the frames"))?;
        let script = Script::parse(name, head.lines().map(|line| line.strip_prefix('#').unwrap_or(line)))?;

        let mut notes: Vec<Vec<&str>> = Vec::new();
        for line in body.lines().filter(|line| !line.starts_with('#')) {
            if line.starts_with("      ") {
                let note = notes.last_mut().ok_or_else(|| Malformed::new(name, "a frame that begins in its middle"))?;
                note.push(line.trim());
            } else {
                notes.push(vec![line.trim()]);
            }
        }
        if notes.len() != records.len() {
            let what = format!("{} frames in the text, {} in the capture", notes.len(), records.len());
            return Err(Malformed::new(name, what));
        }
        let start = records.first().map_or(Duration::ZERO, |record| record.time);
        let frames = notes.iter().zip(records).enumerate().map(|(index, (note, record))| {
            let place = format!("{name}, frame {}", index + 1);
            frame(index + 1, note, &record, start).map_err(|what| Malformed::new(place, what))
        });
        Ok(Recording { name: name.to_owned(), script, frames: frames.collect::<Result<_, _>>()? })
    }
}

fn frame(number: usize, note: &[&str], record: &Record, start: Duration) -> Result<Frame, String> {
    let counted = note[0].split_whitespace().next().and_then(|word| word.parse().ok());
    if counted != Some(number) {
        return Err(format!("the text counts {counted:?}"));
    }
    let datagram = Datagram::from_ethernet(&record.frame).map_err(|error| error.to_string())?.ok_or("not UDP")?;
    let (wire, decoded): (Vec<&str>, Vec<&str>) = note.iter().partition(|line| line.starts_with("## "));
    let icrc = decoded.iter().find_map(|line| Some(line.split_once("icrc=")?.1)).ok_or("no ICRC in the text")?;
    let icrc = match icrc.split_once(' ').map(|(_, verdict)| verdict) {
        Some("ok") => IcrcNote::Right,
        Some(verdict) if verdict.starts_with("BAD") => IcrcNote::Wrong,
        Some(verdict) if verdict.starts_with("RXE-FLUSH-QUIRK") => IcrcNote::FlushQuirk,
        other => return Err(format!("ICRC verdict {other:?}")),
    };
    Ok(Frame {
        number,
        time: record.time.saturating_sub(start),
        datagram,
        icrc,
        fates: wire.iter().map(|line| fate(&line[3..])).collect::<Result<_, _>>()?,
        decoded: decoded.into_iter().map(str::to_owned).collect(),
    })
}

fn fate(line: &str) -> Result<Fate, String> {
    Ok(match line.split_whitespace().next() {
        Some("DROPPED") => Fate::Dropped,
        Some("DUPLICATED") => Fate::Duplicated,
        Some("DELAYED") => Fate::Delayed,
        Some("INJECTED") => Fate::Injected(line.trim_start_matches("INJECTED by the wire: ").to_owned()),
        Some("ICRC" | "PAYLOAD" | "ECN") => Fate::Altered(line.to_owned()),
        _ => return Err(format!("unknown fate {line:?}")),
    })
}
