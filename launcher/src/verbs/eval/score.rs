//! From answers to metrics: one rating per method, and how LocDiff-H compares with its parts.
//!
//! Pure but for [`Task::run`], which also tells TensorBoard. What is scored is what stands in the files of answers, to the digit:
//! whoever has them gets the same numbers.

use std::path::PathBuf;

use locdiff_core::draw::{ANSWERS_MAX, Answer, answers_map};
use locdiff_core::geo::UnitVector;
use locdiff_core::metrics::{Bootstrap, MetricsError, Named, Rating, Within, compare, rate};
use locdiff_core::protocol::Method;
use locdiff_core::tensorboard::{Board, BoardError};
use serde::Serialize;

use crate::error::LaunchError;

/// The answers of one method, row by row.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) method: Method,
    pub(super) places: Vec<UnitVector>,
    /// One sample per row, for density and coverage; none: the answers are the samples.
    pub(super) samples: Option<Vec<UnitVector>>,
}

/// What to score, and where to tell of it.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) truth: Vec<UnitVector>,
    pub(super) answers: Vec<Answers>,
    pub(super) thresholds_km: Vec<f64>,
    /// Seed of the bootstrap.
    pub(super) seed: u64,
    /// What was located, in words.
    pub(super) data: String,
    /// Folder of event files and step at which the numbers go there.
    pub(super) board: Option<(PathBuf, u64)>,
}

/// How good one method is.
#[derive(Debug)]
pub(super) struct Scored {
    pub(super) method: Method,
    pub(super) rating: Rating,
    errors_km: Vec<f64>,
}

/// The scores of LocDiff-H less those of one of its parts, on the same resamples.
#[derive(Debug, Serialize)]
pub(super) struct Difference {
    method: Method,
    pub(super) less: &'static str,
    #[serde(flatten)]
    numbers: Named,
    #[serde(skip)]
    pub(super) within: Vec<Within>,
}

impl Task {
    /// Scores every method; where LocDiff-H is among them, it is compared with its parts.
    pub(super) fn run(&self) -> anyhow::Result<(Vec<Scored>, Vec<Difference>)> {
        let found = self.answers.iter().map(|answers| self.score(answers)).collect::<Result<Vec<_>, _>>()?;
        let differences = self.differences(&found)?;
        if let Some((folder, step)) = &self.board {
            let mut board = Board::beside(folder, *step).map_err(LaunchError::reported)?;
            self.show(&mut board, *step, &found).map_err(LaunchError::reported)?;
        }
        Ok((found, differences))
    }

    fn bootstrap(&self) -> Bootstrap {
        Bootstrap { seed: self.seed, ..Bootstrap::default() }
    }

    fn score(&self, Answers { method, places, samples }: &Answers) -> Result<Scored, MetricsError> {
        let errors_km: Vec<f64> =
            self.truth.iter().zip(places).map(|(truth, answer)| truth.distance(*answer).0).collect();
        let spread = samples.as_ref().unwrap_or(places);
        let rating = rate(&errors_km, &self.truth, spread, &self.thresholds_km, &self.bootstrap())?;
        Ok(Scored { method: *method, rating, errors_km })
    }

    /// LocDiff-H less each of its parts, and at each distance less the better one.
    fn differences(&self, found: &[Scored]) -> Result<Vec<Difference>, MetricsError> {
        let Some(hybrid) = found.iter().find(|scored| scored.method == Method::LocdiffH) else { return Ok(Vec::new()) };
        let less = |part: &Scored| compare(&hybrid.errors_km, &part.errors_km, &self.thresholds_km, &self.bootstrap());
        let parts = found.iter().filter(|scored| scored.method != Method::LocdiffH);
        let parts = parts.map(|part| less(part).map(|less| (part, less))).collect::<Result<Vec<_>, _>>()?;
        let percent = |part: &Scored, place: usize| part.rating.scores.within[place].percent.value;
        let better = |place: usize| {
            let best =
                parts.iter().max_by(|(one, _), (other, _)| percent(one, place).total_cmp(&percent(other, place)));
            best.map(|(_, scores)| scores.within[place])
        };
        let better: Vec<Within> = (0..self.thresholds_km.len()).filter_map(better).collect();
        let method = Method::LocdiffH;
        let mut rows: Vec<Difference> = parts
            .iter()
            .map(|(part, scores)| {
                let (numbers, within) = (scores.named(), scores.within.clone());
                Difference { method, less: part.method.name(), numbers, within }
            })
            .collect();
        rows.push(Difference { method, less: "better part", numbers: Named::within(&better), within: better });
        Ok(rows)
    }

    /// What TensorBoard shows: `test/METHOD/NUMBER`, and a map of the answers.
    fn show(&self, board: &mut Board, step: u64, found: &[Scored]) -> Result<(), BoardError> {
        let mut scalars = Vec::new();
        for Scored { method, rating, .. } in found {
            let mut numbers: Vec<(String, f64)> =
                rating.scores.named().0.into_iter().map(|(name, interval)| (name, interval.value)).collect();
            let spread = [("density", rating.density), ("coverage", rating.coverage)];
            numbers.extend(spread.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
            scalars.extend(numbers.into_iter().map(|(name, value)| (format!("test/{}/{name}", method.name()), value)));
        }
        let scalars: Vec<(&str, f64)> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        board.scalars(step, &scalars)?;
        board.text(step, "test/data", &self.data)?;
        for Answers { method, places, .. } in self.answers.iter().filter(|own| own.method != Method::Retrieval) {
            let pairs = self.truth.iter().zip(places).take(ANSWERS_MAX);
            let pairs: Vec<Answer> = pairs.map(|(truth, answer)| Answer { truth: *truth, answer: *answer }).collect();
            board.image(step, &format!("test/{}/answers", method.name()), &answers_map(&pairs))?;
        }
        Ok(())
    }
}
