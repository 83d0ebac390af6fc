//! The report as one HTML page. The page loads nothing: style, script and data are in the page, and its content security
//! policy allows only this style and this script, by their hashes.
//!
//! Text from files reaches the page in two ways: escaped in the tables, and in the data, which the script shows only as
//! text.

use std::fmt::Write as _;

use locdiff_core::draw::land_outlines;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::content::{ReportContent, RunFacts};
use super::experiments::experiment_tables;
use super::tables::{self, RowGroup, TextTable};

/// The style of a page with a map.
pub(in crate::verbs) const MAP_STYLE: &str = include_str!("page/report.css");
/// The start of the script of a page with a map.
pub(in crate::verbs) const MAP_SCRIPT: &str =
    concat!("\"use strict\";\n", include_str!("page/base.js"), include_str!("page/world.js"));
/// The rest of the script of a report.
const SCRIPT: &str = concat!(
    include_str!("page/data.js"),
    include_str!("page/charts.js"),
    include_str!("page/map.js"),
    include_str!("page/cells.js"),
    include_str!("page/photos.js"),
    include_str!("page/main.js"),
);

/// Writes the report as HTML.
pub(super) fn page(content: &ReportContent) -> String {
    let script = format!("{MAP_SCRIPT}{SCRIPT}");
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; base-uri 'none'; form-action 'none'",
        source_hash(&script),
        source_hash(MAP_STYLE),
    );
    let sections = sections(content);
    let links = sections.iter().map(|section| format!("<a href=\"#{}\">{}</a>\n", section.id, section.title));
    let bodies = sections.iter().map(|section| {
        let Section { id, title, body } = section;
        format!("<section id=\"{id}\">\n<h2>{title}</h2>\n{body}</section>\n")
    });
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Report: {title}</title>\n<style>{MAP_STYLE}</style>\n\
         </head>\n<body>\n<header>\n<h1>{title}</h1>\n<p>{about}</p>\n<nav aria-label=\"Sections\">\n{links}</nav>\n\
         </header>\n<main>\n{bodies}</main>\n<footer>{version}</footer>\n<div id=\"tip\" role=\"status\" hidden></div>\n\
         <script type=\"application/json\" id=\"data\">{data}</script>\n\
         <script type=\"application/json\" id=\"land\">{land}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        title = escaped(&content.title),
        about = escaped(&about(content)),
        links = links.collect::<String>(),
        bodies = bodies.collect::<String>(),
        version = escaped(&content.version),
        data = json_in_script(content),
        land = land_json(),
    )
}

/// A section of the page. `title` and `body` are HTML.
struct Section {
    id: &'static str,
    title: &'static str,
    body: String,
}

/// The sections for which the report has content. The script fills the empty elements.
fn sections(content: &ReportContent) -> Vec<Section> {
    let notes: String = content.notes.iter().map(|note| format!("<p class=\"note\">{}</p>\n", escaped(note))).collect();
    let chart =
        |id: &str| format!("<div class=\"chart\" id=\"{id}\"></div>\n<noscript>This needs JavaScript.</noscript>\n");
    let mut sections =
        vec![Section { id: "results", title: "Results", body: table_html(&tables::results(content)) + &notes }];
    if !content.systems.is_empty() {
        let about = "<p>The share of photos whose error is at most the distance. Bands are 95 % intervals, from a bootstrap \
                     over places.</p>\n";
        sections.push(Section { id: "curve", title: "Error curve", body: about.to_owned() + &chart("error-curve") });
    }
    if let Some(table) = tables::calibration(content) {
        let body = chart("calibration-curve") + &table_html(&table);
        sections.push(Section { id: "calibration", title: "Calibration", body });
    }
    if !content.photo_sets.is_empty() {
        sections.push(Section { id: "map", title: "Map", body: chart("world") });
        sections.push(Section { id: "photos", title: "Single photos", body: chart("photo") });
    }
    if let Some(table) = tables::training(content) {
        let table = format!("<details><summary>Last values</summary>\n{}</details>\n", table_html(&table));
        sections.push(Section { id: "training", title: "Training", body: chart("training-curves") + &table });
    }
    let with_heading = |table: &TextTable| format!("<h3>{}</h3>\n{}", table.title, table_html(table));
    if !content.experiments.is_empty() {
        let tables = content.experiments.iter().flat_map(experiment_tables);
        let body = tables.map(|table| with_heading(&table)).collect();
        sections.push(Section { id: "experiments", title: "The paper's experiments", body });
    }
    let details = tables::others(content).iter().map(with_heading).collect();
    sections.push(Section { id: "details", title: "Details", body: details });
    sections
}

