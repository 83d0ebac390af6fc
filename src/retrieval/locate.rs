//! Locates photos with retrieval alone and with LocDiff-H, and computes the errors of all settings that tuning tries.
//!
//! Photos are processed in chunks, which bounds the memory for the logits of the candidates.

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{Km, UnitVector};
use locdiff_core::parallel::in_parallel;
use locdiff_core::protocol::TuningErrors;
use locdiff_core::tuning::Trials;
use tch::Tensor;

use super::error::RetrievalError;
use super::hybrid::{Hybrid, ImageSamples, first_best};
use super::pool::Pool;
use super::retriever::{Exclusion, Retriever, Scored};
use super::surroundings::Surroundings;

/// Photos per chunk. The number is a multiple of the number of queries in a tile.
const PHOTOS: usize = 1024;
/// Radius of the second round if the nearest neighbours vote, km.
const NEIGHBOURS_KM: f64 = 100.0;

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
/// neighbour is the answer. Several neighbours vote as in retrieval with consensus. `None` if `best` is empty.
pub fn knn_place(points: &[UnitVector], best: &[(u32, f32)]) -> Option<u32> {
    if best.len() < 2 {
        return best.first().map(|(point, _)| *point);
    }
    let setting = Hybrid::without_locdiff(NEIGHBOURS_KM, 1.0, 1.0);
    Pool::new((points, &Surroundings::default()), best, &[], None).answers(&[setting])[0]
}

/// How the best gallery points choose the answers of retrieval.
#[derive(Debug, Clone, Copy)]
pub struct Voters {
    /// Number of points that choose the plain answer. It is 1 unless the gallery consists of photos.
    pub neighbours: usize,
    /// Number of points that vote in the consensus, and in LocDiff-H.
    pub points: usize,
    /// The setting of retrieval with consensus.
    pub consensus: Hybrid,
}

impl Voters {
    /// Number of best points that must be found.
    fn top(self) -> usize {
        self.neighbours.max(self.points).max(1)
    }

    /// The best points that vote.
    fn best(self, scored: &Scored) -> &[(u32, f32)] {
        &scored.best[..self.points.max(1).min(scored.best.len())]
    }
}

/// Locates photos with retrieval and with LocDiff-H. `queries` has the shape `[photos, width]`, and `images` holds
/// LocDiff's samples for each photo. All methods ignore the gallery points that `excluded` leaves out.
pub fn locate(
    (retriever, surroundings): (&Retriever<'_>, &Surroundings),
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
        let near: Vec<(u32, f32)> = wanted.iter().copied().zip(scored.logits.iter().copied()).collect();
        let (image, of_pool) = match hybrid.mode {
            HybridMode::Consensus => (Some(image), &near[..]),
            HybridMode::AnySample => (None, &[][..]),
        };
        let pool = Pool::new((points, surroundings), voters.best(scored), of_pool, image);
        let settings = [voters.consensus, *hybrid];
        let (consensus, answer) = match hybrid.mode {
            HybridMode::Consensus => {
                let answers = pool.answers(&settings);
                (answers[0], answers[1])
            }
            HybridMode::AnySample => {
                let score = |(point, logit): &(u32, f32)| f64::from(*logit) + surroundings.log_prior(*point);
                let logits: Vec<f64> = near.iter().map(score).collect();
                (pool.answers(&settings[..1])[0], first_best(&logits).map(|place| near[place].0))
            }
        };
        let consensus = consensus.expect("every photo has a best point");
        let place = |point: u32| points[point as usize];
        LocatedPlaces { retrieval, consensus: place(consensus), hybrid: answer.map(place) }
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
    (retriever, surroundings): (&Retriever<'_>, &Surroundings),
    queries: &Tensor,
    voters: Voters,
    excluded: Option<Exclusion<'_>>,
) -> Result<Vec<RetrievedPlaces>, RetrievalError> {
    let photos = vec![(); queries.size().first().copied().unwrap_or(0) as usize];
    let points = retriever.gallery().points();
    let finish = |(): &(), _: &[u32], scored: &Scored, retrieval: UnitVector| {
        let winner = Pool::new((points, surroundings), voters.best(scored), &[], None).answers(&[voters.consensus])[0];
        let consensus = points[winner.expect("every photo has a best point") as usize];
        RetrievedPlaces { retrieval, consensus }
    };
    for_each_photo(retriever, queries, (&photos, excluded), voters, |()| Vec::new(), finish)
}

/// For each photo, the errors of LocDiff and of retrieval, and the errors of retrieval with consensus and of LocDiff-H
/// under every setting of `trials`. These must all have the same radius, and no mode may be `any-sample`. Gallery points
/// within `exclude` of a photo's true place are ignored.
pub fn try_settings(
    (retriever, surroundings): (&Retriever<'_>, &Surroundings),
    queries: &Tensor,
    images: &[ImageSamples],
    truths: &[UnitVector],
    trials: &Trials,
    voters: Voters,
    exclude: Option<Km>,
) -> Result<Vec<TuningErrors>, RetrievalError> {
    if truths.len() != images.len() {
        let (got, want) = (truths.len().to_string(), images.len().to_string());
        return Err(RetrievalError::Shape { what: "true places", got, want });
    }
    let index = retriever.gallery().index();
    let radius = Km(trials.hybrid.first().map_or(0.0, |setting| setting.radius_km));
    debug_assert!(trials.hybrid.iter().all(|one| one.radius_km == radius.0 && one.mode != HybridMode::AnySample));
    let pairs: Vec<(&ImageSamples, UnitVector)> = images.iter().zip(truths.iter().copied()).collect();
    let candidates = |(image, _): &(&ImageSamples, UnitVector)| index.within(image.aggregate, radius);
    let finish =
        |(image, truth): &(&ImageSamples, UnitVector), wanted: &[u32], scored: &Scored, retrieval: UnitVector| {
            let near: Vec<(u32, f32)> = wanted.iter().copied().zip(scored.logits.iter().copied()).collect();
            let pool = Pool::new((index.points(), surroundings), voters.best(scored), &near, Some(image));
            let settings = [&trials.consensus[..], &trials.hybrid].concat();
            let error = |answer: Option<u32>| {
                let place = answer.map_or(image.aggregate, |winner| index.points()[winner as usize]);
                truth.distance(place).0 as f32
            };
            let mut errors: Vec<f32> = pool.answers(&settings).into_iter().map(error).collect();
            let settings_km = errors.split_off(trials.consensus.len());
            TuningErrors {
                own_km: truth.distance(image.aggregate).0 as f32,
                retrieval_km: truth.distance(retrieval).0 as f32,
                consensus_km: errors,
                settings_km,
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
