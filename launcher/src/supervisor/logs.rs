//! Output of the workers: joins identical lines for the terminal, and writes one log file of limited size per rank.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::Level;

use crate::terminal::{log_line, not_repeated, split_line};

/// How long a line waits for the same line from other ranks before it is shown.
const WINDOW: Duration = Duration::from_millis(300);

/// Largest number of lines that wait at the same time (see `WINDOW`). With more lines, the oldest are shown at once.
const WAITING_MAX: usize = 64;

/// Largest number of lines that are held back until the gang has ended.
const HELD_MAX: usize = 256;

/// When the middle of a log is removed, its newest lines are copied towards the beginning in pieces of this many bytes.
const PIECE_BYTES: usize = 1 << 16;

/// Joins identical lines of several ranks.
#[derive(Debug)]
pub(super) struct SharedLines {
    ranks: usize,
    waiting: VecDeque<SharedLine>,
}

#[derive(Debug)]
struct SharedLine {
    level: Option<Level>,
    text: String,
    ranks: Vec<usize>,
    show_at: Instant,
}

impl SharedLines {
    /// Creates an empty collection of lines for a gang of `ranks` ranks.
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, waiting: VecDeque::new() }
    }

    /// Takes a line that a rank wrote at the time `now`.
    pub(super) fn add(&mut self, rank: usize, line: &str, now: Instant) {
        let (level, text) = split_line(line);
        let is_same = |line: &SharedLine| line.level == level && line.text == text && !line.ranks.contains(&rank);
        let same = self.waiting.iter_mut().find(|line| is_same(line));
        match same {
            Some(line) => line.ranks.push(rank),
            None => {
                let line = SharedLine { level, text: text.to_owned(), ranks: vec![rank], show_at: now + WINDOW };
                self.waiting.push_back(line);
            }
        }
    }

    /// The time at which [`SharedLines::due`] must be called if no further line arrives. `None` if no line waits.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.front().map(|line| line.show_at)
    }

    /// Removes the lines that are due at the time `now`, and returns them.
    pub(super) fn due(&mut self, now: Instant) -> Vec<ShownLine> {
        let mut shown = Vec::new();
        while let Some(first) = self.waiting.front() {
            let is_whole = first.ranks.len() == self.ranks;
            if !(is_whole || now >= first.show_at || self.waiting.len() > WAITING_MAX) {
                break;
            }
            shown.extend(self.waiting.pop_front().map(|line| line.shown(self.ranks)));
        }
        shown
    }

    /// Removes all waiting lines and returns them.
    pub(super) fn all(&mut self) -> Vec<ShownLine> {
        self.waiting.drain(..).map(|line| line.shown(self.ranks)).collect()
    }
}

impl SharedLine {
    /// The line as it is shown for a gang of `ranks` ranks. If there is only one rank, its number is left out.
    fn shown(mut self, ranks: usize) -> ShownLine {
        self.ranks.sort_unstable();
        let text = if ranks == 1 { self.text } else { format!("[{}] {}", ranks_text(&self.ranks), self.text) };
        ShownLine { level: self.level, text }
    }
}

/// A line for the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ShownLine {
    /// The level that the worker gave; `None` if a library wrote the line.
    level: Option<Level>,
    text: String,
}

impl ShownLine {
    /// Writes the line to the terminal.
    pub(super) fn show(&self) {
        match self.level {
            Some(level) => log_line(level, &self.text),
            None => tracing::info!("{}", self.text),
        }
    }
}

/// The errors of a gang's workers. They are held back until the gang has ended, because the report of a failed gang
/// repeats most of them.
#[derive(Debug, Default)]
pub(super) struct HeldErrors {
    /// Rank and line, in the order of arrival.
    lines: Vec<(usize, String)>,
    /// Ranks whose newest line is held back.
    open: BTreeSet<usize>,
}

impl HeldErrors {
    /// Holds the line back if it is an error, or if it has no level and the previous line of the rank is held back. If
    /// too many lines are held back already, does nothing. Returns whether the line is held back.
    pub(super) fn hold(&mut self, rank: usize, line: &str) -> bool {
        let belongs = split_line(line).0.map_or(self.open.contains(&rank), |level| level == Level::ERROR);
        let is_held = belongs && self.lines.len() < HELD_MAX;
        if is_held {
            self.open.insert(rank);
            self.lines.push((rank, line.to_owned()));
        } else {
            self.open.remove(&rank);
        }
        is_held
    }

