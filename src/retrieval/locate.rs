//! Locates photos with retrieval alone and with LocDiff-H, and computes the errors of all settings that tuning tries.
//!
//! Photos are processed in chunks, which bounds the memory for the logits of the candidates.

use locdiff_core::geo::{Km, UnitVector};
use locdiff_core::protocol::TuningErrors;
use locdiff_core::tuning::CONSENSUS_SCALES;
use tch::Tensor;

use super::error::RetrievalError;
use super::hybrid::{Hybrid, ImageSamples, consensus, retrieval_consensus};
use super::retriever::{Exclusion, Retriever, Scored};
use super::tune::Grid;
use crate::shdd::decode::in_parallel;

/// Photos per chunk. The number is a multiple of the number of queries in a tile.
const PHOTOS: usize = 1024;

/// The answers for one photo.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocatedPlaces {
    /// Answer of retrieval alone.
    pub retrieval: UnitVector,
    /// Answer of retrieval with consensus.
    pub consensus: UnitVector,
    /// Answer of LocDiff-H; `None` if no gallery point was in range, in which case LocDiff's answer is used.
    pub hybrid: Option<UnitVector>,
}

impl LocatedPlaces {
    /// The answer of LocDiff-H. If no gallery point was in range, returns `own`, which is LocDiff's answer.
    pub fn hybrid_or(&self, own: UnitVector) -> UnitVector {
        self.hybrid.unwrap_or(own)
    }
}

/// Chooses the answer among the nearest neighbours. `best` lists them as (gallery point, logit), best first. A single
/// neighbour is the answer. Several neighbours vote as in the mode `consensus` of LocDiff-H. `None` if `best` is empty.
pub fn knn_place(points: &[UnitVector], best: &[(u32, f32)]) -> Option<u32> {
    let (places, scores): (Vec<u32>, Vec<f64>) = best.iter().map(|(point, logit)| (*point, f64::from(*logit))).unzip();
    consensus(points, &places, &scores).map(|place| places[place])
}

/// How many of the best gallery points retrieval uses, and how they vote.
#[derive(Debug, Clone, Copy)]
pub struct Voters {
    /// Number of points that decide the answer without consensus. It is 1 unless the gallery consists of photos.
    pub neighbours: usize,
    /// Number of points that vote in the consensus.
    pub consensus: usize,
    /// Factor that multiplies the logits in the consensus.
    pub scale: f64,
}

impl Voters {
    /// Number of best points that must be found.
    fn top(self) -> usize {
        self.neighbours.max(self.consensus).max(1)
    }
}

/// Locates photos with retrieval and with LocDiff-H. `queries` has the shape `[photos, width]`, and `images` holds
/// LocDiff's samples for each photo. All methods ignore the gallery points that `excluded` leaves out.
pub fn locate(
    retriever: &Retriever<'_>,
    queries: &Tensor,
    images: &[ImageSamples],
    hybrid: &Hybrid,
    voters: Voters,
    excluded: Option<Exclusion<'_>>,
) -> Result<Vec<LocatedPlaces>, RetrievalError> {
    let index = retriever.gallery().index();
    let points = index.points();
    let candidates = |image: &ImageSamples| image.candidates(hybrid, index);
    let finish = |image: &ImageSamples, wanted: &[u32], scored: &Scored, retrieval: UnitVector| {
        let answer = image.answer(hybrid, points, wanted, &scored.logits);
        let consensus = consensus_places(points, scored, &[voters.scale])[0];
        LocatedPlaces { retrieval, consensus, hybrid: answer.map(|point| points[point as usize]) }
    };
    for_each_photo(retriever, queries, (images, excluded), voters, candidates, finish)
}

/// The answers of retrieval alone for one photo.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrievedPlaces {
    /// The answer without consensus.
    pub retrieval: UnitVector,
    /// The answer with consensus.
    pub consensus: UnitVector,
}

/// Locates photos with retrieval alone. The gallery points that `excluded` leaves out are ignored.
pub fn locate_alone(
    retriever: &Retriever<'_>,
    queries: &Tensor,
    voters: Voters,
    excluded: Option<Exclusion<'_>>,
) -> Result<Vec<RetrievedPlaces>, RetrievalError> {
    let photos = vec![(); queries.size().first().copied().unwrap_or(0) as usize];
    let points = retriever.gallery().points();
    let finish = |(): &(), _: &[u32], scored: &Scored, retrieval: UnitVector| RetrievedPlaces {
        retrieval,
        consensus: consensus_places(points, scored, &[voters.scale])[0],
    };
    for_each_photo(retriever, queries, (&photos, excluded), voters, |()| Vec::new(), finish)
}

