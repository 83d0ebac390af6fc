//! Text and tables that fit into the width of the terminal.

use std::fmt::Write as _;
use std::io;
use std::os::fd::AsFd;

use terminal_size::{Width, terminal_size_of};

/// Width of the output in columns, if stdout is not a terminal.
const DEFAULT_WIDTH: usize = 80;

/// Smallest width of the output, in columns. A narrower terminal breaks the lines of tables.
const WIDTH_MIN: usize = 40;

/// Space between two columns of a table.
const GAP: usize = 2;

/// The width of the output on stdout, in columns: the environment variable `COLUMNS` if it is a number of at least 40,
/// else the width of the terminal (but at least 40), else 80.
pub fn width() -> usize {
    let asked = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok()).filter(|width| *width >= WIDTH_MIN);
    asked.or_else(|| width_of(io::stdout())).unwrap_or(DEFAULT_WIDTH).max(WIDTH_MIN)
}

/// The width of the terminal that a stream is connected to; `None` if the stream is not a terminal.
pub(super) fn width_of(stream: impl AsFd) -> Option<usize> {
    terminal_size_of(stream).map(|(Width(columns), _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Breaks text into lines of at most `width` columns, at spaces. All lines but the first begin with `indent` spaces. A
/// word that is too long for a line, such as a path, is not broken.
pub fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if last.trim().is_empty() || last.chars().count() + 1 + word.chars().count() <= width {
            let space = if last.trim().is_empty() { "" } else { " " };
            let _ = write!(last, "{space}{word}");
        } else {
            lines.push(format!("{:indent$}{word}", ""));
        }
    }
    lines.join("\n")
}

/// A column of a table: its heading, and one cell per row. Both are aligned to the right.
#[derive(Debug, Clone)]
pub struct TableColumn {
    /// The text above the cells.
    pub heading: String,
    /// The cells, from the first row to the last.
    pub cells: Vec<String>,
}

impl TableColumn {
    /// The column with only some of its rows.
    pub fn of_rows(&self, rows: &[usize]) -> Self {
        Self { heading: self.heading.clone(), cells: rows.iter().map(|row| self.cells[*row].clone()).collect() }
    }

    fn width(&self) -> usize {
        let texts = std::iter::once(&self.heading).chain(&self.cells);
        texts.map(|text| text.chars().count()).max().unwrap_or_default()
    }
}

/// Lays out a table. Its first column has the heading `first` and the cells `names`. The columns that do not fit into
/// `width` follow below, in further tables with the same first column.
pub fn table(first: &str, names: &[String], columns: &[TableColumn], width: usize) -> String {
    let names: Vec<&str> = std::iter::once(first).chain(names.iter().map(String::as_str)).collect();
    let name_width = names.iter().map(|name| name.chars().count()).max().unwrap_or_default();
    let (mut parts, mut used) = (Vec::<Vec<&TableColumn>>::new(), usize::MAX);
    for column in columns {
        let more = GAP + column.width();
        match parts.last_mut() {
            Some(part) if used + more <= width => {
                part.push(column);
                used += more;
            }
            _ => {
                parts.push(vec![column]);
                used = name_width + more;
            }
        }
    }
    let mut text = String::new();
    for part in parts {
        for (row, name) in names.iter().enumerate() {
            let _ = write!(text, "{name:<name_width$}");
            for column in &part {
                let cell = row.checked_sub(1).map_or(&column.heading, |row| &column.cells[row]);
                let _ = write!(text, "{:GAP$}{cell:>wide$}", "", wide = column.width());
            }
            let _ = writeln!(text);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(heading: &str, cells: [&str; 2]) -> TableColumn {
        TableColumn { heading: heading.to_owned(), cells: cells.map(str::to_owned).to_vec() }
    }

    #[test]
    fn columns_that_do_not_fit_follow_in_a_second_table() {
        let names = ["one".to_owned(), "another".to_owned()];
        let columns = [column("km", ["1.5", "12.25"]), column("score", ["7", "8"]), column("x", ["-", "-"])];
        let whole = "method      km  score  x\none        1.5      7  -\nanother  12.25      8  -\n";
        assert_eq!(table("method", &names, &columns, 24), whole);
        let parts = "method      km  score\none        1.5      7\nanother  12.25      8\n\
                     method   x\none      -\nanother  -\n";
        assert_eq!(table("method", &names, &columns, 23), parts);
        // A column that is too wide for any table gets a table of its own.
        assert_eq!(table("method", &names, &columns[..1], 3).lines().count(), 3);
    }

    #[test]
    fn text_is_broken_at_spaces_and_words_are_kept() {
        assert_eq!(wrapped("three short words", 2, 11), "three short\n  words");
        assert_eq!(wrapped("at /a/very/long/path end", 2, 8), "at\n  /a/very/long/path\n  end");
        assert_eq!(wrapped("", 2, 8), "");
    }
}
