//! Accuracy over the distance to the nearest training photo. It shows how much of the accuracy comes from photos that
//! were taken near training photos.

use serde::Serialize;

/// Limits of the bins, km: two per power of ten, from 10 m to 1000 km. The first bin begins at 0, and the last has no
/// upper limit.
fn limits_km() -> impl Iterator<Item = f64> {
    (-4..=6).map(|half| 10_f64.powf(f64::from(half) / 2.0))
}

/// The rows whose distance to the nearest training photo is in some range.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DistanceBin {
    /// Smallest distance in the bin, km.
    pub from_km: f64,
    /// The distances in the bin are below this, km; `None` in the last bin.
    pub to_km: Option<f64>,
    /// Number of rows in the bin.
    pub rows: usize,
}

/// The accuracies of one method in each bin.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DistanceCurve {
    /// Name of the method.
    pub method: String,
    /// For each threshold, the percentage of answers within it in each bin; `None` in a bin without rows.
    pub percent: Vec<Vec<Option<f64>>>,
}

/// Accuracies over the distance to the nearest training photo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ByDistance {
    /// The thresholds of the accuracies, km.
    pub thresholds_km: Vec<f64>,
    /// The bins, by ascending distance.
    pub bins: Vec<DistanceBin>,
    /// One curve per method.
    pub curves: Vec<DistanceCurve>,
}

impl ByDistance {
    /// Sorts rows into bins. `nearest_km` is the distance of each row to its nearest training photo, and `methods`
    /// holds the name and the errors of each method, in the same order of rows.
    pub fn new(nearest_km: &[f32], thresholds_km: &[f64], methods: &[(String, &[f64])]) -> Self {
        let limits: Vec<f64> = limits_km().collect();
        let bin_of = |km: &f32| limits.partition_point(|limit| *limit <= f64::from(*km));
        let bins_of_rows: Vec<usize> = nearest_km.iter().map(bin_of).collect();
        let bin = |at: usize| DistanceBin {
            from_km: if at == 0 { 0.0 } else { limits[at - 1] },
            to_km: limits.get(at).copied(),
            rows: bins_of_rows.iter().filter(|own| **own == at).count(),
        };
        let curve = |(method, errors_km): &(String, &[f64])| {
            let percent = |threshold_km: f64, at: usize| {
                let errors_km = || errors_km.iter().zip(&bins_of_rows).filter(|(_, own)| **own == at);
                let (rows, within) =
                    (errors_km().count(), errors_km().filter(|(error_km, _)| **error_km <= threshold_km).count());
                (rows > 0).then(|| 100.0 * within as f64 / rows as f64)
            };
            let of_threshold = |km: &f64| (0..=limits.len()).map(|at| percent(*km, at)).collect();
            DistanceCurve { method: method.clone(), percent: thresholds_km.iter().map(of_threshold).collect() }
        };
        Self {
            thresholds_km: thresholds_km.to_vec(),
            bins: (0..=limits.len()).map(bin).collect(),
            curves: methods.iter().map(curve).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_binned_by_their_nearest_training_photo() {
        let (nearest_km, errors_km) = ([0.0, 0.5, 0.9, 1.0, 5000.0], [0.5, 0.5, 30.0, 30.0, 0.5]);
        let found = ByDistance::new(&nearest_km, &[1.0, 25.0], &[("locdiff".to_owned(), &errors_km)]);
        assert_eq!(found.bins.iter().map(|bin| bin.rows).sum::<usize>(), 5);
        let at = |from_km: f64| {
            let at =
                found.bins.iter().position(|bin| (bin.from_km - from_km).abs() < 1e-9).expect("a bin begins there");
            (found.bins[at].rows, found.curves[0].percent[0][at])
        };
        let half_decade = 10_f64.powf(-0.5);
        assert_eq!([at(0.0), at(half_decade), at(1.0)], [(1, Some(100.0)), (2, Some(50.0)), (1, Some(0.0))]);
        assert_eq!((at(10.0), at(1000.0)), ((0, None), (1, Some(100.0))));
        assert!(found.bins.last().is_some_and(|bin| bin.to_km.is_none()));
    }
}