    /// Removes all lines and returns those that `report` does not repeat. `ranks` is the number of ranks in the gang.
    pub(super) fn take_unreported(&mut self, report: &str, ranks: usize) -> Vec<ShownLine> {
        let (held, mut shared) = (std::mem::take(self), SharedLines::new(ranks));
        for rank in 0..ranks {
            let own = held.lines.iter().filter(|(of, _)| *of == rank).map(|(_, line)| line.as_str());
            not_repeated(own, report).iter().for_each(|line| shared.add(rank, line, Instant::now()));
        }
        shared.all()
    }
}

/// The names of sorted ranks, such as `rank 3` or `ranks 0, 2-7`.
fn ranks_text(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|one, next| one + 1 == *next);
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(ToString::to_string).collect(),
    };
    let text = runs.map(run).collect::<Vec<_>>().join(", ");
    format!("rank{} {text}", if ranks.len() == 1 { "" } else { "s" })
}

/// The log file of one rank in one attempt. If a log would exceed its limit, its middle is removed. The beginning,
/// which takes half of the limit, and the newest lines are kept. A line at the gap says how many bytes were cut.
#[derive(Debug)]
pub struct CappedLog {
    file: File,
    bytes: u64,
    bytes_max: u64,
    /// Number of bytes cut so far.
    cut: u64,
    /// Length in bytes of the line that the log contains at the gap. The line says how many bytes were cut.
    note_bytes: u64,
    /// Position of the gap, where the kept beginning of the log ends. It is always the end of a line. `None` until the
    /// log reaches its limit.
    kept_until: Option<u64>,
}

