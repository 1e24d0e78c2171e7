//! Rules about source files: where `unsafe` may stand, its proofs, no skipped tests, no clock in the protocol, length.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{Finding, Tree};

/// Where `unsafe` may stand, with the reason. A path ending in `/` is a folder; `core/src/mem` also covers
/// `core/src/mem.rs`. Besides, integration tests (`crates/*/tests/`, `tests/`) may have it: they fork, install signal
/// handlers, unmap memory and call C. Proofs are needed everywhere.
pub(crate) const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("crates/core/src/mem", "reads and writes the program's memory at addresses that a key vouches for"),
    ("crates/link/src/udp/sys.rs", "sendmmsg and recvmmsg with gather lists and control messages"),
    ("crates/link/src/raw/sys.rs", "packet sockets: addresses of interfaces, VLAN tags as control messages"),
    ("crates/link/src/ring/shared.rs", "memory shared with other processes, and the wake-up of a sleeping one"),
    ("crates/link/src/sched.rs", "sched_setattr, which has no safe wrapper"),
    ("crates/service/src/sys.rs", "descriptor passing, namespaces, socket options without a safe wrapper"),
    ("crates/ibverbs/src/", "the C boundary: every argument is a raw pointer"),
    ("crates/rdmacm/src/", "the C boundary: every argument is a raw pointer"),
    ("crates/preload/src/", "functions of the C library, with their raw pointers"),
    ("crates/abi/src/", "types of C functions are unsafe to call"),
];

/// Longest file that a person can keep in mind.
const MAX_LINES: usize = 1000;

/// Folders whose code must be pure: the protocol has no clock, socket, thread or file.
const PURE: &[&str] = &["crates/wire/src/", "crates/transport/src/", "crates/cm/src/", "crates/rsocket/src/"];

/// Names that betray a clock, a socket, a thread or a file.
const IMPURE_NAMES: &[&str] =
    &["Instant", "SystemTime", "thread", "UdpSocket", "TcpStream", "TcpListener", "UnixStream", "File", "libc"];

pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in tree.rust_files()? {
        let full = tree.root.join(&path);
        let text = std::fs::read_to_string(&full).with_context(|| format!("cannot read {}", full.display()))?;
        let file = SourceFile { path: &path, lines: text.lines().collect() };
        let lines = file.lines.len();
        if lines > MAX_LINES {
            findings.push(file.at(0, format!("{lines} lines, more than {MAX_LINES}: split it by subject")));
        }
        match text.parse::<TokenStream>() {
            Ok(tokens) => file.walk(tokens, &mut findings),
            Err(error) => findings.push(file.at(error.span().start().line, format!("is not Rust: {error}"))),
        }
    }
    Ok(findings)
}

struct SourceFile<'a> {
    path: &'a Path,
    lines: Vec<&'a str>,
}

impl SourceFile<'_> {
    fn at(&self, line: usize, what: String) -> Finding {
        Finding { path: PathBuf::from(self.path), line, what }
    }

    fn walk(&self, tokens: TokenStream, findings: &mut Vec<Finding>) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (i, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => {
                    let after_hash = i > 0 && matches!(&tokens[i - 1], TokenTree::Punct(p) if p.as_char() == '#');
                    if after_hash && group.delimiter() == Delimiter::Bracket {
                        self.attribute(group.stream(), findings);
                    }
                    self.walk(group.stream(), findings);
                }
                TokenTree::Ident(ident) => {
                    let line = ident.span().start().line;
                    let name = ident.to_string();
                    if name == "unsafe" {
                        self.unsafe_token(line, tokens.get(i + 1), findings);
                    } else if IMPURE_NAMES.contains(&name.as_str()) && starts_with_any(self.path, PURE) {
                        findings.push(self.at(
                            line,
                            format!("`{name}`: the protocol has no clock, socket, thread or file; pass the value in"),
                        ));
                    }
                }
                _ => {}
            }
        }
    }

    fn attribute(&self, tokens: TokenStream, findings: &mut Vec<Finding>) {
        if let Some(TokenTree::Ident(ident)) = tokens.into_iter().next()
            && ident == "ignore"
        {
            let line = ident.span().start().line;
            findings.push(self.at(line, "a skipped test: make it run, or remove it".into()));
        }
    }

    fn unsafe_token(&self, line: usize, next: Option<&TokenTree>, findings: &mut Vec<Finding>) {
        if !unsafe_allowed(self.path) {
            findings.push(self.at(
                line,
                "`unsafe` outside the modules that may have it (UNSAFE_ALLOWED in xtask/src/checks/sources.rs)".into(),
            ));
        }
        let needs_proof = match next {
            Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Brace,
            Some(TokenTree::Ident(ident)) => ident == "impl",
            _ => false,
        };
        if needs_proof && !self.has_proof(line) {
            findings.push(self.at(line, "`unsafe` without a `// SAFETY:` comment directly above it".into()));
        }
    }

    /// A SAFETY comment on the line itself, or above it with nothing but comments, attributes and the start of the
    /// same statement in between. What another `unsafe` of the statement has for itself is not for this one.
    fn has_proof(&self, line: usize) -> bool {
        let own = self.lines[line - 1];
        if let (Some(comment), Some(code)) = (own.find("SAFETY:"), own.find("unsafe"))
            && comment < code
        {
            return true;
        }
        for above in self.lines[..line - 1].iter().rev() {
            let above = above.trim();
            if above.starts_with("//") {
                if above.contains("SAFETY:") {
                    return true;
                }
                continue;
            }
            let code = above.split("//").next().unwrap_or_default().trim_end();
            let is_block = code.contains("unsafe {");
            if code.is_empty() || code.ends_with([';', '{', '}']) || is_block {
                return false;
            }
        }
        false
    }
}

fn starts_with_any(path: &Path, prefixes: &[&str]) -> bool {
    let path = path.to_string_lossy();
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}

fn unsafe_allowed(path: &Path) -> bool {
    let path = path.to_string_lossy();
    let mut parts = path.split('/');
    if matches!((parts.next(), parts.nth(1)), (Some("tests"), _) | (Some("crates"), Some("tests"))) {
        return true;
    }
    UNSAFE_ALLOWED.iter().any(|(place, _)| {
        path.strip_prefix(place)
            .is_some_and(|rest| rest.is_empty() || place.ends_with('/') || rest.starts_with('/') || rest == ".rs")
    })
}
