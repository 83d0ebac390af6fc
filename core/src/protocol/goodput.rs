//! Goodput: the share of a run's wall time spent on steps that were not lost in a failure.

use serde::{Deserialize, Serialize};

/// How a run spent its wall time, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Goodput {
    /// Time spent on training steps that were not lost in a failure.
    pub steps_s: f64,
    /// Time from the start of a launcher to its first step.
    pub start_s: f64,
    /// Waiting for data between steps.
    pub data_s: f64,
    /// Waiting for checkpoints.
    pub checkpoint_s: f64,
    /// Quick evaluations.
    pub evaluation_s: f64,
    /// Time from a failure to the next step.
    pub restart_s: f64,
    /// Time spent on training steps that were lost in a failure, because no checkpoint contains their results.
    pub lost_s: f64,
}

impl Goodput {
    /// Each activity that does not count as goodput: its name and the seconds spent on it.
    pub fn losses(&self) -> [(&'static str, f64); 6] {
        [
            ("start", self.start_s),
            ("data", self.data_s),
            ("checkpoint", self.checkpoint_s),
            ("evaluation", self.evaluation_s),
            ("restart", self.restart_s),
            ("lost steps", self.lost_s),
        ]
    }

    /// The whole wall time, seconds.
    pub fn total_s(&self) -> f64 {
        self.steps_s + self.losses().iter().map(|(_, seconds)| seconds).sum::<f64>()
    }

    /// The goodput in percent; `None` before any time has passed.
    pub fn percent(&self) -> Option<f64> {
        let total_s = self.total_s();
        (total_s > 0.0).then(|| 100.0 * self.steps_s / total_s)
    }

    /// The goodput, then the shares of the other activities, largest first, such as `goodput 83.1 % (start 10.2 %,
    /// restart 6.7 %)`.
    pub fn summary(&self) -> String {
        let Some(percent) = self.percent() else { return "goodput unknown".to_owned() };
        let mut losses = self.losses().map(|(name, seconds)| (name, 100.0 * seconds / self.total_s()));
        losses.sort_by(|one, other| other.1.total_cmp(&one.1));
        let shown = losses.iter().filter(|(_, percent)| *percent >= 0.05);
        let shown: Vec<String> = shown.map(|(name, percent)| format!("{name} {percent:.1} %")).collect();
        let rest = if shown.is_empty() { String::new() } else { format!(" ({})", shown.join(", ")) };
        format!("goodput {percent:.1} %{rest}")
    }

    /// Counts `seconds` of the time spent on steps as lost.
    pub fn lose(&mut self, seconds: f64) {
        let lost_s = seconds.min(self.steps_s);
        self.steps_s -= lost_s;
        self.lost_s += lost_s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_names_what_took_the_rest_largest_first() {
        let spent = Goodput { steps_s: 75.0, start_s: 5.0, restart_s: 20.0, ..Goodput::default() };
        assert_eq!(spent.summary(), "goodput 75.0 % (restart 20.0 %, start 5.0 %)");
        assert_eq!(Goodput::default().summary(), "goodput unknown");
    }
}
