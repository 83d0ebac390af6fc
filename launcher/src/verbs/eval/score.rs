//! Computes metrics from answers: one rating per method, and the comparison of LocDiff-H with its parts (LocDiff and
//! retrieval).
//!
//! The functions are pure, except that [`ScoreTask::run`] also writes to TensorBoard. The scored places are rounded as
//! in the files of truth and answers, so these files alone reproduce the scores.

use std::path::PathBuf;

use locdiff_core::draw::{ANSWERS_MAX, Answer, answers_map};
use locdiff_core::geo::UnitVector;
use locdiff_core::metrics::{
    Bootstrap, ByDistance, MetricsError, NamedIntervals, PlaceGroups, Rating, Scores, Within, compare, rate,
};
use locdiff_core::protocol::Method;
use locdiff_core::tensorboard::{Board, BoardError};
use serde::Serialize;

use crate::error::LaunchError;
use crate::run_folder::RunLock;

/// The answers of one method, in the order of the rows.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) method: Method,
    pub(super) places: Vec<UnitVector>,
    /// One sample per row, for density and coverage. If `None`, density and coverage are computed from the answers.
    pub(super) samples: Option<Vec<UnitVector>>,
}

/// The answers to score, and where to write the scores.
#[derive(Debug)]
pub(super) struct ScoreTask {
    pub(super) truth: Vec<UnitVector>,
    pub(super) answers: Vec<Answers>,
    pub(super) thresholds_km: Vec<f64>,
    /// Seed for the bootstrap.
    pub(super) seed: u64,
    /// Where to write the scores; `None`: nowhere.
    pub(super) board: Option<BoardTarget>,
}

/// The TensorBoard files and the step to which the scores are written.
#[derive(Debug)]
pub(super) struct BoardTarget {
    /// Folder of the TensorBoard files.
    pub(super) folder: PathBuf,
    /// The step that the scores belong to.
    pub(super) step: u64,
    /// The run to lock before its TensorBoard files are written; `None` if this launcher already holds the lock. If
    /// another launcher holds the lock, nothing is written.
    pub(super) lock_first: Option<PathBuf>,
    /// A line of text that describes the data.
    pub(super) data: String,
}

/// The scores of one method.
#[derive(Debug)]
pub(super) struct MethodScore {
    pub(super) method: Method,
    pub(super) rating: Rating,
    pub(super) errors_km: Vec<f64>,
}

/// The accuracies of each method over the distance to the nearest training photo. `nearest_km` is this distance for
/// each row.
pub(super) fn by_distance(nearest_km: &[f32], found: &[MethodScore], thresholds_km: &[f64]) -> ByDistance {
    let method = |scored: &MethodScore| scored.method.name().to_owned();
    let methods: Vec<(String, &[f64])> = found.iter().map(|scored| (method(scored), &*scored.errors_km)).collect();
    ByDistance::new(nearest_km, thresholds_km, &methods)
}

/// What a comparison calls the best part of LocDiff-H, which is chosen separately at each threshold.
pub(super) const BETTER_PART: &str = "better part";

/// The scores of LocDiff-H minus the scores of one of its parts (LocDiff, retrieval, retrieval with consensus), or of
/// the best part. The intervals are paired: both methods of a comparison use the same bootstrap resamples.
#[derive(Debug, Serialize)]
pub(super) struct Difference {
    method: Method,
    pub(super) less: &'static str,
    #[serde(flatten)]
    numbers: NamedIntervals,
    #[serde(skip)]
    pub(super) within: Vec<Within>,
}

impl Difference {
    /// `scores` are the scores of LocDiff-H minus the scores of `less`.
    pub(super) fn new(less: &'static str, scores: &Scores) -> Self {
        Self { method: Method::LocdiffH, less, numbers: scores.named(), within: scores.within.clone() }
    }
}

impl ScoreTask {
    /// Scores every method. If LocDiff-H is one of the methods, compares it with its parts. Writes the scores to
    /// TensorBoard, if a target is given.
    pub(super) fn run(&self) -> anyhow::Result<(Vec<MethodScore>, Vec<Difference>)> {
        let found = self.answers.iter().map(|answers| self.score(answers)).collect::<Result<Vec<_>, _>>()?;
        let differences = self.differences(&found)?;
        self.board.as_ref().map_or(Ok(()), |board| self.show(board, &found))?;
        Ok((found, differences))
    }

