//! The field's numbers of one predictor, and the difference of two on the same rows.
//!
//! Errors are great-circle distances in km, one per row, in the order of the data: draws are by row number. Everything is
//! checked; nothing is left out. The median of an even number of rows is the mean of the two in the middle.

use serde::{Serialize, Serializer};

use super::bootstrap::{Bootstrap, Interval};
use super::error::MetricsError;
use super::prdc::{NEAREST_K, density_coverage};
use super::tally::geo_score;
use crate::geo::UnitVector;

/// Share of answers within a distance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Within {
    /// The distance.
    pub km: f64,
    /// Answers at most so far off, percent of all.
    pub percent: Interval,
}

/// How good one predictor is, or by how much one is better than another.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Shares within each distance that was asked for.
    pub within: Vec<Within>,
    /// Median error, km.
    pub median_km: Interval,
    /// Mean error, km.
    pub mean_km: Interval,
    /// Mean GeoScore.
    pub geo_score: Interval,
}

impl Scores {
    /// Every number under its name.
    pub fn named(&self) -> Named {
        let mut named = Named::within(&self.within);
        let besides = [("median_km", self.median_km), ("mean_km", self.mean_km), ("geo_score", self.geo_score)];
        named.0.extend(besides.map(|(name, interval)| (name.to_owned(), interval)));
        named
    }
}

impl Serialize for Scores {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.named().serialize(serializer)
    }
}

/// Numbers under names that have the unit: `acc_1km`, ..., `median_km`, `mean_km`, `geo_score`. They serialise flat: `acc_1km`,
/// `acc_1km_lo`, `acc_1km_hi`, and so on.
#[derive(Debug, Clone, PartialEq)]
pub struct Named(pub Vec<(String, Interval)>);

impl Named {
    /// Of shares alone.
    pub fn within(within: &[Within]) -> Self {
        Self(within.iter().map(|within| (format!("acc_{}km", within.km), within.percent)).collect())
    }
}

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().flat_map(|(name, Interval { value, lo, hi })| {
            [(name.clone(), value), (format!("{name}_lo"), lo), (format!("{name}_hi"), hi)]
        }))
    }
}

/// How good the answers of one predictor are, as a row of a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rating {
    /// Answers.
    pub rows: usize,
    /// By their distance from the truth.
    #[serde(flatten)]
    pub scores: Scores,
    /// Density, k = 3; none where there are too few rows.
    pub density: Option<f64>,
    /// Coverage, k = 3; none where there are too few rows.
    pub coverage: Option<f64>,
}

