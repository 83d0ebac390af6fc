//! Collects the located rows from the workers, and puts the rows in the order of the data.

mod kept_rows;

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Context as _;
use locdiff_core::draw::spread;
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::metrics::{Overlap, Overlaps};
use locdiff_core::protocol::{
    EvalJob, EvalTask, LocatedRow, LocatedRows, Method, NearestKnown, ReportPhoto, ToLauncher, TuningErrors,
};

use super::score::Answers;
use crate::error::{LaunchError, reported};
use crate::supervisor::GangObserver;
use crate::terminal::Display;

pub(super) use kept_rows::KeptRows;

/// Collects the rows that workers locate.
pub(in crate::verbs) trait RowCollector: GangObserver {
    /// Begins an attempt. Writes the pieces that earlier attempts have completed to the job.
    fn begin(&mut self, job: &mut EvalJob) -> Result<(), LaunchError>;

    /// Ends an attempt, which may have failed.
    fn end(&mut self);
}

/// The rows located so far.
#[derive(Debug, Default)]
pub(super) struct Gather {
    rows: KeptRows<LocatedRow>,
    /// The photos for the report, by row.
    photos: BTreeMap<u64, ReportPhoto>,
    /// How near the rows are to known places, in the order of the data.
    nearest: Vec<NearestKnown>,
}

impl Gather {
    /// The rows in the order of the data.
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = &LocatedRow> {
        self.rows.rows()
    }

    /// The photos for the report, in the order of the data.
    pub(super) fn photos(&self) -> impl ExactSizeIterator<Item = &ReportPhoto> {
        self.photos.values()
    }

    /// The distance of each row to the nearest training place, km; `None` if the worker could not measure it.
    pub(super) fn training_km(&self) -> Option<Vec<f32>> {
        joined(&self.nearest, |part| part.training_km.as_deref())
    }

    /// How many test places lie near training places and gallery points. `truth` holds the true place of each row.
    pub(super) fn overlaps(&self, truth: &[UnitVector]) -> Overlaps {
        let count = |km: Vec<f32>| Overlap::count(truth, &km);
        let gallery = joined(&self.nearest, |part| part.gallery_km.as_deref());
        Overlaps { training: self.training_km().map(count), gallery: gallery.map(count) }
    }

    /// The true places, and the answers of each method, in the order of the data.
    pub(super) fn answers(&self) -> anyhow::Result<(Vec<UnitVector>, Vec<Answers>)> {
        let places = |degrees: &dyn Fn(&LocatedRow) -> [f64; 2]| -> anyhow::Result<Vec<UnitVector>> {
            self.rows().map(|row| point(degrees(row))).collect()
        };
        let mut answers = Vec::new();
        let first = self.rows().next().map_or(&[][..], |row| &row.answers);
        for (place, (method, _)) in first.iter().enumerate() {
            let samples = (*method == Method::Locdiff).then(|| places(&|row| row.sample)).transpose()?;
            answers.push(Answers { method: *method, places: places(&|row| row.answers[place].1)?, samples });
        }
        Ok((places(&|row| row.truth)?, answers))
    }

    /// For each row, its true place, and the distance errors of its answers under all settings that tuning can choose.
    pub(super) fn tuning(self) -> anyhow::Result<Vec<(UnitVector, TuningErrors)>> {
        let one = |row: LocatedRow| {
            let errors =
                row.tuning.with_context(|| format!("row {} came without its tuning data: this is a bug", row.index))?;
            Ok((point(row.truth)?, errors))
        };
        self.rows.into_rows().map(one).collect()
    }

    /// Fails unless all `count` rows of the data with this fingerprint were received, and all of them have answers of the
    /// same methods.
    pub(super) fn check(&mut self, count: u64, fingerprint: &str) -> Result<(), LaunchError> {
        self.rows.check_data(count, fingerprint.to_owned())?;
        let methods = |row: &LocatedRow| row.answers.iter().map(|(method, _)| *method).collect::<Vec<_>>();
        let first = self.rows().next().map(methods);
        let has_same_methods = self.rows().all(|row| Some(methods(row)) == first);
        if self.rows.has_all(count) && has_same_methods {
            return Ok(());
        }
        let mixed = if has_same_methods { "" } else { "; not all rows have answers from the same methods" };
        Err(reported!(WorkerFailed, "{} of {count} rows were received{mixed}: this is a bug", self.rows().len()))
    }
}

/// The point at a latitude and longitude, degrees.
fn point(degrees: [f64; 2]) -> anyhow::Result<UnitVector> {
    let [latitude, longitude] = degrees.map(Degrees);
    Ok(Place::new(latitude, longitude)?.into())
}

/// Joins the distances of all parts; `None` if a part has none, or if there are no parts.
fn joined(parts: &[NearestKnown], km: impl Fn(&NearestKnown) -> Option<&[f32]>) -> Option<Vec<f32>> {
    parts.iter().map(km).collect::<Option<Vec<&[f32]>>>().filter(|parts| !parts.is_empty()).map(|parts| parts.concat())
}

