//! World 1: simulated photos in the style of MP16. They favour trained models, because the exact place of a photo is
//! among the places that it looks like.
//!
//! A photo looks like five places: the place where it was taken and four look-alikes. Each photo has a scale r, and its
//! look-alikes are at most 1.6 r away from it. All random numbers come from [`Stream::Simulation`]:
//!
//! | step | sample | elements |
//! |---|---|---|
//! | 0 | photo | 0: bin of r, 1: r within the bin, 2-3: distance and bearing of the jitter, 4-11: distance and bearing of each look-alike, 12-16: weights |
//! | 1 | block of 4096 photos | 8192 gallery points for the block |
//! | 2 + 2v | photo | 512 normals: noise of view v |
//! | 3 + 2v | photo | 0-4: weights drawn for view v, if v >= 1 |
//!
//! For each block of photos, random gallery points are drawn as candidates. A look-alike is moved to the candidate
//! nearest to it if that candidate is close enough to the photo. A block is a fixed range of photo indices, so the
//! result does not depend on the chunk size or the number of threads.

use std::ops::Range;

use locdiff_core::geo::{Degrees, Km, Place, UnitVector};
use locdiff_core::random::{Draw, Philox, RangeError, Stream};
use tch::Device;

use super::look_map::LookMap;
use super::photo::{
    JITTER_KM, Photo, Source, World, dirichlet, displaced, draw_photos, length, mixed, scale_km, view_weights,
};
use crate::geoclip::EMBEDDING_WIDTH;
use crate::shards::{ImageHead, PROJECTION_SEED, ShardsError, projection};

/// Probability of each bin of the scale.
const SCALE_PROBABILITIES: [f64; 6] = [0.06, 0.10, 0.16, 0.24, 0.22, 0.22];
/// Number of places that a photo looks like, including the place where it was taken.
const SOURCES: usize = 5;
/// Number of photos in a block. All photos of a block use the same random gallery points.
pub const BLOCK_PHOTOS: u64 = 4096;

/// Number of gallery points that are drawn for each block, as candidates for look-alikes.
const CANDIDATES: usize = 8192;
/// A look-alike is drawn at most this far from the photo, in units of the photo's scale. It may then be moved to the
/// nearest candidate (see `SNAP`).
const DISPLACEMENT: f64 = 1.2;
/// A look-alike is moved to the nearest candidate only if that candidate is within this distance of the photo, in units
/// of the photo's scale.
const SNAP: f64 = 1.6;
/// Length of the noise vector added to an embedding of unit length.
const NOISE: f64 = 0.8;
/// In view 1 and later views, the weights are a mixture of the photo's weights and weights drawn for the view. This
/// constant is the share of the weights drawn for the view.
const VIEW_SHARE: f64 = 0.2;
/// Largest number of views. A larger number is probably a mistake.
const VIEWS_MAX: u32 = 256;

const STEP_PHOTO: u64 = 0;
const STEP_CANDIDATES: u64 = 1;
const STEP_VIEWS: u64 = 2;
const PHOTO_WORDS: usize = 17;

/// The gallery points that are candidates for the look-alikes of a block of photos, sorted from south to north.
#[derive(Debug)]
pub struct Candidates(Vec<(f64, UnitVector, usize)>);

/// World 1: the seed, the gallery, and the places where photos are taken.
#[derive(Debug, Clone, Copy)]
pub struct World1<'a> {
    philox: Philox,
    gallery: &'a [Place],
    /// The places where photos are taken. `None` means the gallery points.
    places: Option<&'a [Place]>,
}

impl<'a> World1<'a> {
    /// Creates the world for a seed. Photos are taken at `places` in order, or at the gallery points if `places` is
    /// `None`. After the last place, the photos start again at the first place.
    pub fn new(seed: u64, gallery: &'a [Place], places: Option<&'a [Place]>) -> Self {
        Self { philox: Philox::new(seed), gallery, places }
    }

