//! Static checks of the tree: what the compiler and clippy cannot see.
//!
//! Each check takes a [`Tree`] and gives findings; a finding says where, what is wrong and what to do. The checks are
//! tested on small trees that break one rule each.

mod docs;
mod layers;
mod lines;
mod page;
mod sources;
#[cfg(test)]
mod tests;
mod variables;
mod verbs;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Metadata, MetadataCommand};

pub(crate) use sources::UNSAFE_ALLOWED;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// File, relative to the root of the workspace.
    pub(crate) path: PathBuf,
    /// Line, counted from 1; 0 where the whole file is meant.
    pub(crate) line: usize,
    /// What is wrong and what to do.
    pub(crate) what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.path.display(), self.what)
        } else {
            write!(f, "{}:{}: {}", self.path.display(), self.line, self.what)
        }
    }
}

/// The workspace under check.
pub(crate) struct Tree {
    root: PathBuf,
    metadata: Metadata,
}

impl Tree {
    /// Reads the workspace at `root`: its manifests, no sources yet, nothing from the network.
    pub(crate) fn open(root: &Path) -> Result<Tree> {
        let metadata = MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()
            .with_context(|| format!("cannot read the workspace at {}", root.display()))?;
        Ok(Tree { root: root.to_path_buf(), metadata })
    }

    /// Every `.rs` file of the workspace, sorted, relative to the root.
    fn rust_files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for top in ["crates", "tests", "fuzz", "xtask", "examples"] {
            let dir = self.root.join(top);
            if dir.is_dir() {
                walk(&dir, &mut files)?;
            }
        }
        for file in &mut files {
            *file = file.strip_prefix(&self.root).expect("walk stays below the root").to_path_buf();
        }
        files.sort();
        Ok(files)
    }
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                walk(&path, files)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Runs every check on `tree`.
pub(crate) fn all(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = layers::check(&tree.metadata, &tree.root);
    findings.extend(sources::check(tree)?);
    findings.extend(docs::check(tree)?);
    findings.extend(variables::check(tree)?);
    findings.extend(verbs::check(tree)?);
    findings.extend(lines::check(tree)?);
    Ok(findings)
}

/// `cargo xtask check`: prints what is wrong, fails if anything is.
pub(crate) fn run(root: &Path) -> Result<()> {
    let findings = all(&Tree::open(root)?)?;
    for finding in &findings {
        eprintln!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        n => bail!("{n} broken rules of the tree (see CONTRIBUTING.md, \"Rules that are checked\")"),
    }
}
