//! The standard geolocation metrics of one predictor, and the difference between two predictors on the same rows.
//!
//! The input is one error per row: the great-circle distance in km. The errors must be in the order of the data,
//! because the bootstrap numbers places in the order of their first rows. Every error is checked, and no row is
//! dropped. The median of an even number of rows is the mean of the middle two.

use serde::{Serialize, Serializer};

use super::bootstrap::{Bootstrap, Interval};
use super::error::MetricsError;
use super::places::PlaceGroups;
use super::prdc::{NEAREST_K, density_coverage};
use super::tally::geo_score;
use crate::geo::UnitVector;

/// Accuracy at one distance threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Within {
    /// The distance threshold.
    pub km: f64,
    /// Percentage of answers whose error is at most `km`.
    pub percent: Interval,
}

/// The scores of one predictor, or the differences between the scores of two predictors.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Accuracy at each requested distance threshold.
    pub within: Vec<Within>,
    /// Median error, km.
    pub median_km: Interval,
    /// Mean error, km.
    pub mean_km: Interval,
    /// Mean GeoScore.
    pub geo_score: Interval,
}

impl Scores {
    /// All scores by name.
    pub fn named(&self) -> NamedIntervals {
        let mut named = NamedIntervals::within(&self.within);
        let others = [("median_km", self.median_km), ("mean_km", self.mean_km), ("geo_score", self.geo_score)];
        named.0.extend(others.map(|(name, interval)| (name.to_owned(), interval)));
        named
    }
}

impl Serialize for Scores {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.named().serialize(serializer)
    }
}

/// Scores by name. Names carry the unit: `acc_1km`, ..., `median_km`, `mean_km`, `geo_score`. The scores serialise as a
/// flat map: `acc_1km`, `acc_1km_lo`, `acc_1km_hi`, and so on.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedIntervals(pub Vec<(String, Interval)>);

impl NamedIntervals {
    /// The accuracies by name.
    pub fn within(within: &[Within]) -> Self {
        Self(within.iter().map(|within| (format!("acc_{}km", within.km), within.percent)).collect())
    }
}

impl Serialize for NamedIntervals {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().flat_map(|(name, Interval { value, lo, hi })| {
            [(name.clone(), value), (format!("{name}_lo"), lo), (format!("{name}_hi"), hi)]
        }))
    }
}

/// All metrics of one predictor, as one row of a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rating {
    /// Number of answers.
    pub rows: usize,
    /// Number of different true places.
    pub places: usize,
    /// Scores computed from the errors.
    #[serde(flatten)]
    pub scores: Scores,
    /// Density with k = 3. `None` if there are too few rows.
    pub density: Option<f64>,
    /// Coverage with k = 3. `None` if there are too few rows.
    pub coverage: Option<f64>,
    /// The largest coverage that any answers can reach; below 1 if more than k = 3 rows share a true place. `None` if
    /// there are too few rows.
    pub coverage_ceiling: Option<f64>,
}

