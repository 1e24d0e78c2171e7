//! Which file this code was loaded from.

use std::path::PathBuf;

/// The shared library or executable that holds this function.
pub(crate) fn path() -> Option<PathBuf> {
    let here = path as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| file_of(line, here))
}

/// The file of a line of `/proc/self/maps` (proc(5)) if its range holds `address`.
fn file_of(line: &str, address: usize) -> Option<PathBuf> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let file = &rest[rest.find('/')?..];
    (start..end).contains(&address).then(|| PathBuf::from(file.trim_end_matches(" (deleted)")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_test_program() {
        assert_eq!(path(), std::env::current_exe().ok());
    }

    #[test]
    fn a_line_without_a_file_or_outside_the_range_gives_none() {
        let line = "7f00-7f80 r-xp 00000000 08:01 123   /usr/lib/with space.so";
        assert_eq!(file_of(line, 0x7f10), Some(PathBuf::from("/usr/lib/with space.so")));
        assert_eq!(file_of(line, 0x7f80), None);
        assert_eq!(file_of("7f00-7f80 rw-p 00000000 00:00 0", 0x7f10), None);
        assert_eq!(file_of("nonsense", 0), None);
    }
}
