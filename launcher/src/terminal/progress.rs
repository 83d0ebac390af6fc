//! Progress of training and evaluation: a bar if stderr is a terminal, otherwise lines.
//!
//! The remaining time is estimated from the pace since the first report of this attempt. So the estimate does not depend
//! on earlier attempts or on the time that the workers took to start. Pure functions format the text.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use locdiff_core::protocol::{Progress, QuickEvaluation};
use tracing::Level;

use super::log_lines::log_line;
use super::streams::{BarState, draw};

/// Shortest time between two lines that [`Display::count`] writes.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// The pace of an attempt, from which the remaining time is estimated.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pace {
    /// Time and step of the attempt's first report.
    first: Option<(Instant, u64)>,
}

impl Pace {
    const NEW: Self = Self { first: None };

    /// Handles the report that `step` of `steps` steps are done at the time `now`. Returns the remaining time, or
    /// `None` if no step has been made since the first report.
    fn time_left(&mut self, step: u64, steps: u64, now: Instant) -> Option<Duration> {
        let (begun, first_step) = *self.first.get_or_insert((now, step));
        if step < first_step {
            // The step is lower than in the first report, so another attempt has begun.
            self.first = Some((now, step));
        }
        let made = step.checked_sub(first_step).filter(|made| *made > 0)?;
        let per_step_s = now.saturating_duration_since(begun).as_secs_f64() / made as f64;
        Duration::try_from_secs_f64(per_step_s * steps.saturating_sub(step) as f64).ok()
    }
}

/// Shows the reports of a run as they arrive.
#[derive(Debug)]
pub struct Display {
    /// Whether a bar is drawn. It is drawn only if stderr is a terminal.
    has_bar: bool,
    pace: Pace,
    /// When [`Display::count`] last wrote a line. Before its first line: when the display was created.
    counted_at: Instant,
}

impl Display {
    /// Creates a display that shows nothing until the first report.
    pub(crate) fn new() -> Self {
        Self { has_bar: io::stderr().is_terminal(), pace: Pace::NEW, counted_at: Instant::now() }
    }

    /// Shows a progress report.
    pub fn report(&mut self, progress: &Progress) {
        let left = self.pace.time_left(progress.step, progress.steps, Instant::now());
        if self.has_bar {
            let message = bar_message(progress, left);
            draw(Some(BarState { step: progress.step, steps: progress.steps, message }));
        } else {
            log_line(Level::INFO, &report_line(progress, left));
        }
    }

    /// Shows that `done` of `total` items are done. `what` names the items and the work, such as "photos located".
    /// Without a bar, writes at most one line per `COUNT_INTERVAL`, and a last line when all items are done.
    pub fn count(&mut self, what: &str, done: u64, total: u64) {
        let left = self.pace.time_left(done, total, Instant::now()).filter(|_| done < total);
        let left = left.map_or_else(String::new, |left| format!(", {} left", duration_text(left)));
        if self.has_bar {
            draw(Some(BarState { step: done, steps: total, message: format!("{what}{left}") }));
        } else if done == total || self.counted_at.elapsed() >= COUNT_INTERVAL {
            self.counted_at = Instant::now();
            tracing::info!("{done} of {total} {what}{left}");
        }
    }

    /// Shows a quick evaluation as a line that stays above the bar.
    pub fn evaluated(&mut self, evaluation: &QuickEvaluation) {
        log_line(Level::INFO, &evaluation_line(evaluation));
    }