/// Computes all metrics. The scores are computed from the errors. Density and coverage are computed from `places` (the
/// answers, or samples of the predictor) and the true places.
pub fn rate(
    errors_km: &[f64],
    truth: &[UnitVector],
    places: &[UnitVector],
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<Rating, MetricsError> {
    // With `NEAREST_K` true places or fewer, a place has no k-th nearest other place.
    let is_enough = truth.len() > NEAREST_K;
    let spread = is_enough.then(|| density_coverage(truth, places, NEAREST_K)).transpose()?;
    let groups = PlaceGroups::of(truth);
    Ok(Rating {
        rows: errors_km.len(),
        places: groups.count(),
        scores: score(errors_km, &groups, thresholds_km, bootstrap)?,
        density: spread.map(|spread| spread.density),
        coverage: spread.map(|spread| spread.coverage),
        coverage_ceiling: spread.map(|spread| spread.ceiling),
    })
}

/// Scores one predictor by the errors of its answers. `groups` says which rows share a true place.
pub fn score(
    errors_km: &[f64],
    groups: &PlaceGroups,
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<Scores, MetricsError> {
    let answers = PredictorErrors::new(errors_km, groups, thresholds_km)?;
    let mut values = vec![0.0; answers.statistics()];
    answers.fill(&vec![1; errors_km.len()], &mut values);
    let intervals = bootstrap.intervals(groups, &values, |counts, out| answers.fill(counts, out))?;
    Ok(scores_of(thresholds_km, &intervals))
}

/// The scores of one predictor minus the scores of another. `one_km` and `other_km` are their errors on the same rows
/// in the same order, and `groups` says which rows share a true place. The intervals are intervals of the differences.
pub fn compare(
    one_km: &[f64],
    other_km: &[f64],
    groups: &PlaceGroups,
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<Scores, MetricsError> {
    if one_km.len() != other_km.len() {
        let (one, other) = (one_km.len(), other_km.len());
        return Err(MetricsError(format!("{one} answers compared with {other}, wanted the same rows in both")));
    }
    let one = PredictorErrors::new(one_km, groups, thresholds_km)?;
    let other = PredictorErrors::new(other_km, groups, thresholds_km)?;
    let mut subtrahend = vec![0.0; one.statistics()];
    let mut fill = |counts: &[u32], out: &mut [f64]| {
        one.fill(counts, out);
        other.fill(counts, &mut subtrahend);
        out.iter_mut().zip(&subtrahend).for_each(|(value, subtrahend)| *value -= subtrahend);
    };
    let mut values = vec![0.0; one.statistics()];
    fill(&vec![1; one_km.len()], &mut values);
    let intervals = bootstrap.intervals(groups, &values, fill)?;
    Ok(scores_of(thresholds_km, &intervals))
}

/// Number of scores besides the accuracies: median, mean and GeoScore.
const OTHER_SCORES: usize = 3;

fn scores_of(thresholds_km: &[f64], intervals: &[Interval]) -> Scores {
    let (within, others) = intervals.split_at(thresholds_km.len());
    let within = thresholds_km.iter().zip(within).map(|(km, percent)| Within { km: *km, percent: *percent });
    Scores { within: within.collect(), median_km: others[0], mean_km: others[1], geo_score: others[2] }
}

/// The errors of one predictor, sorted so that the statistics of a resample need only a single pass over the rows.
struct PredictorErrors<'a> {
    /// Row numbers from the smallest error to the largest.
    order: Vec<u32>,
    /// Number of rows within each threshold.
    cuts: Vec<usize>,
    errors_km: &'a [f64],
    geo_scores: Vec<f64>,
}

impl<'a> PredictorErrors<'a> {
    fn new(errors_km: &'a [f64], groups: &PlaceGroups, thresholds_km: &[f64]) -> Result<Self, MetricsError> {
        if errors_km.is_empty() {
            return Err(MetricsError::no_answers());
        }
        let (answers, truths) = (errors_km.len(), groups.of_row().len());
        if answers != truths {
            return Err(MetricsError(format!("{answers} answers for {truths} true places, wanted equal numbers")));
        }
        let is_distance = |value: &f64| value.is_finite() && *value >= 0.0;
        if let Some(row) = errors_km.iter().position(|error| !is_distance(error)) {
            let got = errors_km[row];
            return Err(MetricsError(format!("answer {row}: error is {got} km, wanted a finite number of at least 0")));
        }
        if let Some(got) = thresholds_km.iter().find(|threshold| !is_distance(threshold)) {
            return Err(MetricsError(format!("threshold is {got} km, wanted a finite number of at least 0")));
        }
        let mut order: Vec<u32> = (0..errors_km.len() as u32).collect();
        order.sort_unstable_by(|a, b| errors_km[*a as usize].total_cmp(&errors_km[*b as usize]).then(a.cmp(b)));
        let cut = |threshold: &f64| order.partition_point(|row| errors_km[*row as usize] <= *threshold);
        let cuts = thresholds_km.iter().map(cut).collect();
        let geo_scores = errors_km.iter().map(|error| geo_score(*error)).collect();
        Ok(Self { order, cuts, errors_km, geo_scores })
    }

    fn statistics(&self) -> usize {
        self.cuts.len() + OTHER_SCORES
    }

    /// Writes the statistics to `out`. Row r is counted `counts[r]` times. Sums are computed in the order of the rows.
    fn fill(&self, counts: &[u32], out: &mut [f64]) {
        let rows = self.errors_km.len();
        let mut below = vec![0_u64; rows + 1];
        for (position, row) in self.order.iter().enumerate() {
            below[position + 1] = below[position] + u64::from(counts[*row as usize]);
        }
        let drawn = below[rows];
        let (within, others) = out.split_at_mut(self.cuts.len());
        for (percent, cut) in within.iter_mut().zip(&self.cuts) {
            *percent = 100.0 * below[*cut] as f64 / drawn as f64;
        }
        let at = |position: u64| {
            let found = below.partition_point(|count| *count <= position) - 1;
            self.errors_km[self.order[found] as usize]
        };
        let last = drawn - 1;
        others[0] = 0.5 * (at(last / 2) + at(last.div_ceil(2)));
        let mean = |values: &[f64]| {
            let sum: f64 = values.iter().zip(counts).map(|(value, count)| value * f64::from(*count)).sum();
            sum / drawn as f64
        };
        others[1] = mean(self.errors_km);
        others[2] = mean(&self.geo_scores);
    }
}
