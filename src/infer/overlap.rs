//! Distances from test places to the places that a model may know: the training places and the points of a gallery.
//!
//! No embeddings are read, unless `shards.on_bad_rows` is "skip" and the unusable training rows are not known yet. With
//! 5 million training rows, building the index takes up to ten seconds.

use std::collections::HashSet;
use std::path::Path;

use locdiff_core::config::{RetrievalHead, RunConfig};
use locdiff_core::geo::{Place, SphereIndex, UnitVector};
use locdiff_core::metrics::{Overlap, Overlaps};
use locdiff_core::pulse;

use super::anchors::{gallery_points, training_places};
use super::rows::ImageRows;
use crate::shards::Mask;

/// Number of places between two signs of progress.
const PLACES_PER_PULSE: usize = 4096;

/// The distance from each of `places` to the nearest point of `index`, km.
pub fn nearest_km(index: &SphereIndex, places: &[UnitVector]) -> Vec<f32> {
    let mut found = Vec::with_capacity(places.len());
    for part in places.chunks(PLACES_PER_PULSE) {
        pulse::advance();
        found.extend(part.iter().map(|place| index.nearest(*place).map_or(f32::INFINITY, |(_, km)| km.0 as f32)));
    }
    found
}

/// An index of the training places. `None` if they cannot be read: an evaluation works without them, but LocDiff-H then
/// does not know how far gallery points are from training photos. The reason is logged. `mask` marks the training rows to skip; `None` if they are not known yet.
pub fn training_index(config: &RunConfig, mask: Option<Mask>) -> Option<SphereIndex> {
    match training_places(config, mask) {
        Ok(places) => {
            // Many photos share a place.
            let bits = |place: &Place| [place.latitude().0, place.longitude().0].map(f64::to_bits);
            let mut known = HashSet::with_capacity(places.len());
            let places = places.into_iter().filter(|place| known.insert(bits(place)));
            Some(SphereIndex::new(places.map(UnitVector::from).collect()))
        }
        Err(error) => {
            tracing::warn!("the distances to training places are not known, and LocDiff-H does not use them: {error}");
            None
        }
    }
}

/// Counts the test places of a training run that lie near its training places and near the points of the gallery that
/// an evaluation would use. `mask` marks the training rows to skip. `None` if there are no test rows.
pub fn of_training(config: &RunConfig, mask: Mask) -> Option<Overlaps> {
    let test = ImageRows::open(&config.shards.test, config).and_then(|rows| rows.ids_and_places()).ok()?;
    let truth: Vec<UnitVector> = test.into_iter().map(|(_, place)| place.into()).collect();
    let training = training_index(config, Some(mask)).map(|index| Overlap::count(&truth, &nearest_km(&index, &truth)));
    let gallery =
        known_gallery(config).map(|points| Overlap::count(&truth, &nearest_km(&SphereIndex::new(points), &truth)));
    Some(Overlaps { training, gallery })
}

/// The points of the gallery, if it can be read and does not consist of the training photos.
fn known_gallery(config: &RunConfig) -> Option<Vec<UnitVector>> {
    let retrieval = &config.retrieval;
    let is_read = match retrieval.head {
        RetrievalHead::Knn => false,
        _ if retrieval.gallery.is_empty() => retrieval.has_geoclip(),
        _ => Path::new(&retrieval.gallery).exists(),
    };
    is_read.then(|| gallery_points(config, None).ok()).flatten()
}