    /// Writes the scores to TensorBoard, unless another launcher holds the lock of the run.
    fn show(&self, target: &BoardTarget, found: &[MethodScore]) -> Result<(), LaunchError> {
        let BoardTarget { folder, step, lock_first, data } = target;
        let lock = lock_first.as_deref().map(RunLock::try_take_for_evaluation).transpose()?;
        if matches!(lock, Some(None)) {
            tracing::warn!("another launcher holds the run, so nothing is written to its TensorBoard files");
            return Ok(());
        }
        let mut board = Board::open_additional(folder, *step).map_err(LaunchError::reported)?;
        self.write_to_board(&mut board, (*step, data), found).map_err(LaunchError::reported)
    }

    fn bootstrap(&self) -> Bootstrap {
        Bootstrap { seed: self.seed, ..Bootstrap::default() }
    }

    fn score(&self, Answers { method, places, samples }: &Answers) -> Result<MethodScore, MetricsError> {
        let errors_km: Vec<f64> =
            self.truth.iter().zip(places).map(|(truth, answer)| truth.distance(*answer).0).collect();
        let spread = samples.as_ref().unwrap_or(places);
        let rating = rate(&errors_km, &self.truth, spread, &self.thresholds_km, &self.bootstrap())?;
        Ok(MethodScore { method: *method, rating, errors_km })
    }

    /// The scores of LocDiff-H minus those of each of its parts, and minus those of the best part at each threshold.
    fn differences(&self, found: &[MethodScore]) -> Result<Vec<Difference>, MetricsError> {
        let Some(hybrid) = found.iter().find(|scored| scored.method == Method::LocdiffH) else { return Ok(Vec::new()) };
        let groups = PlaceGroups::of(&self.truth);
        let less = |part: &MethodScore| {
            compare(&hybrid.errors_km, &part.errors_km, &groups, &self.thresholds_km, &self.bootstrap())
        };
        let parts = found.iter().filter(|scored| scored.method != Method::LocdiffH);
        let parts = parts.map(|part| less(part).map(|less| (part, less))).collect::<Result<Vec<_>, _>>()?;
        let percent = |part: &MethodScore, place: usize| part.rating.scores.within[place].percent.value;
        let better = |place: usize| {
            let best =
                parts.iter().max_by(|(one, _), (other, _)| percent(one, place).total_cmp(&percent(other, place)));
            best.map(|(_, scores)| scores.within[place])
        };
        let better: Vec<Within> = (0..self.thresholds_km.len()).filter_map(better).collect();
        let mut rows: Vec<Difference> =
            parts.iter().map(|(part, scores)| Difference::new(part.method.name(), scores)).collect();
        let (method, numbers) = (Method::LocdiffH, NamedIntervals::within(&better));
        rows.push(Difference { method, less: BETTER_PART, numbers, within: better });
        Ok(rows)
    }

    /// Writes to TensorBoard: every score under the tag `test/METHOD/SCORE`, a description of the data, and a map of
    /// the answers of each method except retrieval.
    fn write_to_board(
        &self,
        board: &mut Board,
        (step, data): (u64, &str),
        found: &[MethodScore],
    ) -> Result<(), BoardError> {
        let mut scalars = Vec::new();
        for MethodScore { method, rating, .. } in found {
            let mut numbers: Vec<(String, f64)> =
                rating.scores.named().0.into_iter().map(|(name, interval)| (name, interval.value)).collect();
            let spread = [("density", rating.density), ("coverage", rating.coverage)];
            numbers.extend(spread.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
            scalars.extend(numbers.into_iter().map(|(name, value)| (format!("test/{}/{name}", method.name()), value)));
        }
        let scalars: Vec<(&str, f64)> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        board.scalars(step, &scalars)?;
        board.text(step, "test/data", data)?;
        for Answers { method, places, .. } in self.answers.iter().filter(|own| own.method != Method::Retrieval) {
            let pairs = self.truth.iter().zip(places).take(ANSWERS_MAX);
            let pairs: Vec<Answer> = pairs.map(|(truth, answer)| Answer { truth: *truth, answer: *answer }).collect();
            board.image(step, &format!("test/{}/answers", method.name()), &answers_map(&pairs))?;
        }
        Ok(())
    }
}
