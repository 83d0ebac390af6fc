//! The threads that write to stderr and stdout.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, Once, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing_subscriber::fmt::MakeWriter;

use super::backlog::{Backlog, NextItem};
use super::layout::width_of;

/// Largest total size of the lines that wait for the terminal, in bytes.
const BYTES_MAX: usize = 1 << 20;

/// How long [`write_stdout`] waits until stderr is written, and then until stdout is written. If the readers of both
/// streams keep up, these waits keep the lines on stderr and the text on stdout in order.
const ORDER_PATIENCE: Duration = Duration::from_millis(200);

/// Time between two tries to write to a full stream that another program has made non-blocking.
const RETRY: Duration = Duration::from_millis(10);

static STDERR: Backlog<Piece> = Backlog::new(BYTES_MAX);
static STDOUT: Backlog<String> = Backlog::new(0);
/// The bar to draw, and whether a [`Piece::Bar`] is already queued for the thread that writes to stderr.
static BAR: Mutex<(Option<BarState>, bool)> = Mutex::new((None, false));
/// The first write error of stdout.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);
static STARTED: Once = Once::new();

/// A piece of work for the thread that writes to stderr.
enum Piece {
    Text(Vec<u8>),
    /// The bar has changed.
    Bar,
}

/// Writes log lines to stderr, or drops them while stderr is stuck.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        start();
        STDERR.offer(Piece::Text(bytes.to_owned()), bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for LogWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

/// Writes text to stderr that must not be dropped, such as the error of a command.
pub fn write_stderr(text: String) {
    start();
    STDERR.push(Piece::Text(text.into_bytes()));
}

/// Writes text to stdout.
pub fn write_stdout(text: String) {
    start();
    STDERR.wait_until_idle(ORDER_PATIENCE);
    let was_idle = STDOUT.is_idle();
    STDOUT.push(text);
    if was_idle {
        STDOUT.wait_until_idle(ORDER_PATIENCE);
    }
}

/// Waits until all text has been written to stderr, at most for `limit`.
pub fn flush_stderr(limit: Duration) {
    STDERR.wait_until_idle(limit);
}

/// Waits until all text has been written to stdout, at most for `limit`. Returns whether all text was written, or the
/// first write error. It is not an error if the reader of a pipe has gone (`| head`) or the terminal has closed.
pub fn wait_for_stdout(limit: Duration) -> io::Result<bool> {
    let is_written = STDOUT.wait_until_idle(limit);
    LOST.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(is_written), Err)
}

/// Draws the progress bar, or removes it.
pub(super) fn draw(bar: Option<BarState>) {
    start();
    let mut shown = BAR.lock().unwrap_or_else(PoisonError::into_inner);
    shown.0 = bar;
    // `Piece::Bar` holds no state: the thread that draws it reads the newest state. So one queued piece is enough.
    if !std::mem::replace(&mut shown.1, true) {
        STDERR.push(Piece::Bar);
    }
}

/// Starts the two threads on the first call.
fn start() {
    STARTED.call_once(|| {
        // Write to duplicates of the streams, because duplicates have no lock. A thread that is stuck in a write to
        // `io::stderr()` would hold the lock of `io::stderr()`, and all other threads that write there would wait.
        let duplicate = |stream: &dyn AsFd| stream.as_fd().try_clone_to_owned().map(File::from);
        let is_terminal = io::IsTerminal::is_terminal(&io::stdout());
        let (stderr, stdout) = (duplicate(&io::stderr()), duplicate(&io::stdout()));
        let name = |name: &str| Builder::new().name(name.to_owned());
        let started = stderr.and_then(|stream| {
            let columns = || width_of(io::stderr()).unwrap_or_default();
            let screen = Screen { stream, bar: None, target: ProgressDrawTarget::stderr, columns };
            name("stderr").spawn(move || screen.serve())
        });
        let started =
            started.and(stdout).and_then(|stream| name("stdout").spawn(move || serve_stdout(stream, is_terminal)));
        started.expect("a process that has just started can start two threads");
    });
}

