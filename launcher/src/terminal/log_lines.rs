//! The format of log lines on the terminal, such as `16:04:05 INFO  run checkpoints/first`: local time, level, message.

use std::fmt::{self, Write};
use std::io::{self, IsTerminal, Write as _};

use chrono::{DateTime, Local};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::streams::LogWriter;

/// The levels that a log line of a worker can have.
const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];

/// Formats the launcher's own log lines.
#[derive(Debug)]
pub struct LogFormat;

impl<S, N> FormatEvent<S, N> for LogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let is_coloured = writer.has_ansi_escapes();
        write_head(&mut writer, *event.metadata().level(), is_coloured)?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Writes a line without applying the filter `LOCDIFF_LOG`. Such a line has already passed the filter in a worker, or
/// it reports progress.
pub fn log_line(level: Level, text: &str) {
    let mut line = String::new();
    write_head(&mut line, level, io::stderr().is_terminal()).expect("writing to a string cannot fail");
    let _ = LogWriter.write_all(format!("{line}{text}\n").as_bytes());
}

/// Writes the local time and the level.
fn write_head(out: &mut impl Write, level: Level, is_coloured: bool) -> fmt::Result {
    let time = Local::now().format("%H:%M:%S");
    if !is_coloured {
        return write!(out, "{time} {level:<5} ");
    }
    let colour = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        _ => 34,
    };
    write!(out, "\x1b[2m{time}\x1b[0m \x1b[{colour}m{level:<5}\x1b[0m ")
}

/// Splits a worker's log line: returns its level and its message, without the time. A line that a library wrote has no
/// level and is returned unchanged.
pub fn split_line(line: &str) -> (Option<Level>, &str) {
    let rest = match line.split_once(' ') {
        Some((time, rest)) if DateTime::parse_from_rfc3339(time).is_ok() => rest,
        _ => line,
    };
    let (name, message) = rest.trim_start().split_once(' ').unwrap_or_default();
    match LEVELS.into_iter().find(|level| level.as_str() == name) {
        Some(level) => (Some(level), message),
        None => (None, line),
    }
}

/// The lines of a worker that `report` does not repeat. A worker logs an error and then reports it to the launcher,
/// so the report repeats the logged error and the lines that continue it.
pub fn not_repeated<'a>(lines: impl IntoIterator<Item = &'a str>, report: &str) -> Vec<&'a str> {
    let mut is_repeated = false;
    let mut found: Vec<&str> = lines.into_iter().collect();
    found.retain(|line| {
        let (level, message) = split_line(line);
        let may_repeat = level.map_or(is_repeated, |level| level == Level::ERROR);
        is_repeated = may_repeat && report.contains(message.trim());
        !is_repeated
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_level_of_a_worker_are_split_off_and_other_lines_stay() {
        for (line, level, message) in [
            ("2026-11-16T16:04:05.123456Z  WARN slow disk", Some(Level::WARN), "slow disk"),
            ("2026-11-16T16:04:05.123456Z ERROR a:  b", Some(Level::ERROR), "a:  b"),
            (" INFO ready", Some(Level::INFO), "ready"),
            ("INFORMATION about libtorch", None, "INFORMATION about libtorch"),
            ("2026-11-16T16:04:05Z", None, "2026-11-16T16:04:05Z"),
            ("", None, ""),
        ] {
            assert_eq!(split_line(line), (level, message), "{line}");
        }
    }

    #[test]
    fn only_errors_that_the_report_repeats_are_left_out() {
        let lines =
            ["INFO no shards", "ERROR no shards at x:", "  y is empty", "shards", "ERROR other", "WARN no shards"];
        let report = "no shards at x:\n  y is empty\nshards";
        assert_eq!(not_repeated(lines, report), ["INFO no shards", "ERROR other", "WARN no shards"]);
    }

    #[test]
    fn head_has_time_to_the_second_and_a_level_of_fixed_width() {
        let mut head = String::new();
        write_head(&mut head, Level::WARN, false).expect("writing to a string cannot fail");
        let (time, level) = head.split_at(8);
        assert!(time.bytes().enumerate().all(|(at, byte)| if at % 3 == 2 {
            byte == b':'
        } else {
            byte.is_ascii_digit()
        }));
        assert_eq!(level, " WARN  ");
    }
}
