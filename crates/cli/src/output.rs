//! Writing to people and to other programs.

use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Standard output. A reader that went away (`ferroce devices | head -1`) ends the command quietly and well.
pub(crate) struct Out {
    inner: io::StdoutLock<'static>,
}

impl Out {
    /// Locks stdout.
    pub(crate) fn new() -> Out {
        Out { inner: io::stdout().lock() }
    }

    /// Writes one line.
    pub(crate) fn line(&mut self, text: impl fmt::Display) -> Result<(), Closed> {
        writeln!(self.inner, "{text}").and_then(|()| self.inner.flush()).map_err(Closed)
    }

    /// Empties the screen if stdout is a terminal.
    pub(crate) fn clear(&mut self) -> Result<(), Closed> {
        /// Cursor to the corner, and everything behind it gone (ECMA-48: CUP, ED).
        const CLEAR: &str = "\x1b[H\x1b[J";
        if io::stdout().is_terminal() { self.inner.write_all(CLEAR.as_bytes()).map_err(Closed) } else { Ok(()) }
    }

    /// Writes a value as JSON on one line, for programs that read line by line.
    pub(crate) fn json_line<T: serde::Serialize>(&mut self, value: &T) -> Result<(), anyhow::Error> {
        let text = serde_json::to_string(value)?;
        Ok(self.line(text)?)
    }

    /// Writes a value as JSON, for programs.
    pub(crate) fn json<T: serde::Serialize>(&mut self, value: &T) -> Result<(), anyhow::Error> {
        let text = serde_json::to_string_pretty(value)?;
        Ok(self.line(text)?)
    }
}

/// Stdout cannot be written any more.
#[derive(Debug)]
pub(crate) struct Closed(io::Error);

impl Closed {
    /// True if the reader closed its end, which is its good right.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot write to standard output: {}", self.0)
    }
}

impl std::error::Error for Closed {}

/// A line on stderr that starts with our name.
pub(crate) fn complain(text: impl fmt::Display) {
    // In one piece: the second process of `--self` writes there, too. Nobody to tell if stderr is closed.
    let _ = io::stderr().write_all(format!("ferroce: {text}\n").as_bytes());
}

/// Columns, two spaces apart, of widths that are known before all rows are: each row can be written as it comes.
pub(crate) struct Columns {
    headings: Vec<&'static str>,
    widths: Vec<usize>,
    right: Vec<bool>,
}

impl Columns {
    /// Headings with widths. A heading that starts with `>` names a column aligned to the right.
    pub(crate) fn new(columns: &[(&'static str, usize)]) -> Columns {
        Columns {
            headings: columns.iter().map(|(heading, _)| heading.trim_start_matches('>')).collect(),
            widths: columns.iter().map(|(_, width)| *width).collect(),
            right: columns.iter().map(|(heading, _)| heading.starts_with('>')).collect(),
        }
    }

    /// The line of the headings.
    pub(crate) fn heading(&self) -> String {
        aligned(&self.headings, &self.widths, &self.right)
    }

    /// A row of as many cells as there are headings.
    pub(crate) fn row(&self, cells: &[String]) -> String {
        assert_eq!(cells.len(), self.right.len(), "a row has the wrong number of cells");
        aligned(cells, &self.widths, &self.right)
    }
}

/// One line of cells, without blanks at its end.
fn aligned(cells: &[impl AsRef<str>], widths: &[usize], right: &[bool]) -> String {
    let cells = cells.iter().map(AsRef::as_ref).zip(widths).zip(right);
    let cells: Vec<String> = cells
        .map(|((cell, &width), &right)| if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") })
        .collect();
    cells.join("  ").trim_end().to_string()
}

/// Rows of text in aligned columns, two spaces apart.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings. One that starts with `>` names a column aligned to the right.
    pub(crate) fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let first = headings.iter().map(|h| h.trim_start_matches('>').to_string()).collect();
        Table { rows: vec![first], right }
    }

    /// Adds a row; it has as many cells as there are headings.
    pub(crate) fn row<I, T>(&mut self, cells: I)
    where
        I: IntoIterator<Item = T>,
        T: Into<String>,
    {
        let row: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(row.len(), self.right.len(), "a row of the table has the wrong number of cells");
        self.rows.push(row);
    }

    /// It has no rows but the headings.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The lines, headings first, without blanks at their ends.
    pub(crate) fn lines(&self) -> Vec<String> {
        let widths: Vec<usize> = (0..self.right.len())
            .map(|column| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        self.rows.iter().map(|row| aligned(row, &widths, &self.right)).collect()
    }

    /// Writes all lines.
    pub(crate) fn print(&self, out: &mut Out) -> Result<(), Closed> {
        self.lines().iter().try_for_each(|line| out.line(line))
    }
}

/// Shows what the library warns of while a command waits for the service: without it the command would wait without a word.
pub(crate) fn show_warnings() {
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target() == "ferroce_service::client"
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            complain(record.args());
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", ">BYTES", "NOTE"]);
        table.row(["a", "1", ""]);
        table.row(["long", "1048576", "x"]);
        assert_eq!(table.lines(), ["NAME    BYTES  NOTE", "a           1", "long  1048576  x"]);
    }
    #[test]
    fn rows_that_come_one_by_one_are_aligned_too() {
        let columns = Columns::new(&[("NAME", 5), (">BYTES", 7), ("NOTE", 4)]);
        assert_eq!(columns.heading(), "NAME     BYTES  NOTE");
        assert_eq!(columns.row(&["a".into(), "1048576".into(), String::new()]), "a      1048576");
    }
}