    /// Draws the candidate gallery points of a block of photos.
    pub fn candidates(&self, block: u64) -> Result<Candidates, RangeError> {
        let mut drawn = vec![0; CANDIDATES];
        let draw =
            Draw { stream: Stream::Simulation, step: STEP_CANDIDATES, first_sample: block, elements: CANDIDATES };
        let bound = u32::try_from(self.gallery.len()).unwrap_or(u32::MAX);
        self.philox.fill_int(draw, bound, &mut drawn)?;
        drawn.sort_unstable();
        drawn.dedup();
        let point = |index: i64| {
            let vector = UnitVector::from(self.gallery[index as usize]);
            (vector.xyz()[2], vector, index as usize)
        };
        let mut points: Vec<_> = drawn.into_iter().map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
        Ok(Candidates(points))
    }

    /// Draws photo number `index`. `candidates` are the candidates of the photo's block.
    pub fn photo(&self, index: u64, candidates: &Candidates) -> Result<Photo, RangeError> {
        let mut words = [0; PHOTO_WORDS];
        self.philox.fill_bits(self.draw(STEP_PHOTO, index, PHOTO_WORDS), &mut words)?;
        let uniform = words.map(uniform);
        let spots = self.places.unwrap_or(self.gallery).len() as u64;
        let spot = (index % spots) as usize;
        let (place, own) = match self.places {
            Some(places) => (places[spot], Source::Place(places[spot])),
            None if index < spots => (self.gallery[spot], Source::Gallery(spot)),
            None => {
                let place = displaced_within(self.gallery[spot], JITTER_KM, uniform[2], uniform[3]).into();
                (place, Source::Place(place))
            }
        };
        let scale_km = scale_km(&SCALE_PROBABILITIES, uniform[0], uniform[1]);
        let here = UnitVector::from(place);
        let mut sources = vec![own; SOURCES];
        for (source, pair) in sources[1..].iter_mut().zip(uniform[4..12].chunks_exact(2)) {
            let there = displaced_within(place, DISPLACEMENT * scale_km, pair[0], pair[1]);
            *source = match candidates.nearest(there) {
                Some((vector, index)) if here.distance(vector).0 <= SNAP * scale_km => Source::Gallery(index),
                _ => Source::Place(there.into()),
            };
        }
        Ok(Photo { place, scale_km, sources, weights: dirichlet(&uniform[12..]) })
    }

    fn draw(&self, step: u64, sample: u64, elements: usize) -> Draw {
        Draw { stream: Stream::Simulation, step, first_sample: sample, elements }
    }
}

impl World for World1<'_> {
    fn photos(&self, range: Range<u64>, threads: usize) -> Result<Vec<Photo>, RangeError> {
        let first_block = range.start / BLOCK_PHOTOS;
        let blocks = (first_block..=(range.end - 1) / BLOCK_PHOTOS).map(|block| self.candidates(block));
        let candidates: Vec<Candidates> = blocks.collect::<Result<_, _>>()?;
        draw_photos(range, threads, |index| {
            self.photo(index, &candidates[(index / BLOCK_PHOTOS - first_block) as usize])
        })
    }

    /// The look is a unit vector in GeoCLIP's space.
    fn look(
        &self,
        index: u64,
        photo: &Photo,
        view: u32,
        embeddings: &[&[f32]],
        out: &mut [f32],
    ) -> Result<(), RangeError> {
        let step = STEP_VIEWS + 2 * u64::from(view);
        let mut weights = photo.weights.clone();
        if view > 0 {
            let mut words = [0; SOURCES];
            self.philox.fill_bits(self.draw(step + 1, index, SOURCES), &mut words)?;
            weights = view_weights(photo, &dirichlet(&words.map(uniform)), VIEW_SHARE);
        }
        let mut noise = [0.0_f32; EMBEDDING_WIDTH];
        self.philox.fill_normal(self.draw(step, index, EMBEDDING_WIDTH), &mut noise)?;
        let noise = noise.map(f64::from);
        let mut sum = mixed(&weights, embeddings);
        let strength = NOISE / length(&noise);
        sum.iter_mut().zip(&noise).for_each(|(sum, noise)| *sum += noise * strength);
        let whole = 1.0 / length(&sum);
        out.iter_mut().zip(&sum).for_each(|(out, value)| *out = (value * whole) as f32);
        Ok(())
    }

    fn look_map(&self, device: Device) -> Result<LookMap, ShardsError> {
        let weight_le = projection(PROJECTION_SEED)?.f_tr()?.f_contiguous()?.f_to_device(device)?;
        Ok(LookMap::Linear { weight_le })
    }

    fn image_head(&self) -> ImageHead {
        ImageHead::Linear
    }

    fn views_max(&self) -> u32 {
        VIEWS_MAX
    }
}

