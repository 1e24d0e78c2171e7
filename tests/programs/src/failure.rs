//! Why a line failed: one sentence, and what a person needs to find the cause.

use std::fmt;

/// Why a line failed.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Failure {
    what: String,
    details: Vec<String>,
}

impl Failure {
    /// A failure that `what` says in one sentence.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), details: Vec::new() }
    }

    /// Adds output, stacks or the like.
    pub fn with(mut self, detail: impl Into<String>) -> Failure {
        let detail = detail.into();
        if !detail.trim().is_empty() {
            self.details.push(detail);
        }
        self
    }

    /// Does the sentence or what was added to it contain `text`?
    pub fn mentions(&self, text: &str) -> bool {
        self.what.contains(text) || self.details.iter().any(|detail| detail.contains(text))
    }

    /// The sentence alone.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        for detail in &self.details {
            write!(f, "\n{}", detail.trim_end())?;
        }
        Ok(())
    }
}
