//! An initramfs: files in the "newc" form of cpio, uncompressed.

use std::io::{self, Write};

const REGULAR: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const DEVICE: u32 = 0o020_000;

/// Writes an archive.
pub struct Archive<W> {
    out: W,
    next_inode: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Archive<W> {
        Archive { out, next_inode: 1 }
    }

    /// Adds a folder; its parents must have been added before.
    pub fn folder(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, FOLDER | 0o755, (0, 0), &[])
    }

    /// Adds a file that all may execute.
    pub fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | 0o755, (0, 0), content)
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, DEVICE | 0o600, (major, minor), &[])
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let name = path.trim_start_matches('/');
        let size = u32::try_from(content.len()).map_err(|_| io::Error::other(format!("{path} is too long")))?;
        let name_size = name.len() as u32 + 1;
        write!(self.out, "070701")?;
        let links = 1;
        for field in [self.next_inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0] {
            write!(self.out, "{field:08X}")?;
        }
        self.next_inode += 1;
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        const HEADER: usize = 110;
        self.pad(HEADER + name.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    /// Zero bytes up to a multiple of four.
    fn pad(&mut self, length: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..length.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_archive_ends() {
        let mut archive = Archive::new(Vec::new());
        archive.folder("/bin").expect("memory");
        archive.file("/bin/a", b"hello").expect("memory");
        archive.device("/dev/console", 5, 1).expect("memory");
        let bytes = archive.finish().expect("memory");
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> = (0..bytes.len() - 6).filter(|&at| &bytes[at..at + 6] == b"070701").collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|start| start % 4 == 0), "{starts:?}");
        let file = &bytes[starts[1]..starts[2]];
        assert_eq!(&file[54..62], b"00000005", "size of the file");
        assert_eq!(&file[110..116], b"bin/a\0");
        assert_eq!(&file[116..121], b"hello");
        assert!(bytes[starts[3]..].windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
