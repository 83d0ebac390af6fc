//! Counts and sums that can be added over ranks: answers within each distance, and GeoScore.

/// The field's standard accuracy thresholds, km: street, city, region, country, continent.
pub const THRESHOLDS_KM: [f64; 5] = [1.0, 25.0, 200.0, 750.0, 2500.0];

/// GeoScore of a perfect answer.
const SCORE_MAX: f64 = 5000.0;
/// Scale of GeoGuessr's exponential for the world map, km (Haas et al., "PIGEON", 2024, section 4).
const SCORE_SCALE_KM: f64 = 1492.7;

/// GeoScore of one answer: 5000 · exp(−d / 1492.7 km).
pub fn geo_score(distance_km: f64) -> f64 {
    SCORE_MAX * (-distance_km / SCORE_SCALE_KM).exp()
}

/// Sums over answers, from which percentages and means are computed. The tallies of several ranks can be added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Tally {
    /// Number of answers.
    pub answers: f64,
    /// Number of answers within each of [`THRESHOLDS_KM`].
    pub within: [f64; 5],
    /// Sum of GeoScores.
    pub score: f64,
}

impl Tally {
    /// Adds one answer.
    pub fn add(&mut self, distance_km: f64) {
        self.answers += 1.0;
        for (count, threshold) in self.within.iter_mut().zip(THRESHOLDS_KM) {
            *count += f64::from(u8::from(distance_km <= threshold));
        }
        self.score += geo_score(distance_km);
    }

    /// Percentage of answers within each of [`THRESHOLDS_KM`].
    pub fn within_percent(&self) -> [f64; 5] {
        self.within.map(|count| 100.0 * count / self.answers)
    }

    /// Mean GeoScore.
    pub fn mean_score(&self) -> f64 {
        self.score / self.answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_within_each_distance() {
        let mut tally = Tally::default();
        [0.5, 1.0, 24.0, 201.0, 3000.0].into_iter().for_each(|distance| tally.add(distance));
        assert_eq!(tally.within_percent(), [40.0, 60.0, 60.0, 80.0, 80.0]);
        assert_eq!(geo_score(0.0), 5000.0);
        assert!((geo_score(1492.7) - 5000.0 / std::f64::consts::E).abs() < 1e-9);
    }
}
