//! The simulated MP16 world: what a photo shows, as a function of (seed, index) alone.
//!
//! A photo at p looks like five places: p itself and four that lie about as far away as its scale r says. Pure; every random
//! number comes from [`Stream::Simulation`]:
//!
//! | step | sample | elements |
//! |---|---|---|
//! | 0 | photo | 0: bin of r, 1: r within it, 2-3: distance and bearing of the jitter, 4-11: distance and bearing of each look-alike, 12-16: weights |
//! | 1 | block of 4096 photos | the block's 8192 gallery points |
//! | 2 + 2v | photo | noise of view v, 512 normals |
//! | 3 + 2v | photo | 0-4: fresh weights of view v, for v >= 1 |
//!
//! Gallery points are drawn for a block of photos, not for each: a fixed part of the numbering, whoever computes it.

use locdiff_core::geo::{Degrees, Km, Place, UnitVector};
use locdiff_core::random::{Draw, Philox, RangeError, Stream};

use crate::geoclip::EMBEDDING_WIDTH;

/// Edges of the bins of the scale, km.
const SCALE_EDGES_KM: [f64; 7] = [0.05, 1.0, 25.0, 200.0, 750.0, 2500.0, 20_000.0];
/// Probability of each bin; within one the scale is log-uniform.
const SCALE_PROBABILITIES: [f64; 6] = [0.06, 0.10, 0.16, 0.24, 0.22, 0.22];
/// Places that a photo looks like, its own first.
pub(super) const SOURCES: usize = 5;
/// Photos that share a draw of gallery points.
pub const BLOCK_PHOTOS: u64 = 4096;

/// Gallery points among which a look-alike is sought.
const CANDIDATES: usize = 8192;
/// A look-alike lies within this many scales of the photo, before it snaps to the gallery.
const DISPLACEMENT: f64 = 1.2;
/// It snaps to a gallery point within this many scales of the photo.
const SNAP: f64 = 1.6;
/// Photos beyond one per coordinate stand so far from it at most.
const JITTER_KM: f64 = 1.0;
/// Length of the noise beside an embedding of unit length.
const NOISE: f64 = 0.8;
/// Part of a further view's weights that is its own.
const VIEW_SHARE: f64 = 0.2;

const STEP_PHOTO: u64 = 0;
const STEP_CANDIDATES: u64 = 1;
const STEP_VIEWS: u64 = 2;
const PHOTO_WORDS: usize = 17;

/// Something that a photo looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// A point of the gallery, by index.
    Gallery(usize),
    /// Any other place.
    Place(Place),
}

/// A photo before it has an embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Photo {
    /// Where it was taken.
    pub place: Place,
    /// How far its look-alikes lie, km.
    pub scale_km: f64,
    /// What it looks like, its own place first.
    pub sources: [Source; SOURCES],
    /// How much of each, adding up to 1.
    pub weights: [f64; SOURCES],
}

/// The gallery points of a block, from south to north.
#[derive(Debug)]
pub struct Candidates(Vec<(f64, UnitVector, usize)>);

/// A world: a seed, a gallery and the places of its photos.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    philox: Philox,
    gallery: &'a [Place],
    /// The places that photos are taken at; none: those of the gallery.
    places: Option<&'a [Place]>,
}

impl<'a> World<'a> {
    /// The world of a seed. Photos cycle through the given places, or through those of the gallery.
    pub fn new(seed: u64, gallery: &'a [Place], places: Option<&'a [Place]>) -> Self {
        Self { philox: Philox::new(seed), gallery, places }
    }

    /// The gallery points of a block of photos.
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

    /// Photo `index`, whose block has these candidates.
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

    /// What view `view` of a photo looks like, in GeoCLIP's space: `out` gets a unit vector. `embedding` gives those of the
    /// photo's sources.
    pub fn look<'e>(
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
    /// The nearest of them. From the query's height outwards: no point whose height differs by more than the best chord so far
    /// can be nearer.
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

/// The differences keep the digits that a dot product of near points loses.
fn square_chord(a: UnitVector, b: UnitVector) -> f64 {
    let (a, b) = (a.xyz(), b.xyz());
    (0..3).map(|axis| (a[axis] - b[axis]) * (a[axis] - b[axis])).sum()
}

/// In (0, 1): the middle of each of 2³² parts.
fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// A point of the disc of this radius, evenly by area where the Earth is flat.
fn displaced(place: Place, radius_km: f64, distance: f64, bearing: f64) -> UnitVector {
    let moved = UnitVector::from(place).displace(Degrees(360.0 * bearing), Km(radius_km * distance.sqrt()));
    moved.expect("bearing and distance are finite: they are uniform numbers times constants")
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

/// Dirichlet(1): exponentials over their sum.
fn dirichlet(uniform: &[f64]) -> [f64; SOURCES] {
    let exponentials: [f64; SOURCES] = std::array::from_fn(|index| -uniform[index].ln());
    let sum: f64 = exponentials.iter().sum();
    exponentials.map(|value| value / sum)
}
