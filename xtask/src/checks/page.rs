//! Tables in `docs/` of which a page is made.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Finding;

pub(super) fn finding(path: &str, line: usize, what: String) -> Finding {
    Finding { path: PathBuf::from(path), line, what }
}

/// The first line with `words`, counted from 1; 0 if there is none.
pub(super) fn line_of(text: &str, words: &str) -> usize {
    text.lines().position(|line| line.contains(words)).map_or(0, |index| index + 1)
}

/// Writes the page of a table if it is not `page`, which is a finding: the page is committed, too.
pub(super) fn renew(root: &Path, table: &str, path: &str, page: &str) -> Result<Option<Finding>> {
    let file = root.join(path);
    if fs::read_to_string(&file).is_ok_and(|old| old == page) {
        return Ok(None);
    }
    fs::write(&file, page).with_context(|| format!("cannot write {path}"))?;
    Ok(Some(finding(path, 0, format!("was not what {table} says, and is written anew: commit it"))))
}
