//! Lines that are known to fail, each with its reason. One that passes fails the run: the list only shrinks.

use serde::Deserialize;

use crate::failure::Failure;

/// One entry of `known.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Id of a line, or a part of ids that starts or ends with `*`.
    pub line: String,
    /// Why it fails, and what must happen that it does not.
    pub reason: String,
}

/// The list of known failures.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    #[serde(default)]
    known: Vec<Entry>,
}

impl Known {
    /// The list of this folder.
    pub fn built_in() -> Result<Known, Failure> {
        Known::parse(include_str!("../known.toml"))
    }

    /// Reads a list.
    pub fn parse(text: &str) -> Result<Known, Failure> {
        let known: Known = toml::from_str(text).map_err(|e| Failure::new(format!("known.toml: {e}")))?;
        match known.known.iter().find(|entry| entry.reason.trim().is_empty()) {
            None => Ok(known),
            Some(entry) => Err(Failure::new(format!("known.toml: {} has no reason", entry.line))),
        }
    }

    /// Why the line `id` is known to fail; `None` if it must pass.
    pub fn reason(&self, id: &str) -> Option<&str> {
        self.known.iter().find(|entry| matches(&entry.line, id)).map(|entry| entry.reason.as_str())
    }

    /// Entries that name no line at all.
    pub fn unused<'a>(&'a self, ids: &[String]) -> Vec<&'a str> {
        let names_none = |entry: &&Entry| !ids.iter().any(|id| matches(&entry.line, id));
        self.known.iter().filter(names_none).map(|entry| entry.line.as_str()).collect()
    }
}

/// True if `pattern` is `id`, or its `*` at the start or end stands for the rest.
pub fn matches(pattern: &str, id: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(end), None) => id.ends_with(end),
        (None, Some(start)) => id.starts_with(start),
        (Some(_), Some(_)) => id.contains(pattern.trim_matches('*')),
        (None, None) => id == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;

    #[test]
    fn the_list_of_this_folder_names_lines_that_exist() {
        let ids: Vec<String> = table::lines().into_iter().map(|line| line.id).collect();
        let known = Known::built_in().expect("is valid");
        assert_eq!(known.unused(&ids), [] as [&str; 0]);
    }

    #[test]
    fn entries_need_a_reason_and_a_known_form() {
        let text = "[[known]]\nline = \"veth1500-v4/*\"\nreason = \"GRO\"\n";
        let known = Known::parse(text).expect("is valid");
        assert_eq!(known.reason("veth1500-v4/ib_write_bw"), Some("GRO"));
        assert_eq!(known.reason("veth1500-v6/ib_write_bw"), None);
        assert_eq!(known.unused(&["host-v4/ib_write_bw".to_owned()]), ["veth1500-v4/*"]);
        Known::parse("[[known]]\nline = \"a\"\nreason = \" \"\n").expect_err("no reason");
        Known::parse("[[known]]\nline = \"a\"\n").expect_err("no reason");
        Known::parse("[[know]]\nline = \"a\"\n").expect_err("a misspelt name");
    }

    #[test]
    fn patterns() {
        assert!(matches("a/b", "a/b") && !matches("a/b", "a/bc"));
        assert!(matches("a/*", "a/bc") && !matches("a/*", "ba/c"));
        assert!(matches("*/c", "a/b/c") && !matches("*/c", "a/b/cd"));
        assert!(matches("*b*", "abc") && !matches("*b*", "ac"));
    }
}