/// The answers of retrieval with consensus, for each of `scales`.
fn consensus_places(points: &[UnitVector], scored: &Scored, scales: &[f64]) -> Vec<UnitVector> {
    let winners = retrieval_consensus(points, &scored.best, scales).expect("every photo has a best point");
    winners.into_iter().map(|point| points[point as usize]).collect()
}

/// For each photo, the errors of LocDiff, of retrieval, of retrieval with consensus at every scale, and of LocDiff-H
/// under every setting of `grid`. Gallery points within `exclude` of a photo's true place are ignored.
pub fn try_settings(
    retriever: &Retriever<'_>,
    queries: &Tensor,
    images: &[ImageSamples],
    truths: &[UnitVector],
    grid: &Grid,
    voters: Voters,
    exclude: Option<Km>,
) -> Result<Vec<TuningErrors>, RetrievalError> {
    if truths.len() != images.len() {
        let (got, want) = (truths.len().to_string(), images.len().to_string());
        return Err(RetrievalError::Shape { what: "true places", got, want });
    }
    let index = retriever.gallery().index();
    let pairs: Vec<(&ImageSamples, UnitVector)> = images.iter().zip(truths.iter().copied()).collect();
    let candidates = |(image, _): &(&ImageSamples, UnitVector)| grid.candidates(index, image);
    let finish =
        |(image, truth): &(&ImageSamples, UnitVector), wanted: &[u32], scored: &Scored, retrieval: UnitVector| {
            TuningErrors {
                own_km: truth.distance(image.aggregate).0 as f32,
                retrieval_km: truth.distance(retrieval).0 as f32,
                consensus_km: consensus_places(index.points(), scored, &CONSENSUS_SCALES)
                    .into_iter()
                    .map(|place| truth.distance(place).0 as f32)
                    .collect(),
                settings_km: grid.errors_km(*truth, image, index.points(), wanted, &scored.logits),
            }
        };
    let excluded = exclude.map(|radius| Exclusion { radius, truths });
    for_each_photo(retriever, queries, (&pairs, excluded), voters, candidates, finish)
}

/// Processes photos in chunks. For each photo, finds the candidates, scores them, and calls `finish` with the photo,
/// the candidates, the scores and the answer of retrieval.
fn for_each_photo<Photo: Sync, Found: Send>(
    retriever: &Retriever<'_>,
    queries: &Tensor,
    (photos, excluded): (&[Photo], Option<Exclusion<'_>>),
    voters: Voters,
    candidates: impl Fn(&Photo) -> Vec<u32> + Sync,
    finish: impl Fn(&Photo, &[u32], &Scored, UnitVector) -> Found + Sync,
) -> Result<Vec<Found>, RetrievalError> {
    let (got, want) = (queries.size().first().copied().unwrap_or(0), photos.len() as i64);
    if got != want {
        let (got, want) = (got.to_string(), want.to_string());
        return Err(RetrievalError::Shape { what: "queries", got, want });
    }
    let (threads, points) = (retriever.threads(), retriever.gallery().points());
    let mut found = Vec::with_capacity(photos.len());
    for (first, photos) in (0..).step_by(PHOTOS).zip(photos.chunks(PHOTOS)) {
        let mut wanted = in_parallel(threads, photos, &candidates);
        let excluded = excluded.map(|excluded| excluded.of_photos(first, photos.len()));
        if let Some(Exclusion { radius, truths }) = excluded {
            for (wanted, truth) in wanted.iter_mut().zip(truths) {
                wanted.retain(|point| points[*point as usize].distance(*truth) > radius);
            }
        }
        let queries = queries.f_narrow(0, first as i64, photos.len() as i64)?;
        let scored = retriever.score(&queries, &wanted, voters.top(), excluded)?;
        // A gallery has points, so a photo without a best point has lost all of them to the exclusion.
        if let (Some(row), Some(excluded)) = (scored.iter().position(|scored| scored.best.is_empty()), excluded) {
            return Err(RetrievalError::AllExcluded { row: first + row, radius_km: excluded.radius.0 });
        }
        let tasks: Vec<_> = photos.iter().zip(wanted.iter().zip(&scored)).collect();
        found.extend(in_parallel(threads, &tasks, |(photo, (wanted, scored))| {
            let nearest = knn_place(points, &scored.best[..voters.neighbours.clamp(1, scored.best.len())])
                .expect("a gallery has points, and at least one neighbour is requested");
            finish(photo, wanted, scored, points[nearest as usize])
        }));
    }
    Ok(found)
}
