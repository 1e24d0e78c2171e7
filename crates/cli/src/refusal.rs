//! What the verbs library refused, as it noted it where `FERROCE_REFUSAL` says.
//!
//! One line for each refused verb: verb, errno, sentence, parted by tabs. The sentence names the attribute at fault,
//! why it was refused, and the remedy. The lines are written by the program that was run, so they are read as hostile text.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

/// The lowest number of a descriptor that programs inherit from us: not where their own begin.
pub(crate) const INHERITED_FD_MIN: i32 = 200;

/// Where the programs of one command write what was refused: memory, which no folder names, so that nothing is left when this process is
/// killed. A program has it as an inherited descriptor. One that has closed that, as daemons do, opens this process's.
pub(crate) struct Record(File);

impl Record {
    /// An empty one, which programs inherit from now on.
    pub(crate) fn make() -> io::Result<Record> {
        let memory = memfd_create("ferroce-refusals", MemfdFlags::CLOEXEC)?;
        // A low limit of descriptors allows no high number.
        let memory = fcntl_dupfd_cloexec(&memory, INHERITED_FD_MIN).unwrap_or(memory);
        fcntl_setfd(&memory, FdFlags::empty())?;
        Ok(Record(File::from(memory)))
    }

    /// The value of `FERROCE_REFUSAL`: device and inode of the memory, which nothing else has, and the path of this process's descriptor.
    /// Its number is that of the inherited one, too.
    pub(crate) fn name(&self) -> io::Result<String> {
        let metadata = self.0.metadata()?;
        let (pid, fd) = (std::process::id(), self.0.as_raw_fd());
        Ok(format!("memfd:{}:{}:/proc/{pid}/fd/{fd}", metadata.dev(), metadata.ino()))
    }

    /// The newest refusal.
    pub(crate) fn last(&mut self) -> io::Result<Option<Refusal>> {
        Refusal::last(&mut self.0)
    }
}

/// As much of the end of the file as is looked at, in bytes.
const TAIL_BYTES: u64 = 16 * 1024;

/// One refused verb.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    verb: String,
    errno: i32,
    sentence: String,
}

impl Refusal {
    /// The last complete line of `file`, if there is one.
    fn last(file: &mut File) -> io::Result<Option<Refusal>> {
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail)?;
        Ok(String::from_utf8_lossy(&tail).lines().rev().find_map(Refusal::parse))
    }

    fn parse(line: &str) -> Option<Refusal> {
        let mut fields = line.splitn(3, '\t').map(clean);
        let (verb, errno, sentence) = (fields.next()?, fields.next()?, fields.next()?);
        if verb.is_empty() || sentence.is_empty() {
            return None;
        }
        Some(Refusal { verb, errno: errno.parse().ok()?, sentence })
    }
}

/// Without control characters: they could command a terminal.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect::<String>().trim().to_string()
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = io::Error::from_raw_os_error(self.errno).to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        write!(f, "the last refused verb was {} (errno {}, {}): {}", self.verb, self.errno, reason, self.sentence)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn last(text: &[u8]) -> Option<String> {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(text).expect("can write");
        Refusal::last(&mut file).expect("can read").map(|refusal| refusal.to_string())
    }

    #[test]
    fn the_last_line_counts() {
        let text = b"ibv_reg_mr\t14\tnot mapped\nibv_modify_qp\t22\tah_attr.is_global is 0: give a GID index (-g 0)\n";
        assert_eq!(
            last(text).expect("there is one"),
            "the last refused verb was ibv_modify_qp (errno 22, Invalid argument): ah_attr.is_global is 0: give a GID \
             index (-g 0)"
        );
    }

    #[test]
    fn nothing_refused_is_nothing_said() {
        assert_eq!(last(b""), None);
    }

    #[test]
    fn broken_lines_are_passed_over() {
        let good = "ibv_reg_mr\t14\tnot mapped\n";
        for broken in ["ibv_x", "ibv_x\t22", "ibv_x\tNaN\tsentence", "\t22\tsentence", "ibv_x\t22\t", "\n\n"] {
            let text = format!("{good}{broken}");
            assert!(last(text.as_bytes()).expect("the good one").contains("ibv_reg_mr"), "{broken:?}");
        }
        assert_eq!(last(b"\xff\xfe\t\x00"), None);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let shown = last(b"ibv_x\t22\t\x1b[2Jgone\x07\n").expect("there is one");
        assert!(shown.ends_with("[2Jgone") && !shown.contains('\x1b'), "{shown:?}");
    }

    #[test]
    fn only_the_end_of_a_huge_file_is_read() {
        let mut text = vec![b'x'; 4 * TAIL_BYTES as usize];
        text.extend_from_slice(b"\nibv_x\t22\tat the end\n");
        assert!(last(&text).expect("there is one").ends_with("at the end"));
    }
}
