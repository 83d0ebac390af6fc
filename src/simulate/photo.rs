//! A simulated photo, and the interface of a simulated world ([`World`]). There are two worlds: `world1` and `world2`.
//! Both draw photos with the functions below.

use std::ops::Range;

use locdiff_core::geo::{Degrees, Km, Place, UnitVector};
use locdiff_core::random::RangeError;
use tch::Device;

use super::look_map::LookMap;
use crate::geoclip::{EMBEDDING_WIDTH, for_each_tile};
use crate::shards::{ImageHead, ShardsError};

/// Edges of the bins from which the scale of a photo is drawn, in km.
const SCALE_EDGES_KM: [f64; 7] = [0.05, 1.0, 25.0, 200.0, 750.0, 2500.0, 20_000.0];
/// Number of photos that one thread draws or mixes at a time.
pub(super) const SHARE_PHOTOS: usize = 64;
/// Largest distance of a photo from its gallery point, in km, if photos are taken at gallery points. The first photo of
/// each gallery point is taken exactly there. Only later photos are displaced.
pub(super) const JITTER_KM: f64 = 1.0;

/// One of the places whose embeddings are mixed into the embedding of a photo.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// A gallery point, by index.
    Gallery(usize),
    /// A place given by its coordinates.
    Place(Place),
}

/// A simulated photo before it is embedded: its place, and its sources (the places that it looks like).
#[derive(Debug, Clone, PartialEq)]
pub struct Photo {
    /// The place where the photo was taken.
    pub place: Place,
    /// The scale of the distances to the look-alikes, in km.
    pub scale_km: f64,
    /// The places whose embeddings are mixed: first the photo's own place, then the look-alikes. In world 2, the first
    /// place is only near the photo's own place.
    pub sources: Vec<Source>,
    /// Weight of each source. The weights sum to 1.
    pub weights: Vec<f64>,
}

/// A simulated world: it decides what photos show. Everything about a photo depends only on the seed, the index of the
/// photo, the gallery and the places where photos are taken.
pub(super) trait World: Sync {
    /// Draws the photos with indices `range`, on up to `threads` threads.
    fn photos(&self, range: Range<u64>, threads: usize) -> Result<Vec<Photo>, RangeError>;

    /// Writes the look of one view of photo number `index` to `out`: the vector that [`Self::look_map`] maps to the
    /// stored embedding. `embeddings` are GeoCLIP's embeddings of the photo's sources.
    fn look(
        &self,
        index: u64,
        photo: &Photo,
        view: u32,
        embeddings: &[&[f32]],
        out: &mut [f32],
    ) -> Result<(), RangeError>;

    /// The map from looks to stored embeddings. It is the same for all seeds.
    fn look_map(&self, device: Device) -> Result<LookMap, ShardsError>;

    /// The head that maps stored embeddings back to GeoCLIP's space.
    fn image_head(&self) -> ImageHead;

    /// Largest number of views of a photo.
    fn views_max(&self) -> u32;
}

/// Calls `draw` for every index in `range`, on up to `threads` threads.
pub(super) fn draw_photos(
    range: Range<u64>,
    threads: usize,
    draw: impl Fn(u64) -> Result<Photo, RangeError> + Sync,
) -> Result<Vec<Photo>, RangeError> {
    let mut photos: Vec<Option<Photo>> = vec![None; (range.end - range.start) as usize];
    let shares: Vec<_> = photos.chunks_mut(SHARE_PHOTOS).enumerate().collect();
    for_each_tile(
        threads,
        shares,
        || (),
        |(), (share, photos): (usize, &mut [Option<Photo>])| {
            for (photo, index) in photos.iter_mut().zip(range.start + (share * SHARE_PHOTOS) as u64..) {
                *photo = Some(draw(index)?);
            }
            Ok(())
        },
    )?;
    Ok(photos.into_iter().flatten().collect())
}

/// Walks from a point in the direction `bearing`, clockwise from north.
pub(super) fn displaced(from: UnitVector, bearing: Degrees, distance: Km) -> UnitVector {
    from.displace(bearing, distance).expect("bearing and distance are finite, because all their factors are finite")
}

/// The scale of a photo. The two random numbers, uniform between 0 and 1, choose a bin by its probability, and a scale
/// within the bin. Within a bin the logarithm of the scale is uniform.
pub(super) fn scale_km(probabilities: &[f64; 6], bin: f64, within: f64) -> f64 {
    let mut sum = 0.0;
    let last = probabilities.len() - 1;
    let bin = probabilities[..last].iter().take_while(|probability| {
        sum += **probability;
        bin >= sum
    });
    let bin = bin.count();
    let (low, high) = (SCALE_EDGES_KM[bin].ln(), SCALE_EDGES_KM[bin + 1].ln());
    (low + within * (high - low)).exp()
}

/// Random weights with sum 1, from the distribution Dirichlet(1, ..., 1): exponential random numbers divided by their
/// sum.
pub(super) fn dirichlet(uniform: &[f64]) -> Vec<f64> {
    let exponentials: Vec<f64> = uniform.iter().map(|value| -value.ln()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|value| value / sum).collect()
}

/// The weights of a view: a mixture of the photo's weights and the weights `fresh`, whose share is `share`.
pub(super) fn view_weights(photo: &Photo, fresh: &[f64], share: f64) -> Vec<f64> {
    photo.weights.iter().zip(fresh).map(|(own, fresh)| (1.0 - share) * own + share * fresh).collect()
}

/// The weighted sum of embeddings, scaled to length 1.
pub(super) fn mixed(weights: &[f64], embeddings: &[&[f32]]) -> [f64; EMBEDDING_WIDTH] {
    let mut sum = [0.0_f64; EMBEDDING_WIDTH];
    for (weight, embedding) in weights.iter().zip(embeddings) {
        sum.iter_mut().zip(*embedding).for_each(|(sum, value)| *sum += weight * f64::from(*value));
    }
    let signal = 1.0 / length(&sum);
    sum.map(|value| value * signal)
}

/// Length (L2 norm) of a vector.
pub(super) fn length(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}