impl GangObserver for Gather {
    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        match message {
            ToLauncher::Located(LocatedRows { of_rows, fingerprint, rows }) => {
                self.rows.add(of_rows, fingerprint, rows.into_iter().map(|row| (row.index, row)))?;
            }
            ToLauncher::Nearest(part) => self.nearest.push(part),
            ToLauncher::ReportPhoto(photo) => drop(self.photos.insert(photo.row.index, photo)),
            _ => {}
        }
        Ok(())
    }
}

impl RowCollector for Gather {
    fn begin(&mut self, job: &mut EvalJob) -> Result<(), LaunchError> {
        // Rank 0 sends these again in each attempt.
        self.nearest.clear();
        // A worker sends its report photos at the end, so those of a worker that has failed are missing.
        let wanted = match job.task {
            EvalTask::Evaluate { report_photos, .. } => report_photos as usize,
            EvalTask::Tune(_) | EvalTask::Predict(_) => 0,
        };
        let shown: Vec<u64> = spread(self.rows.count().unwrap_or(0) as usize, wanted).map(|row| row as u64).collect();
        let has_photos =
            |rows: &Range<u64>| shown.iter().filter(|row| rows.contains(row)).all(|row| self.photos.contains_key(row));
        job.done = self.rows.begin(has_photos);
        Ok(())
    }

    fn end(&mut self) {
        self.rows.end();
    }
}

/// Shows how many gallery points have been embedded.
#[derive(Debug)]
pub(super) struct GalleryProgress(pub(super) Display);

impl GangObserver for GalleryProgress {
    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        if let ToLauncher::Embedded { points, of_points } = message {
            self.0.count("gallery points embedded", points, of_points);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use locdiff_core::config::RunConfig;
    use locdiff_core::exit_code::{ExitCode, HasExitCode as _};
    use locdiff_core::protocol::{HybridRequest, PredictedRow, RowDensity};

    use super::*;

    fn row(index: u64) -> LocatedRow {
        let answers = vec![(Method::Locdiff, [1.0, 2.0])];
        LocatedRow {
            index,
            id: index.to_string(),
            truth: [1.0, 2.0],
            answers,
            sample: [1.0, 2.0],
            out_of_range: false,
            spread_km: 0.0,
            density: RowDensity::default(),
            tuning: None,
        }
    }

    fn gathered(of_rows: u64, indices: impl IntoIterator<Item = u64>) -> Gather {
        let mut gather = Gather::default();
        let rows = indices.into_iter().map(row).collect();
        let located = LocatedRows { of_rows, fingerprint: "v".into(), rows };
        gather.report(ToLauncher::Located(located)).expect("no row comes twice");
        gather
    }

    #[test]
    fn rows_may_arrive_in_any_order() {
        let mut gather = gathered(4, [2, 3, 0, 1]);
        gather.check(4, "v").expect("all rows were received");
        assert_eq!(gather.rows().map(|row| row.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(gathered(4, [0, 1, 3]).check(4, "v").is_err());
        assert!(gathered(4, [0, 1, 2, 4]).check(4, "v").is_err());
    }

    #[test]
    fn summary_of_other_data_is_refused() {
        let error = gathered(4, 0..4).check(4, "w").expect_err("the data has changed");
        assert_eq!(error.exit_code(), ExitCode::DataChanged);
    }

    #[test]
    fn piece_without_its_report_photo_is_located_again() {
        let (count, mut gather) = (600, gathered(600, 0..600));
        let mut job = EvalJob {
            config: RunConfig::default(),
            checkpoint: PathBuf::new(),
            checkpoint_xxh3: String::new(),
            data: String::new(),
            hybrid: HybridRequest::No,
            task: EvalTask::Evaluate { temperature: None, report_photos: 3 },
            done: Vec::new(),
        };
        let photo = |index: u64| {
            let LocatedRow { id, truth, sample, density, .. } = row(index);
            let (alternatives, samples, truth) = (Vec::new(), Vec::new(), Some(truth));
            let row = PredictedRow {
                index,
                id,
                answer: sample,
                spread_km: 0.0,
                weight: 1.0,
                alternatives,
                samples,
                truth,
                density,
            };
            ToLauncher::ReportPhoto(ReportPhoto { row, steps: Vec::new() })
        };
        let shown: Vec<u64> = spread(count as usize, 3).map(|row| row as u64).collect();
        shown[1..].iter().for_each(|index| gather.report(photo(*index)).expect("a photo is kept"));
        gather.begin(&mut job).expect("the rows are in memory");
        assert_eq!(job.done, [0, 1, 2].into_iter().filter(|piece| *piece != shown[0] / 256).collect::<Vec<u64>>());
        assert!(gather.rows().len() < count as usize);
    }
}