/// Rates answers: by their errors, and by how `places` (the answers, or samples of the predictor) are spread among the true ones.
pub fn rate(
    errors_km: &[f64],
    truth: &[UnitVector],
    places: &[UnitVector],
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<Rating, MetricsError> {
    // Too few places have no k-th neighbour; then there is nothing to say.
    let is_enough = truth.len() > NEAREST_K;
    let spread = is_enough.then(|| density_coverage(truth, places, NEAREST_K)).transpose()?;
    Ok(Rating {
        rows: errors_km.len(),
        scores: score(errors_km, thresholds_km, bootstrap)?,
        density: spread.map(|spread| spread.density),
        coverage: spread.map(|spread| spread.coverage),
    })
}

/// Scores answers by their errors.
pub fn score(errors_km: &[f64], thresholds_km: &[f64], bootstrap: &Bootstrap) -> Result<Scores, MetricsError> {
    let answers = Answers::new(errors_km, thresholds_km)?;
    let mut values = vec![0.0; answers.statistics()];
    answers.fill(&vec![1; errors_km.len()], &mut values);
    let intervals = bootstrap.intervals(errors_km.len(), &values, |counts, out| answers.fill(counts, out))?;
    Ok(scores_of(thresholds_km, &intervals))
}

/// The scores of `one` less those of `other`, row by row the same images; intervals are of the difference.
pub fn compare(
    one_km: &[f64],
    other_km: &[f64],
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<Scores, MetricsError> {
    if one_km.len() != other_km.len() {
        let (one, other) = (one_km.len(), other_km.len());
        return Err(MetricsError(format!("{one} answers against {other}, wanted the same rows from both")));
    }
    let (one, other) = (Answers::new(one_km, thresholds_km)?, Answers::new(other_km, thresholds_km)?);
    let mut subtrahend = vec![0.0; one.statistics()];
    let mut fill = |counts: &[u32], out: &mut [f64]| {
        one.fill(counts, out);
        other.fill(counts, &mut subtrahend);
        out.iter_mut().zip(&subtrahend).for_each(|(value, less)| *value -= less);
    };
    let mut values = vec![0.0; one.statistics()];
    fill(&vec![1; one_km.len()], &mut values);
    let intervals = bootstrap.intervals(one_km.len(), &values, fill)?;
    Ok(scores_of(thresholds_km, &intervals))
}

/// Median, mean and GeoScore.
const BESIDES: usize = 3;

fn scores_of(thresholds_km: &[f64], intervals: &[Interval]) -> Scores {
    let (within, besides) = intervals.split_at(thresholds_km.len());
    let within = thresholds_km.iter().zip(within).map(|(km, percent)| Within { km: *km, percent: *percent });
    Scores { within: within.collect(), median_km: besides[0], mean_km: besides[1], geo_score: besides[2] }
}

/// The errors of one predictor, laid out so that a resample costs one pass.
struct Answers<'a> {
    /// Rows from the least error to the largest.
    order: Vec<u32>,
    /// How many of them lie within each threshold.
    cuts: Vec<usize>,
    errors_km: &'a [f64],
    geo_scores: Vec<f64>,
}

impl<'a> Answers<'a> {
    fn new(errors_km: &'a [f64], thresholds_km: &[f64]) -> Result<Self, MetricsError> {
        if errors_km.is_empty() {
            return Err(MetricsError::no_answers());
        }
        let is_distance = |value: &f64| value.is_finite() && *value >= 0.0;
        if let Some(row) = errors_km.iter().position(|error| !is_distance(error)) {
            let got = errors_km[row];
            return Err(MetricsError(format!(
                "answer {row}: its error is {got} km, wanted a finite number of at least 0"
            )));
        }
        if let Some(got) = thresholds_km.iter().find(|threshold| !is_distance(threshold)) {
            return Err(MetricsError(format!("threshold {got} km, wanted a finite number of at least 0")));
        }
        let mut order: Vec<u32> = (0..errors_km.len() as u32).collect();
        order.sort_unstable_by(|a, b| errors_km[*a as usize].total_cmp(&errors_km[*b as usize]).then(a.cmp(b)));
        let cut = |threshold: &f64| order.partition_point(|row| errors_km[*row as usize] <= *threshold);
        let cuts = thresholds_km.iter().map(cut).collect();
        let geo_scores = errors_km.iter().map(|error| geo_score(*error)).collect();
        Ok(Self { order, cuts, errors_km, geo_scores })
    }

    fn statistics(&self) -> usize {
        self.cuts.len() + BESIDES
    }

    /// The statistics where each row counts so often. Sums run over the rows in their order.
    fn fill(&self, counts: &[u32], out: &mut [f64]) {
        let rows = self.errors_km.len();
        let mut below = vec![0_u32; rows + 1];
        for (place, row) in self.order.iter().enumerate() {
            below[place + 1] = below[place] + counts[*row as usize];
        }
        let (within, besides) = out.split_at_mut(self.cuts.len());
        for (percent, cut) in within.iter_mut().zip(&self.cuts) {
            *percent = 100.0 * f64::from(below[*cut]) / rows as f64;
        }
        let at = |place: u32| {
            let found = below.partition_point(|count| *count <= place) - 1;
            self.errors_km[self.order[found] as usize]
        };
        let last = rows as u32 - 1;
        besides[0] = 0.5 * (at(last / 2) + at(last.div_ceil(2)));
        let mean = |values: &[f64]| {
            let sum: f64 = values.iter().zip(counts).map(|(value, count)| value * f64::from(*count)).sum();
            sum / rows as f64
        };
        besides[1] = mean(self.errors_km);
        besides[2] = mean(&self.geo_scores);
    }
}
