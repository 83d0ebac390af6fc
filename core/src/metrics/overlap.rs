//! How many test places a model may already know: those near a training place or near a gallery point.
//!
//! Accuracy at known places says little about other places, so each evaluation counts the known places.

use serde::{Deserialize, Serialize};

use super::places::PlaceGroups;
use crate::geo::UnitVector;

/// Number of test places within some distances of the nearest known place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlap {
    /// Number of different test places.
    pub places: usize,
    /// Number of them within 1 m of a known place.
    pub within_1m: usize,
    /// Number of them within 100 m of a known place.
    pub within_100m: usize,
    /// Number of them within 1 km of a known place.
    pub within_1km: usize,
}

impl Overlap {
    /// Counts places. `truth` holds the true place of each test row, and `nearest_km` the distance from that place to
    /// the nearest known place. Rows that share a place count once.
    pub fn count(truth: &[UnitVector], nearest_km: &[f32]) -> Self {
        let groups = PlaceGroups::of(truth);
        // Places are numbered in the order of their first rows. So a row is the first of its place if its place has the
        // next new number.
        let mut places_km = Vec::with_capacity(groups.count());
        for (place, km) in groups.of_row().iter().zip(nearest_km) {
            if *place as usize == places_km.len() {
                places_km.push(*km);
            }
        }
        let within = |limit_km: f32| places_km.iter().filter(|km| **km <= limit_km).count();
        Self { places: places_km.len(), within_1m: within(0.001), within_100m: within(0.1), within_1km: within(1.0) }
    }

    fn line(self, known: &str) -> String {
        let Self { places, within_1m, within_100m, within_1km } = self;
        format!(
            "of {places} test places, {within_1m} lie within 1 m, {within_100m} within 100 m and {within_1km} within \
             1 km of {known}"
        )
    }
}

/// The overlap of the test places with the training places and with the gallery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlaps {
    /// Overlap with the training places; `None` if `shards.train` cannot be read.
    pub training: Option<Overlap>,
    /// Overlap with the gallery points; `None` if no gallery is used.
    pub gallery: Option<Overlap>,
}

impl Overlaps {
    /// One sentence for the training places and, if there is a gallery, one for its points.
    pub fn lines(&self) -> Vec<String> {
        let unknown =
            || "test places near training places were not counted, because shards.train cannot be read".into();
        let training = self.training.map_or_else(unknown, |overlap| overlap.line("a training place"));
        [Some(training), self.gallery.map(|overlap| overlap.line("a gallery point"))].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::fibonacci_grid;

    #[test]
    fn each_test_place_counts_once_at_every_distance_that_contains_it() {
        let places = fibonacci_grid(4);
        let truth = [places[0], places[1], places[0], places[2], places[3]];
        let found = Overlap::count(&truth, &[0.0005, 0.05, 0.0005, 0.9, 1.1]);
        assert_eq!(found, Overlap { places: 4, within_1m: 1, within_100m: 2, within_1km: 3 });
        let lines = Overlaps { training: None, gallery: Some(found) }.lines();
        assert!(lines[0].contains("not counted"), "{lines:?}");
        let line = "of 4 test places, 1 lie within 1 m, 2 within 100 m and 3 within 1 km of a gallery point";
        assert_eq!(lines[1], line);
    }
}