impl Candidates {
    /// Finds the candidate nearest to `query`. Candidates are sorted by height (their z coordinate). The search goes up
    /// and down from the height of `query`. It stops where the difference in height exceeds the distance to the best
    /// candidate so far. Beyond that height, no candidate can be nearer.
    pub fn nearest(&self, query: UnitVector) -> Option<(UnitVector, usize)> {
        let height = query.xyz()[2];
        let start = self.0.partition_point(|point| point.0 < height);
        let (mut below, mut above) = (self.0[..start].iter().rev().peekable(), self.0[start..].iter().peekable());
        let mut best: Option<(f64, UnitVector, usize)> = None;
        loop {
            let gap =
                |point: Option<&&(f64, UnitVector, usize)>| point.map_or(f64::MAX, |point| (point.0 - height).abs());
            let (down, up) = (gap(below.peek()), gap(above.peek()));
            let limit = best.map_or(f64::MAX, |best| best.0);
            let next =
                if down <= up { below.next_if(|_| down * down <= limit) } else { above.next_if(|_| up * up <= limit) };
            let Some((_, vector, index)) = next else { break };
            let chord = square_chord(query, *vector);
            if best.is_none_or(|best| (chord, *index) < (best.0, best.2)) {
                best = Some((chord, *vector, *index));
            }
        }
        best.map(|(_, vector, index)| (vector, index))
    }
}

/// Square of the straight-line distance between two points. The sum of squared differences is accurate even for points
/// that are close together. A formula with the dot product would lose precision there.
fn square_chord(a: UnitVector, b: UnitVector) -> f64 {
    let (a, b) = (a.xyz(), b.xyz());
    (0..3).map(|axis| (a[axis] - b[axis]) * (a[axis] - b[axis])).sum()
}

/// Maps a random word to a number between 0 and 1: the midpoint of one of 2³² equal intervals.
fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// A random point in the disc of the given radius around a place. `distance` and `bearing` are random numbers, uniform
/// between 0 and 1. The point is uniform by area if the disc is small enough to count as flat.
fn displaced_within(place: Place, radius_km: f64, distance: f64, bearing: f64) -> UnitVector {
    displaced(place.into(), Degrees(360.0 * bearing), Km(radius_km * distance.sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_candidate_is_the_one_that_a_full_search_finds() {
        let place =
            |latitude, longitude| Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid");
        // A spiral from pole to pole over the eastern longitudes, and a cluster whose points differ in longitude only.
        let spiral = (0..3000).map(|n| place(-90.0 + 0.06 * f64::from(n), (f64::from(n) * 137.5) % 180.0));
        let gallery: Vec<Place> = spiral.chain((0..50).map(|n| place(48.2, 16.3 + 0.001 * f64::from(n)))).collect();
        let candidates = World1::new(1, &gallery, None).candidates(3).expect("block 3 is in range");
        assert!(candidates.0.len() > 2000, "only {} candidates were drawn, wanted more than 2000", candidates.0.len());
        for (latitude, longitude) in
            [(90.0, 0.0), (-90.0, 0.0), (0.0, 179.9), (48.2, 16.32), (-40.0, -150.0), (35.0, 139.0), (48.3, -16.0)]
        {
            let query = UnitVector::from(place(latitude, longitude));
            let all = candidates.0.iter().map(|(_, vector, index)| (square_chord(query, *vector), *index));
            let best = all.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).expect("there are candidates");
            let (vector, index) = candidates.nearest(query).expect("there are candidates");
            assert_eq!((square_chord(query, vector), index), best, "wrong candidate for {latitude}, {longitude}");
        }
    }
}