impl CappedLog {
    /// Creates or empties the file.
    pub fn create(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Self { file, bytes: 0, bytes_max, cut: 0, note_bytes: 0, kept_until: None })
    }

    /// Appends a line.
    pub fn add(&mut self, line: &str) -> io::Result<()> {
        let line = format!("{line}\n");
        if self.bytes + line.len() as u64 > self.bytes_max && self.bytes > self.bytes_max / 2 {
            self.cut_middle()?;
        }
        self.file.write_all_at(line.as_bytes(), self.bytes)?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// Removes the middle of the log. Keeps the beginning, then writes a line about the gap, and moves the newest lines
    /// to just after that line. The newest lines take a quarter of the limit.
    fn cut_middle(&mut self) -> io::Result<()> {
        let gap = match self.kept_until {
            Some(end) => end,
            None => self.after_line(self.bytes_max / 2)?,
        };
        self.kept_until = Some(gap);
        let mut from = self.after_line(self.bytes.saturating_sub(self.bytes_max / 4).max(gap))?;
        if from == gap {
            return Ok(());
        }
        // The removed part includes the note that the previous cut wrote into the log. The worker did not write this
        // note, so its bytes are not counted.
        self.cut += (from - gap).saturating_sub(self.note_bytes);
        let note = format!("... {} bytes were cut here: supervise.log_bytes_max is {}\n", self.cut, self.bytes_max);
        self.file.write_all_at(note.as_bytes(), gap)?;
        self.note_bytes = note.len() as u64;
        let mut to = gap + self.note_bytes;
        let mut piece = vec![0; PIECE_BYTES];
        // The newest lines move towards the beginning of the file, and their old and new places may overlap. So copy
        // piece by piece, from the first piece to the last.
        while from < self.bytes {
            let count = usize::try_from(self.bytes - from).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
            self.file.read_exact_at(&mut piece[..count], from)?;
            self.file.write_all_at(&piece[..count], to)?;
            (from, to) = (from + count as u64, to + count as u64);
        }
        self.file.set_len(to)?;
        self.file.flush()?;
        self.bytes = to;
        Ok(())
    }

    /// The position after the first line that ends at `from` or later.
    fn after_line(&self, mut from: u64) -> io::Result<u64> {
        let mut piece = [0; 512];
        while from < self.bytes {
            let count = self.file.read_at(&mut piece, from)?;
            match piece[..count].iter().position(|byte| *byte == b'\n') {
                Some(place) => return Ok(from + place as u64 + 1),
                None if count == 0 => break,
                None => from += count as u64,
            }
        }
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identical_lines_of_several_ranks_are_shown_once() {
        let start = Instant::now();
        let mut lines = SharedLines::new(4);
        lines.add(0, "hello", start);
        lines.add(2, "hello", start);
        lines.add(3, "hello", start + WINDOW / 2);
        lines.add(3, "only I", start + WINDOW / 2);
        lines.add(3, "hello", start + WINDOW / 2);
        assert!(lines.due(start + WINDOW / 2).is_empty(), "a line did not wait for the other ranks");
        assert_eq!(lines.deadline(), Some(start + WINDOW));
        assert_eq!(texts(&lines.due(start + WINDOW)), ["[ranks 0, 2-3] hello"]);
        assert_eq!(texts(&lines.all()), ["[rank 3] only I", "[rank 3] hello"]);
        for rank in 0..4 {
            lines.add(rank, "all", start);
        }
        assert_eq!(texts(&lines.due(start)), ["[ranks 0-3] all"], "a line waited although every rank had written it");
        for number in 0..=WAITING_MAX {
            lines.add(0, &number.to_string(), start);
        }
        assert_eq!(texts(&lines.due(start)), ["[rank 0] 0"], "the number of waiting lines is not limited");
    }

    fn texts(lines: &[ShownLine]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

    #[test]
    fn lines_keep_their_level_and_lose_their_time_and_the_rank_of_an_only_worker() {
        let start = Instant::now();
        let mut lines = SharedLines::new(2);
        lines.add(0, "2026-11-16T16:04:05.000001Z  WARN slow", start);
        lines.add(1, "2026-11-16T16:04:05.000002Z  WARN slow", start);
        assert_eq!(lines.all(), [ShownLine { level: Some(Level::WARN), text: "[ranks 0-1] slow".into() }]);
        let mut lines = SharedLines::new(1);
        lines.add(0, "from a library", start);
        assert_eq!(lines.all(), [ShownLine { level: None, text: "from a library".into() }]);
    }

    #[test]
    fn errors_are_held_back_and_shown_unless_the_report_repeats_them() {
        let mut held = HeldErrors::default();
        assert!(!held.hold(0, " INFO begins") && !held.hold(0, "from a library"));
        assert!(held.hold(0, "ERROR bad data:") && held.hold(0, "  row 7") && held.hold(1, "ERROR peer closed"));
        assert!(!held.hold(0, " INFO ends") && !held.hold(0, "from a library"));
        assert_eq!(
            texts(&held.take_unreported("worker rank 0 failed: bad data:\n  row 7", 2)),
            ["[rank 1] peer closed"]
        );
        assert!(held.take_unreported("", 2).is_empty(), "a line was shown twice");
        for number in 0..=HELD_MAX {
            assert_eq!(held.hold(0, &format!("ERROR {number}")), number < HELD_MAX);
        }
    }

    #[test]
    fn long_log_keeps_its_beginning_and_its_newest_part() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("rank-0.log");
        let bytes_max = 4096;
        let mut log = CappedLog::create(&path, bytes_max).expect("the file can be created");
        let mut total = 0;
        for number in 0..5000 {
            let line = format!("line {number} {}", "x".repeat(number % 40));
            total += line.len() as u64 + 1;
            log.add(&line).expect("the file is writable");
            let size = std::fs::metadata(&path).expect("the file exists").len();
            assert!(size <= bytes_max, "the file has {size} bytes");
        }
        let text = std::fs::read_to_string(&path).expect("the log is text");
        let lines: Vec<&str> = text.lines().collect();
        let gap = lines.iter().position(|line| line.starts_with("... ")).expect("a line says how much was cut");
        let number = |line: &str| line.split(' ').nth(1).and_then(|word| word.parse::<usize>().ok());
        let numbers: Vec<_> = lines.iter().map(|line| number(line).expect("each line has a number")).collect();
        assert!(numbers[..gap].iter().copied().eq(0..gap), "the beginning has gaps: {text}");
        assert!(numbers[gap + 1..].iter().copied().eq(numbers[gap + 1]..5000), "the newest part has gaps: {text}");
        assert!(lines[..gap].join("\n").len() >= 2000 && lines.len() - gap > 20, "too little was kept: {text}");
        let left = (text.len() - lines[gap].len() - 1) as u64;
        assert_eq!(numbers[gap] as u64, total - left, "the line at the gap gives a wrong number: {}", lines[gap]);
    }

    #[test]
    fn line_longer_than_the_limit_is_not_lost() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("rank-0.log");
        let mut log = CappedLog::create(&path, 4096).expect("the file can be created");
        for _ in 0..3 {
            log.add(&"y".repeat(8000)).expect("the file is writable");
        }
        let text = std::fs::read_to_string(&path).expect("the log is text");
        assert!(text.ends_with(&format!("{}\n", "y".repeat(8000))), "the newest line is missing");
        assert!(text.len() < 20_000, "the file has {} bytes", text.len());
    }
}