    /// Removes the bar from the terminal.
    pub fn finish(&mut self) {
        if std::mem::take(&mut self.has_bar) {
            draw(None);
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Formats a progress report as a line, such as `step 120 of 1500: loss 1.2345, ...`.
fn report_line(progress: &Progress, left: Option<Duration>) -> String {
    format!(
        "step {} of {}: loss {:.4}, gradient norm {:.3}, {} samples/s, data wait {:.0} %{}{}",
        progress.step,
        progress.steps,
        progress.loss,
        progress.gradient_norm,
        rate_text(progress.samples_per_s),
        progress.data_wait * 100.0,
        skipped_text(progress),
        time_left_text(progress, left)
    )
}

/// Formats the text to the right of the bar. The most important values come first, because a narrow terminal cuts off
/// the end.
fn bar_message(progress: &Progress, left: Option<Duration>) -> String {
    format!(
        "loss {:.4}, {} samples/s{}, data wait {:.0} %{}",
        progress.loss,
        rate_text(progress.samples_per_s),
        time_left_text(progress, left),
        progress.data_wait * 100.0,
        skipped_text(progress)
    )
}

fn skipped_text(progress: &Progress) -> String {
    if progress.skipped_steps > 0 { format!(", {} skipped", progress.skipped_steps) } else { String::new() }
}

fn time_left_text(progress: &Progress, left: Option<Duration>) -> String {
    let left = left.filter(|_| progress.step < progress.steps);
    left.map_or_else(String::new, |left| format!(", {} left", duration_text(left)))
}

/// Formats a quick evaluation as a line, such as `step 500: GeoScore 3120; 0.0, 2.3, ...`.
fn evaluation_line(evaluation: &QuickEvaluation) -> String {
    let within = evaluation.within_percent.map(|percent| format!("{percent:.1}")).join(", ");
    format!(
        "step {}: GeoScore {:.0}; {within} % of {} rows within 1, 25, 200, 750, 2500 km",
        evaluation.step, evaluation.score, evaluation.rows
    )
}

/// Formats a rate, with one decimal if it is below 10, else without decimals.
fn rate_text(per_s: f64) -> String {
    if per_s < 10.0 { format!("{per_s:.1}") } else { format!("{per_s:.0}") }
}

/// Formats a duration with at most two units, such as `1 h 30 min`.
fn duration_text(duration: Duration) -> String {
    let minutes = (duration.as_secs() + 30) / 60;
    match (duration.as_secs(), minutes) {
        (seconds @ ..90, _) => format!("{seconds} s"),
        (_, minutes @ ..90) => format!("{minutes} min"),
        (_, minutes) if minutes < 48 * 60 => format!("{} h {} min", minutes / 60, minutes % 60),
        (_, minutes) => format!("{} d {} h", minutes / 1440, minutes % 1440 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress() -> Progress {
        Progress {
            step: 120,
            steps: 1500,
            loss: 1.23449,
            gradient_norm: 0.98,
            learning_rate: 5e-4,
            samples_per_s: 4312.4,
            data_wait: 0.031,
            slowest_step_ms: 0.0,
            skipped_steps: 0,
        }
    }

    #[test]
    fn report_is_one_line() {
        let text = report_line(&progress(), Some(Duration::from_secs(12 * 60 + 20)));
        assert_eq!(
            text,
            "step 120 of 1500: loss 1.2345, gradient norm 0.980, 4312 samples/s, data wait 3 %, 12 min left"
        );
    }

    #[test]
    fn time_left_is_omitted_when_unknown_or_at_the_end() {
        assert!(report_line(&progress(), None).ends_with("data wait 3 %"));
        let last = Progress { step: 1500, ..progress() };
        assert!(report_line(&last, Some(Duration::ZERO)).ends_with("data wait 3 %"));
    }

    #[test]
    fn skipped_steps_and_non_finite_numbers_are_shown() {
        let non_finite = Progress { loss: f64::NAN, gradient_norm: f64::INFINITY, skipped_steps: 2, ..progress() };
        let text = report_line(&non_finite, None);
        assert!(text.contains("loss NaN, gradient norm inf,") && text.ends_with("data wait 3 %, 2 skipped"), "{text}");
    }

    #[test]
    fn evaluation_is_one_line() {
        let within_percent = [0.0, 2.34, 41.0, 60.5, 88.25];
        let evaluation = QuickEvaluation { step: 500, rows: 512, score: 3120.4, within_percent };
        let want = "step 500: GeoScore 3120; 0.0, 2.3, 41.0, 60.5, 88.2 % of 512 rows within 1, 25, 200, 750, 2500 km";
        assert_eq!(evaluation_line(&evaluation), want);
    }

    #[test]
    fn durations_use_suitable_units() {
        let text = |seconds| duration_text(Duration::from_secs(seconds));
        assert_eq!(text(0), "0 s");
        assert_eq!(text(89), "89 s");
        assert_eq!(text(100), "2 min");
        assert_eq!(text(89 * 60), "89 min");
        assert_eq!(text(90 * 60), "1 h 30 min");
        assert_eq!(text(47 * 3600), "47 h 0 min");
        assert_eq!(text(50 * 3600), "2 d 2 h");
        assert_eq!(rate_text(2.345), "2.3");
    }

    #[test]
    fn time_left_follows_the_pace_of_this_attempt() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut pace = Pace::NEW;
        // The run was resumed at step 1000. The steps before it do not affect the estimate.
        assert_eq!(pace.time_left(1010, 2000, after(60)), None);
        assert_eq!(pace.time_left(1020, 2000, after(70)), Some(Duration::from_secs(980)));
        assert_eq!(pace.time_left(1030, 2000, after(80)), Some(Duration::from_secs(970)));
        assert_eq!(pace.time_left(2000, 2000, after(1050)), Some(Duration::ZERO));
        // The step goes back to 1005, because the workers were restarted.
        assert_eq!(pace.time_left(1005, 2000, after(1100)), None);
        assert_eq!(pace.time_left(1015, 2000, after(1120)), Some(Duration::from_secs(1970)));
        // Two reports with the same step, and then a clock that goes backwards.
        let mut pace = Pace::NEW;
        assert_eq!([pace.time_left(5, 10, after(0)), pace.time_left(5, 10, after(1))], [None, None]);
        let mut pace = Pace { first: Some((after(9), 0)) };
        assert_eq!(pace.time_left(5, 10, after(3)), Some(Duration::ZERO));
    }

    #[test]
    fn time_left_fits_in_80_columns() {
        let wide = Progress { step: 123_456, steps: 200_000, skipped_steps: 2, ..progress() };
        let message = bar_message(&wide, Some(Duration::from_secs(80_000)));
        assert_eq!(message, "loss 1.2345, 4312 samples/s, 22 h 13 min left, data wait 3 %, 2 skipped");
        let columns = "[============] 123456/200000 loss 1.2345, 4312 samples/s, 22 h 13 min left".len();
        assert!(columns <= 80, "the line has {columns} columns, wanted at most 80");
    }
}
