//! The simulated MP16 world: what each photo shows, as a function of (seed, index).
//!
//! A photo taken at p looks like five places: p itself and four look-alikes at distances on the order of the photo's
//! scale r. Pure: all random numbers come from [`Stream::Simulation`]:
//!
//! | step | sample | elements |
//! |---|---|---|
//! | 0 | photo | 0: bin of r, 1: r within it, 2-3: distance and bearing of the jitter, 4-11: distance and bearing of each look-alike, 12-16: weights |
//! | 1 | block of 4096 photos | the block's 8192 gallery points |
//! | 2 + 2v | photo | noise of view v, 512 normals |
//! | 3 + 2v | photo | 0-4: fresh weights of view v, for v >= 1 |
//!
//! Gallery points are drawn once per block of photos. Blocks are fixed ranges of photo indices, so the result does not
//! depend on chunk size or thread count.

use locdiff_core::geo::{Degrees, Km, Place, UnitVector};
use locdiff_core::random::{Draw, Philox, RangeError, Stream};

use crate::geoclip::EMBEDDING_WIDTH;

/// Bin edges of the scale, km.
const SCALE_EDGES_KM: [f64; 7] = [0.05, 1.0, 25.0, 200.0, 750.0, 2500.0, 20_000.0];
/// Probability of each bin. Within a bin the scale is log-uniform.
const SCALE_PROBABILITIES: [f64; 6] = [0.06, 0.10, 0.16, 0.24, 0.22, 0.22];
/// Number of places that a photo looks like, including its own.
pub(super) const SOURCES: usize = 5;
/// Photos that share one draw of gallery points.
pub const BLOCK_PHOTOS: u64 = 4096;

/// Gallery points drawn per block as candidates for look-alikes.
const CANDIDATES: usize = 8192;
/// Largest distance of a look-alike from the photo before it snaps to the gallery, in units of the photo's scale.
const DISPLACEMENT: f64 = 1.2;
/// A look-alike snaps only to a gallery point within this distance of the photo, in units of the photo's scale.
const SNAP: f64 = 1.6;
/// Largest distance of a gallery point's second and later photos from that point.
const JITTER_KM: f64 = 1.0;
/// Length of the noise vector added to an embedding of unit length.
const NOISE: f64 = 0.8;
/// Share of the weights of views 1 and later that is drawn anew for the view; the rest are the photo's weights.
const VIEW_SHARE: f64 = 0.2;

const STEP_PHOTO: u64 = 0;
const STEP_CANDIDATES: u64 = 1;
const STEP_VIEWS: u64 = 2;
const PHOTO_WORDS: usize = 17;

/// A place that a photo looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// A gallery point, by index.
    Gallery(usize),
    /// Any other place.
    Place(Place),
}

/// A simulated photo before it is embedded: its place and its sources.
#[derive(Debug, Clone, PartialEq)]
pub struct Photo {
    /// Where it was taken.
    pub place: Place,
    /// Scale of the distance to its look-alikes, km.
    pub scale_km: f64,
    /// The places mixed into its embedding: its own, then the look-alikes.
    pub sources: [Source; SOURCES],
    /// Weight of each source. The weights sum to 1.
    pub weights: [f64; SOURCES],
}

/// Candidate gallery points of a block of photos, sorted from south to north.
#[derive(Debug)]
pub struct Candidates(Vec<(f64, UnitVector, usize)>);

/// A simulated world: a seed, a gallery and the places of its photos.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    philox: Philox,
    gallery: &'a [Place],
    /// Where photos are taken. `None`: at the gallery points.
    places: Option<&'a [Place]>,
}

impl<'a> World<'a> {
    /// Creates the world of a seed. Photos cycle through `places`, or through the gallery without it.
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

