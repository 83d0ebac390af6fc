//! Collects the located rows from the workers, and puts the rows in the order of the data. Also shows the progress of
//! an evaluation.

use std::collections::BTreeMap;

use anyhow::Context as _;
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::metrics::{Overlap, Overlaps};
use locdiff_core::protocol::{LocatedRow, Method, NearestKnown, ReportPhoto, ToLauncher, TuningErrors};

use super::score::Answers;
use crate::error::{LaunchError, reported};
use crate::supervisor::GangObserver;
use crate::terminal::Display;

/// The rows located so far.
#[derive(Debug)]
pub(super) struct Gather {
    rows: BTreeMap<u64, LocatedRow>,
    /// The photos for the report, by row.
    photos: BTreeMap<u64, ReportPhoto>,
    /// How near the rows are to known places, in the order of the data.
    nearest: Vec<NearestKnown>,
    /// The last row that was received twice; `None` if there is no such row.
    twice: Option<u64>,
    /// Shows how many rows have been located.
    pub(super) display: Display,
}

impl Default for Gather {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            photos: BTreeMap::new(),
            nearest: Vec::new(),
            twice: None,
            display: Display::new(),
        }
    }
}

impl Gather {
    /// The rows in the order of the data.
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = &LocatedRow> {
        self.rows.values()
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
        self.rows.into_values().map(one).collect()
    }

    /// Fails unless `count` rows were received, each exactly once, and all of them have answers of the same methods.
    pub(super) fn check(&self, count: u64) -> Result<(), LaunchError> {
        let got = self.rows.len() as u64;
        let has_no_gaps = self.rows.last_key_value().is_none_or(|(last, _)| last + 1 == got);
        let methods = |row: &LocatedRow| row.answers.iter().map(|(method, _)| *method).collect::<Vec<_>>();
        let first = self.rows.values().next().map(methods);
        let has_same_methods = self.rows.values().all(|row| Some(methods(row)) == first);
        if got == count && has_no_gaps && has_same_methods && self.twice.is_none() {
            return Ok(());
        }
        let twice = self.twice.map_or_else(String::new, |row| format!("; row {row} was received twice"));
        let mixed = if has_same_methods { "" } else { "; not all rows have answers from the same methods" };
        Err(reported!(WorkerFailed, "{got} of {count} rows were received{twice}{mixed}: this is a bug"))
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
            ToLauncher::Located(located) => {
                for row in located.rows {
                    let index = row.index;
                    if self.rows.insert(index, row).is_some() {
                        self.twice = Some(index);
                    }
                }
                self.display.count("photos located", self.rows.len() as u64, located.of_rows);
            }
            ToLauncher::Nearest(part) => self.nearest.push(part),
            ToLauncher::ReportPhoto(photo) => drop(self.photos.insert(photo.row.index, photo)),
            _ => {}
        }
        Ok(())
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
    use locdiff_core::protocol::{LocatedRows, RowDensity};

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

    fn gathered(indices: &[u64]) -> Gather {
        let mut gather = Gather::default();
        let rows = indices.iter().map(|index| row(*index)).collect();
        gather.report(ToLauncher::Located(LocatedRows { of_rows: 4, rows })).expect("rows are kept in memory");
        gather
    }

    #[test]
    fn rows_may_arrive_in_any_order_but_each_exactly_once() {
        let gather = gathered(&[2, 3, 0, 1]);
        gather.check(4).expect("all rows were received");
        assert_eq!(gather.rows().map(|row| row.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(gathered(&[0, 1, 3]).check(4).is_err());
        assert!(gathered(&[0, 1, 2, 4]).check(4).is_err());
        let error = gathered(&[0, 1, 2, 3, 1]).check(4).expect_err("row 1 was received twice").to_string();
        assert!(error.contains("row 1 was received twice"), "{error}");
    }
}
