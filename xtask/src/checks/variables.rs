//! README.md's table of environment variables: it has all that the crates read, and no others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};

use super::{Finding, Tree};

const README: &str = "README.md";

pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut read = BTreeMap::new();
    for path in tree.rust_files()?.into_iter().filter(|path| is_product(path)) {
        let full = tree.root.join(&path);
        let text = std::fs::read_to_string(&full).with_context(|| format!("cannot read {}", full.display()))?;
        // What is no Rust, the check of sources tells.
        if let Ok(tokens) = text.parse::<TokenStream>() {
            named(tokens, &mut |name, line| {
                read.entry(name).or_insert((path.clone(), line));
            });
        }
    }
    let readme = std::fs::read_to_string(tree.root.join(README)).unwrap_or_default();
    let told = table(&readme);
    let missing = read.iter().filter(|(name, _)| !told.contains_key(*name)).map(|(name, (path, line))| Finding {
        path: path.clone(),
        line: *line,
        what: format!("reads `{name}`, which the table of variables in {README} lacks: give it a row"),
    });
    let stale = told.iter().filter(|(name, _)| !read.contains_key(*name)).map(|(name, line)| Finding {
        path: PathBuf::from(README),
        line: *line,
        what: format!("`{name}`: nothing in crates/ reads such a variable"),
    });
    Ok(missing.chain(stale).collect())
}

/// Sources of what is installed, not of tests.
fn is_product(path: &Path) -> bool {
    let mut parts = path.iter();
    parts.next().is_some_and(|top| top == "crates") && parts.nth(1).is_some_and(|folder| folder == "src")
}

/// Calls `found` with each string that is the name of a variable, and its line.
fn named(tokens: TokenStream, found: &mut dyn FnMut(String, usize)) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => named(group.stream(), found),
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
                if let Some(name) = text.filter(|text| is_name(text)) {
                    found(name.to_owned(), literal.span().start().line);
                }
            }
            _ => {}
        }
    }
}

fn is_name(text: &str) -> bool {
    let rest = text.strip_prefix("FERROCE_");
    rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte == b'_' || byte.is_ascii_uppercase()))
}

/// The variables in the first cells of tables, with their lines: code spans, which may go on with `=VALUE`.
fn table(text: &str) -> BTreeMap<String, usize> {
    let mut variables = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let Some(cell) = line.strip_prefix('|').and_then(|line| line.split('|').next()) else { continue };
        let spans = cell.split('`').skip(1).step_by(2);
        let names = spans.map(|span| span.split('=').next().unwrap_or(span)).filter(|name| is_name(name));
        variables.extend(names.map(|name| (name.to_owned(), at + 1)));
    }
    variables
}