    /// Draws photo `index`. `candidates` are those of its block.
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
                let place = displaced(self.gallery[spot], JITTER_KM, uniform[2], uniform[3]).into();
                (place, Source::Place(place))
            }
        };
        let scale_km = scale_km(uniform[0], uniform[1]);
        let here = UnitVector::from(place);
        let mut sources = [own; SOURCES];
        for (source, pair) in sources[1..].iter_mut().zip(uniform[4..12].chunks_exact(2)) {
            let there = displaced(place, DISPLACEMENT * scale_km, pair[0], pair[1]);
            *source = match candidates.nearest(there) {
                Some((vector, index)) if here.distance(vector).0 <= SNAP * scale_km => Source::Gallery(index),
                _ => Source::Place(there.into()),
            };
        }
        Ok(Photo { place, scale_km, sources, weights: dirichlet(&uniform[12..]) })
    }

    /// Computes the embedding of one view of a photo in GeoCLIP's space and writes the unit vector to `out`.
    /// `embedding` returns the embedding of the photo's n-th source.
    pub fn embed_view<'e>(
        &self,
        index: u64,
        photo: &Photo,
        view: u32,
        embedding: impl Fn(usize) -> &'e [f32],
        out: &mut [f32],
    ) -> Result<(), RangeError> {
        let step = STEP_VIEWS + 2 * u64::from(view);
        let mut weights = photo.weights;
        if view > 0 {
            let mut words = [0; SOURCES];
            self.philox.fill_bits(self.draw(step + 1, index, SOURCES), &mut words)?;
            let fresh = dirichlet(&words.map(uniform));
            weights = std::array::from_fn(|source| (1.0 - VIEW_SHARE) * weights[source] + VIEW_SHARE * fresh[source]);
        }
        let mut noise = [0.0_f32; EMBEDDING_WIDTH];
        self.philox.fill_normal(self.draw(step, index, EMBEDDING_WIDTH), &mut noise)?;
        let mut sum = [0.0_f64; EMBEDDING_WIDTH];
        for (source, weight) in weights.iter().enumerate() {
            sum.iter_mut().zip(embedding(source)).for_each(|(sum, value)| *sum += weight * f64::from(*value));
        }
        let length = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
        let noise = noise.map(f64::from);
        let (signal, strength) = (1.0 / length(&sum), NOISE / length(&noise));
        sum.iter_mut().zip(&noise).for_each(|(sum, noise)| *sum = *sum * signal + noise * strength);
        let whole = 1.0 / length(&sum);
        out.iter_mut().zip(&sum).for_each(|(out, value)| *out = (value * whole) as f32);
        Ok(())
    }

    fn draw(&self, step: u64, sample: u64, elements: usize) -> Draw {
        Draw { stream: Stream::Simulation, step, first_sample: sample, elements }
    }
}

impl Candidates {
    /// Finds the nearest candidate. The search goes up and down from the query's height (z) and stops where the height
    /// difference exceeds the best chord so far: no point beyond can be nearer.
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

/// Squared chord length. Summing squared differences avoids the cancellation that a dot product of near points suffers.
fn square_chord(a: UnitVector, b: UnitVector) -> f64 {
    let (a, b) = (a.xyz(), b.xyz());
    (0..3).map(|axis| (a[axis] - b[axis]) * (a[axis] - b[axis])).sum()
}

/// Maps a random word to (0, 1): the midpoint of one of 2³² equal intervals.
fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// A point in the disc of the given radius around a place, uniform by area in the flat-Earth approximation. `distance`
/// and `bearing` are uniform numbers.
fn displaced(place: Place, radius_km: f64, distance: f64, bearing: f64) -> UnitVector {
    let moved = UnitVector::from(place).displace(Degrees(360.0 * bearing), Km(radius_km * distance.sqrt()));
    moved.expect("bearing and distance are finite: they are uniform numbers times finite factors")
}

fn scale_km(bin: f64, within: f64) -> f64 {
    let mut sum = 0.0;
    let last = SCALE_PROBABILITIES.len() - 1;
    let bin = SCALE_PROBABILITIES[..last].iter().take_while(|probability| {
        sum += **probability;
        bin >= sum
    });
    let bin = bin.count();
    let (low, high) = (SCALE_EDGES_KM[bin].ln(), SCALE_EDGES_KM[bin + 1].ln());
    (low + within * (high - low)).exp()
}

/// A draw from Dirichlet(1, ..., 1): exponentials divided by their sum.
fn dirichlet(uniform: &[f64]) -> [f64; SOURCES] {
    let exponentials: [f64; SOURCES] = std::array::from_fn(|index| -uniform[index].ln());
    let sum: f64 = exponentials.iter().sum();
    exponentials.map(|value| value / sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_candidate_is_the_one_that_a_full_search_finds() {
        let place = |latitude, longitude| Place::new(Degrees(latitude), Degrees(longitude)).expect("on Earth");
        // A spiral over the whole sphere, and a cluster whose points differ in longitude only.
        let spiral = (0..3000).map(|n| place(-90.0 + 0.06 * f64::from(n), (f64::from(n) * 137.5) % 180.0));
        let gallery: Vec<Place> = spiral.chain((0..50).map(|n| place(48.2, 16.3 + 0.001 * f64::from(n)))).collect();
        let candidates = World::new(1, &gallery, None).candidates(3).expect("drawn");
        assert!(candidates.0.len() > 2000, "{} candidates", candidates.0.len());
        for (latitude, longitude) in
            [(90.0, 0.0), (-90.0, 0.0), (0.0, 179.9), (48.2, 16.32), (-40.0, -150.0), (35.0, 139.0), (48.3, -16.0)]
        {
            let query = UnitVector::from(place(latitude, longitude));
            let all = candidates.0.iter().map(|(_, vector, index)| (square_chord(query, *vector), *index));
            let best = all.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).expect("not empty");
            let (vector, index) = candidates.nearest(query).expect("not empty");
            assert_eq!((square_chord(query, vector), index), best, "{latitude}, {longitude}");
        }
    }
}
