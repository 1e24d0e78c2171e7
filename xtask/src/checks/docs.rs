//! Documents stay true to the tree: they name every crate, every dependency and every place of `unsafe`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Finding, Tree, UNSAFE_ALLOWED};

const ARCHITECTURE: &str = "ARCHITECTURE.md";
const README: &str = "README.md";

pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let packages = tree.metadata.workspace_packages();
    let members: BTreeSet<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    let dependencies: BTreeSet<&str> = packages
        .iter()
        .flat_map(|p| &p.dependencies)
        .map(|d| d.name.as_str())
        .filter(|name| !members.contains(name))
        .collect();

    for document in [README, ARCHITECTURE] {
        let Some(text) = read(&tree.root, document, &mut findings) else { continue };
        for package in &packages {
            let folder = package.manifest_path.parent().expect("a manifest has a folder");
            let folder = folder.strip_prefix(&tree.root).unwrap_or(folder).as_str();
            if !names(&text, folder) {
                findings.push(missing(document, format!("does not name `{folder}`, crate `{}`", package.name)));
            }
        }
        if document == README {
            continue;
        }
        for dependency in &dependencies {
            if !names(&text, dependency) {
                findings.push(missing(
                    document,
                    format!("does not name dependency `{dependency}`: give it a line with its reason"),
                ));
            }
        }
        for (place, _) in UNSAFE_ALLOWED {
            if !names(&text, place) {
                findings.push(missing(document, format!("does not name `{place}`, where `unsafe` is allowed")));
            }
        }
    }
    Ok(findings)
}

/// True if `text` has `name` as a code span of its own.
fn names(text: &str, name: &str) -> bool {
    text.contains(&format!("`{name}`"))
}

fn read(root: &Path, document: &str, findings: &mut Vec<Finding>) -> Option<String> {
    match std::fs::read_to_string(root.join(document)) {
        Ok(text) => Some(text),
        Err(error) => {
            findings.push(missing(document, format!("cannot be read: {error}")));
            None
        }
    }
}

fn missing(document: &str, what: String) -> Finding {
    Finding { path: PathBuf::from(document), line: 0, what }
}
