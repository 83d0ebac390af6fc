//! The report as Markdown.

use std::fmt::Write as _;

use super::content::ReportContent;
use super::experiments::experiment_tables;
use super::tables::{self, RowGroup, TextCell, TextTable};

/// Characters that have a meaning in Markdown or in HTML.
const SPECIAL: &str = "\\`*_[]<>|#~&$";

/// Writes the report as Markdown.
pub(super) fn markdown(content: &ReportContent) -> String {
    let mut text = format!("# Report: {}\n\nWritten by {}.\n", escaped(&content.title), escaped(&content.version));
    for note in &content.notes {
        let _ = write!(text, "\n> {}\n", escaped(note));
    }
    let mut all = vec![tables::results(content)];
    all.extend(tables::others(content));
    all.extend(tables::calibration(content));
    all.extend(tables::training(content));
    all.extend(content.experiments.iter().flat_map(experiment_tables));
    for table in &all {
        let _ = write!(text, "\n## {}\n\n{}", table.title, table_text(table));
    }
    text
}

fn table_text(table: &TextTable) -> String {
    let line = |cells: &mut dyn Iterator<Item = String>| {
        cells.fold("|".to_owned(), |line, cell| format!("{line} {cell} |")) + "\n"
    };
    let mut text = line(&mut table.headings.iter().map(|heading| escaped(heading)));
    text += &line(
        &mut table
            .headings
            .iter()
            .enumerate()
            .map(|(at, _)| if at == 0 || table.is_text { "---" } else { "---:" }.to_owned()),
    );
    for row in &table.rows {
        let group = match &row.group {
            RowGroup::Whole => String::new(),
            RowGroup::Run(run) => format!("{}: ", escaped(run)),
            RowGroup::Published => "published: ".to_owned(),
        };
        let cell = |(at, cell): (usize, &TextCell)| {
            let interval = cell.interval.as_ref().map_or_else(String::new, |found| format!("<br>{}", escaped(found)));
            format!("{}{}{interval}", if at == 0 { &group } else { "" }, escaped(&cell.text))
        };
        text += &line(&mut row.cells.iter().enumerate().map(cell));
    }
    if table.note.is_empty() { text } else { format!("{text}\n{}\n", escaped(&table.note)) }
}

/// Text that Markdown shows as it is, also in a cell of a table.
fn escaped(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '<' => found.push_str("&lt;"),
            '&' => found.push_str("&amp;"),
            letter if letter.is_control() || ['\u{2028}', '\u{2029}'].contains(&letter) => found.push(' '),
            letter => {
                if SPECIAL.contains(letter) {
                    found.push('\\');
                }
                found.push(letter);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_end_its_cell_or_become_markup() {
        assert_eq!(escaped("a|b\nc"), "a\\|b c");
        assert_eq!(escaped("<script>&lt;"), "&lt;script\\>&amp;lt;");
        assert_eq!(escaped("[x](http://e) `c` *b* _i_ \\|"), "\\[x\\](http://e) \\`c\\` \\*b\\* \\_i\\_ \\\\\\|");
        assert_eq!(escaped("LocDiff (L = 15), 2\u{2013}3 %"), "LocDiff (L = 15), 2\u{2013}3 %");
    }
}