fn serve_stdout(mut stream: File, is_terminal: bool) {
    while let NextItem::Item(text) = STDOUT.next(None) {
        if let Err(error) = write_fully(&mut stream, text.as_bytes()) {
            let is_closed = error.kind() == ErrorKind::BrokenPipe;
            let is_hung_up = is_terminal && error.raw_os_error() == Some(nix::errno::Errno::EIO as i32);
            if !is_closed && !is_hung_up {
                LOST.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    }
}

/// Like `write_all`, but if the stream is non-blocking and full, waits and tries again.
fn write_fully(stream: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Stderr and the progress bar that is shown on it.
struct Screen<W> {
    stream: W,
    bar: Option<ProgressBar>,
    /// Where a new bar is drawn.
    target: fn() -> ProgressDrawTarget,
    /// The width of the terminal; 0 if it is unknown.
    columns: fn() -> usize,
}

impl<W: Write> Screen<W> {
    fn serve(mut self) {
        loop {
            match STDERR.next(None) {
                NextItem::Item(Piece::Text(bytes)) => self.write(&bytes),
                NextItem::Item(Piece::Bar) => {
                    let mut shown = BAR.lock().unwrap_or_else(PoisonError::into_inner);
                    shown.1 = false;
                    let bar = shown.0.clone();
                    drop(shown);
                    self.show(bar.as_ref());
                }
                NextItem::Dropped(lines) => {
                    self.write(format!("dropped {lines} lines: the terminal does not keep up\n").as_bytes());
                }
                NextItem::Nothing | NextItem::Closed => return,
            }
        }
    }

    /// Writes text while the bar is hidden. Ignores errors: a closed terminal must not stop a run.
    fn write(&mut self, bytes: &[u8]) {
        let _ = match &self.bar {
            Some(bar) => bar.suspend(|| write_fully(&mut self.stream, bytes)),
            None => write_fully(&mut self.stream, bytes),
        };
    }

    fn show(&mut self, state: Option<&BarState>) {
        match state {
            Some(state) => {
                let bar = self.bar.get_or_insert_with(|| ProgressBar::with_draw_target(Some(0), (self.target)()));
                state.draw(bar, (self.columns)());
            }
            None => drop(self.bar.take().inspect(ProgressBar::finish_and_clear)),
        }
    }
}

/// The contents of the progress bar.
#[derive(Debug, Clone)]
pub(super) struct BarState {
    pub(super) step: u64,
    pub(super) steps: u64,
    /// Text to the right of the bar.
    pub(super) message: String,
}

/// Smallest width of the bar, in columns. If the terminal is too narrow for the bar and the message, the end of the
/// message is cut off.
const BAR_MIN: usize = 12;

/// The space for the message is a multiple of this many columns, so that the bar seldom changes its width.
const MESSAGE_STEP: usize = 8;

impl BarState {
    /// Draws the bar. The bar fills the columns that the numbers and the message leave free.
    fn draw(&self, bar: &ProgressBar, columns: usize) {
        bar.set_style(style(self.bar_width(columns)));
        bar.set_length(self.steps);
        bar.set_position(self.step);
        bar.set_message(self.message.clone());
        bar.tick();
    }

    fn bar_width(&self, columns: usize) -> usize {
        let numbers = format!("[] {}/{} ", self.steps, self.steps).len();
        let message = self.message.chars().count().next_multiple_of(MESSAGE_STEP);
        columns.saturating_sub(numbers + message).max(BAR_MIN)
    }
}

/// The style of a bar that is `width` columns wide.
fn style(width: usize) -> ProgressStyle {
    let style = ProgressStyle::with_template(&format!("[{{bar:{width}}}] {{pos}}/{{len}} {{wide_msg}}"));
    style.expect("the template is valid: a test draws it").progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use indicatif::TermLike;

    use super::*;

    /// A terminal that records every line that is drawn or written, in order.
    #[derive(Debug, Clone)]
    struct RecordingTerminal;

    /// The lines of all [`RecordingTerminal`]s.
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    impl RecordingTerminal {
        fn add(&self, text: &str) {
            if !text.trim().is_empty() {
                LINES.lock().expect("no thread panicked while it held the lock").push(text.trim().to_owned());
            }
        }
    }

    impl TermLike for RecordingTerminal {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.add(text);
            Ok(())
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.add(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.add("(cleared)");
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Write for RecordingTerminal {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.add(&String::from_utf8_lossy(bytes));
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bar_is_hidden_while_log_lines_are_written() {
        let target = || ProgressDrawTarget::term_like(Box::new(RecordingTerminal));
        let mut screen = Screen { stream: RecordingTerminal, bar: None, target, columns: || 80 };
        screen.show(Some(&BarState { step: 120, steps: 1500, message: "loss 1.2345".into() }));
        screen.write(b"a log line\n");
        screen.show(None);
        screen.write(b"the end\n");
        let seen = LINES.lock().expect("no thread panicked while it held the lock").clone();
        let place = seen.iter().position(|text| text == "a log line").expect("the log line was written");
        assert_eq!(seen[place - 1], "(cleared)", "{seen:?}");
        let bar = format!("[====>{}] 120/1500 loss 1.2345", " ".repeat(46));
        assert_eq!(seen[place + 1], bar, "{seen:?}");
        assert_eq!(seen[seen.len() - 2..], ["(cleared)", "the end"], "{seen:?}");
    }

    #[test]
    fn bar_fills_the_terminal_and_leaves_room_for_the_message() {
        let state = |message: &str| BarState { step: 7, steps: 100, message: message.to_owned() };
        let widths = [40, 80, 120].map(|columns| state("loss 1.2345, 12 min left").bar_width(columns));
        assert_eq!(widths, [12, 45, 85], "wanted columns - 11 (numbers) - 24 (message), at least 12");
        assert_eq!(state("loss 1.2, 9 min left").bar_width(80), 45, "a shorter message moved the end of the bar");
        assert_eq!(state("x").bar_width(0), 12);
    }

    /// A stream that accepts one byte per write, and is full at every second write.
    struct SlowStream(Vec<u8>, bool);

    impl Write for SlowStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(ErrorKind::WouldBlock.into());
            }
            self.0.push(bytes[0]);
            Ok(1)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn whole_text_is_written_to_a_non_blocking_stream() {
        let mut stream = SlowStream(Vec::new(), false);
        write_fully(&mut stream, b"text").expect("the stream accepts all bytes in the end");
        assert_eq!(stream.0, b"text");
    }
}