/// A line about each run.
fn about(content: &ReportContent) -> String {
    let run = |run: &RunFacts| {
        let kind = if run.simulated { "simulated photos" } else { "photos" };
        let step = run.step.map_or_else(String::new, |step| format!("step {step}, "));
        let name = if content.runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
        format!("{name}{step}{} {kind} at {} places", run.photos, run.places)
    };
    content.runs.iter().map(run).collect::<Vec<_>>().join("; ")
}

/// A table as HTML. Each group of rows is a part of its own, with a heading.
fn table_html(table: &TextTable) -> String {
    let heading = |text: &String| format!("<th scope=\"col\">{}</th>", escaped(text));
    let headings: String = table.headings.iter().map(heading).collect();
    let class = if table.is_text { " class=\"text\"" } else { "" };
    let mut html = format!("<div class=\"wide\" tabindex=\"0\"><table{class}>\n<thead><tr>{headings}</tr></thead>\n");
    for rows in table.rows.chunk_by(|one, other| one.group == other.group) {
        let (class, heading) = match rows.first().map(|row| &row.group) {
            Some(RowGroup::Published) => (" class=\"published\"", "published, not computed here".to_owned()),
            Some(RowGroup::Run(run)) => ("", escaped(run)),
            Some(RowGroup::Whole) | None => ("", String::new()),
        };
        let _ = writeln!(html, "<tbody{class}>");
        if !heading.is_empty() {
            let width = table.headings.len();
            let _ = writeln!(html, "<tr><th colspan=\"{width}\" scope=\"rowgroup\">{heading}</th></tr>");
        }
        for row in rows {
            html += "<tr>";
            for (at, cell) in row.cells.iter().enumerate() {
                let small = cell.interval.as_ref().map(|text| format!("<small>{}</small>", escaped(text)));
                let (open, close) = if at == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
                let _ = write!(html, "<{open}>{}{}</{close}>", escaped(&cell.text), small.unwrap_or_default());
            }
            html += "</tr>\n";
        }
        html += "</tbody>\n";
    }
    html += "</table></div>\n";
    if !table.note.is_empty() {
        let _ = writeln!(html, "<p class=\"note\">{}</p>", escaped(&table.note));
    }
    html
}

/// The outlines of land as JSON: longitudes and latitudes in hundredths of a degree.
pub(in crate::verbs) fn land_json() -> String {
    let hundredths = |degrees: &f64| (degrees * 100.0).round() as i32;
    let ring = |ring: &Vec<[f64; 2]>| ring.iter().flatten().map(hundredths).collect();
    json_in_script(&land_outlines().iter().map(ring).collect::<Vec<Vec<i32>>>())
}

/// The hash by which a content security policy allows an inline script or style.
pub(in crate::verbs) fn source_hash(text: &str) -> String {
    format!("'sha256-{}'", base64(&Sha256::digest(text)))
}

/// Text as HTML, also within an attribute.
fn escaped(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => found.push_str("&amp;"),
            '<' => found.push_str("&lt;"),
            '>' => found.push_str("&gt;"),
            '"' => found.push_str("&quot;"),
            '\'' => found.push_str("&#39;"),
            letter if letter.is_control() || ['\u{2028}', '\u{2029}'].contains(&letter) => found.push(' '),
            letter => found.push(letter),
        }
    }
    found
}

/// JSON that can stand in a `<script>` element: nothing in it can end the element or begin a comment. These characters
/// occur in JSON only within strings, so escapes can replace them.
fn json_in_script(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("the content of a report can be written as JSON");
    let escapes =
        [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")];
    escapes.into_iter().fold(json, |json, (letter, escape)| json.replace(letter, escape))
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = (0..3).fold(0_u32, |bits, at| bits << 8 | u32::from(chunk.get(at).copied().unwrap_or_default()));
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let text = "</script><img src=x onerror='alert(1)'>\"&\u{7}\n";
        let html = escaped(text);
        assert_eq!(html, "&lt;/script&gt;&lt;img src=x onerror=&#39;alert(1)&#39;&gt;&quot;&amp;  ");
    }

    #[test]
    fn data_cannot_leave_its_script_and_stays_the_same_json() {
        let hostile = ["</script>", "<!--<script>", "]]>", "\u{2028}\u{2029}", "&lt;", "\"\\u003c", "\u{0}\n\\"];
        let json = json_in_script(&hostile);
        assert!(!json.contains(['<', '>', '&', '\u{2028}', '\u{2029}', '\n', '\0']), "{json}");
        let back: Vec<String> = serde_json::from_str(&json).expect("it is still JSON");
        assert_eq!(back, hostile);
    }

    #[test]
    fn base64_pads_its_last_group() {
        assert_eq!(
            ["", "f", "fo", "foo", "foob"].map(|text| base64(text.as_bytes())),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]
        );
    }
}
