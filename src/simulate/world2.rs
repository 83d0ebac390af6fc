//! World 2: simulated photos on which GeoCLIP with a trained head is about as accurate as on real photos.
//!
//! It differs from world 1 in four ways. A photo looks like a place near its own place, but not like its exact place.
//! The look-alikes surround a random centre instead of the photo. The views of a photo share a part of their noise, so
//! the mean over views still has noise. The map to the stored embedding is not linear, so only a trained head can map
//! embeddings back to GeoCLIP's space.
//!
//! ```text
//! x = [y, content, nuisance]      y: 512 numbers; content of the photo and nuisance of the view: 128 normals each
//! y = √512 normalise(Σ w g) + 0.4 (noise of the photo) + 1.6 (noise of the view)
//! e = B relu(A x + b / 2)         A: 1024 x 768, B: 768 x 1024, b: 1024 numbers; all fixed for all seeds
//! ```
//!
//! Random numbers come from SplitMix64 ([`Numbers`]). Photo n uses the key (seed, n, 0), its view v the key
//! (seed, n, 1 + v):
//!
//! | elements | of a photo | of a view |
//! |---|---|---|
//! | 0, 1 | bin of the scale r, r within the bin | 0-5: weights |
//! | 2, 3 | bearing and distance of the centre | |
//! | 4, 5 | bearing and distance of the first source, near the photo | |
//! | 6-15 | bearing and distance of each look-alike | |
//! | 16, 17 | bearing and distance of the jitter | |
//! | 18-23 | weights | |
//! | 32-543 | 512 normals: noise | 512 normals: noise |
//! | 544-671 | 128 normals: content | 128 normals: nuisance |
//!
//! Bearings are counter-clockwise from north. The noise, A, b and B serve only to make the embeddings as hard to use as
//! those of real photos; [NUMERICS.md](../../docs/NUMERICS.md) says how the constants were chosen.

use std::f64::consts::TAU;
use std::ops::Range;

use locdiff_core::geo::{Degrees, Km, Place, SphereIndex, UnitVector};
use locdiff_core::random::{RangeError, SPLITMIX_INCREMENT, splitmix};
use tch::{Device, Tensor};

use super::look_map::LookMap;
use super::photo::{JITTER_KM, Photo, Source, World, dirichlet, displaced, draw_photos, mixed, scale_km, view_weights};
use crate::geoclip::{EMBEDDING_WIDTH, FEATURE_WIDTH};
use crate::shards::{ImageHead, ShardsError};

/// Probability of each bin of the scale.
const SCALE_PROBABILITIES: [f64; 6] = [0.15, 0.03, 0.09, 0.28, 0.20, 0.25];
const LOOK_ALIKES: usize = 5;
/// The first source is at most this far from the photo, in units of the photo's scale.
const OWN_REACH: f64 = 0.25;
/// The first source is at least this far from the photo, in km.
const OWN_MIN_KM: f64 = 0.05;
/// A look-alike is drawn at most this far from the centre, in units of the photo's scale.
const DISPLACEMENT: f64 = 1.2;
/// A look-alike is moved to the nearest gallery point of its class only if that point is within this distance of the
/// centre, in units of the photo's scale.
const SNAP: f64 = 1.6;
/// Look-alikes of a photo come from every twelfth gallery point: those whose index modulo 12 equals the index of the
/// photo modulo 12. These points are the class of the photo.
const GALLERY_CLASSES: u64 = 12;
/// The weights of a view are a mixture of the photo's weights and weights drawn for the view. This constant is the
/// share of the weights drawn for the view.
const VIEW_SHARE: f64 = 0.6;
/// Standard deviation of the noise that all views of a photo share. The signal has a standard deviation of about 1.
const PHOTO_NOISE: f64 = 0.4;
/// Standard deviation of the noise of a view.
const VIEW_NOISE: f64 = 1.6;
/// Largest number of views. The noise was chosen such that 16 views give the accuracy of GeoCLIP's ten crops.
const VIEWS_MAX: u32 = 16;
/// Factor that multiplies b.
const BIAS: f64 = 0.5;
/// Seed of A, b and B. All photos of world 2 use this seed, whatever the seed of their simulation.
pub(super) const MAP_SEED: u64 = 7;
const HIDDEN: usize = 1024;
/// Width of the content, and of the nuisance.
const CONTENT: usize = (FEATURE_WIDTH - EMBEDDING_WIDTH) / 2;

const FIRST_LOOK_ALIKE: u64 = 6;
const FIRST_JITTER: u64 = 16;
const FIRST_WEIGHT: u64 = 18;
const FIRST_NOISE: u64 = 32;
const FIRST_CONTENT: u64 = FIRST_NOISE + EMBEDDING_WIDTH as u64;

/// A sequence of random numbers, determined by three integers.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    key: u64,
}

impl Numbers {
    fn new(seed: u64, first: u64, second: u64) -> Self {
        let next = |number: u64| splitmix(number.wrapping_add(SPLITMIX_INCREMENT));
        Self { key: next(next(next(seed) ^ first) ^ second) }
    }

    /// Number `index`, uniform between 0 and 1, exclusive.
    fn uniform(self, index: u64) -> f64 {
        let word = splitmix(self.key.wrapping_add((index + 1).wrapping_mul(SPLITMIX_INCREMENT)));
        ((word >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// Fills `out` with normal random numbers, made from as many uniform numbers, beginning with number `first`. The
    /// length must be even. Source: Box and Muller, 1958.
    fn fill_normal(self, first: u64, out: &mut [f64]) {
        let half = out.len() / 2;
        let (cosines, sines) = out.split_at_mut(half);
        for (index, (cosine, sine)) in (first..).zip(cosines.iter_mut().zip(sines)) {
            let radius = (-2.0 * self.uniform(index).ln()).sqrt();
            let angle = (TAU * self.uniform(index + half as u64)).sin_cos();
            (*sine, *cosine) = (radius * angle.0, radius * angle.1);
        }
    }

    /// [`dirichlet`] weights, one per source, made from the uniform numbers that begin with number `first`.
    fn weights(self, first: u64) -> Vec<f64> {
        let uniform: Vec<f64> = (first..=first + LOOK_ALIKES as u64).map(|index| self.uniform(index)).collect();
        dirichlet(&uniform)
    }

    /// The point `distance_km` from `from`. Number `index` decides the bearing.
    fn displace(self, from: UnitVector, index: u64, distance_km: f64) -> UnitVector {
        displaced(from, Degrees(-360.0 * self.uniform(index)), Km(distance_km))
    }
}

/// World 2: the seed, the gallery, and the places where photos are taken.
#[derive(Debug)]
pub struct World2<'a> {
    seed: u64,
    gallery: &'a [Place],
    /// An index of the gallery points of each class. Point n of class c is gallery point n · 12 + c.
    classes: Vec<SphereIndex>,
    /// The places where photos are taken. `None` means the gallery points.
    places: Option<&'a [Place]>,
}

impl<'a> World2<'a> {
    /// Creates the world for a seed. Photos are taken at `places` in order, or at the gallery points if `places` is
    /// `None`. After the last place, the photos start again at the first place.
    pub fn new(seed: u64, gallery: &'a [Place], places: Option<&'a [Place]>) -> Self {
        let class = |first: usize| {
            let points = gallery.iter().skip(first).step_by(GALLERY_CLASSES as usize);
            SphereIndex::new(points.map(|place| UnitVector::from(*place)).collect())
        };
        Self { seed, gallery, classes: (0..GALLERY_CLASSES as usize).map(class).collect(), places }
    }

    /// Draws photo number `index`.
    pub fn photo(&self, index: u64) -> Photo {
        let numbers = Numbers::new(self.seed, index, 0);
        let here = self.place(index, numbers);
        let scale_km = scale_km(&SCALE_PROBABILITIES, numbers.uniform(0), numbers.uniform(1));
        let centre = numbers.displace(here.into(), 2, scale_km * numbers.uniform(3).sqrt());
        let reach = (OWN_REACH * scale_km).max(OWN_MIN_KM) / OWN_MIN_KM;
        let own = numbers.displace(here.into(), 4, OWN_MIN_KM * reach.powf(numbers.uniform(5).powi(2)));
        let mut sources = vec![Source::Place(own.into())];
        for pair in (FIRST_LOOK_ALIKE..).step_by(2).take(LOOK_ALIKES) {
            let there = numbers.displace(centre, pair, DISPLACEMENT * scale_km * numbers.uniform(pair + 1).sqrt());
            sources.push(self.look_alike(index, centre, there, Km(SNAP * scale_km)));
        }
        Photo { place: here, scale_km, sources, weights: numbers.weights(FIRST_WEIGHT) }
    }

    fn place(&self, index: u64, numbers: Numbers) -> Place {
        let spots = self.places.unwrap_or(self.gallery);
        let spot = spots[(index % spots.len() as u64) as usize];
        if self.places.is_some() || index < spots.len() as u64 {
            return spot;
        }
        let distance_km = JITTER_KM * numbers.uniform(FIRST_JITTER + 1).sqrt();
        numbers.displace(spot.into(), FIRST_JITTER, distance_km).into()
    }

    /// The gallery point of the photo's class that is nearest to `there`, or `there` itself if that point is farther
    /// than `reach` from the centre.
    fn look_alike(&self, index: u64, centre: UnitVector, there: UnitVector, reach: Km) -> Source {
        let class = (index % GALLERY_CLASSES) as usize;
        let points = &self.classes[class];
        match points.nearest(there) {
            Some((point, _)) if centre.distance(points.points()[point as usize]) <= reach => {
                Source::Gallery(point as usize * GALLERY_CLASSES as usize + class)
            }
            _ => Source::Place(there.into()),
        }
    }
}

impl World for World2<'_> {
    fn photos(&self, range: Range<u64>, threads: usize) -> Result<Vec<Photo>, RangeError> {
        draw_photos(range, threads, |index| Ok(self.photo(index)))
    }

    fn look(
        &self,
        index: u64,
        photo: &Photo,
        view: u32,
        embeddings: &[&[f32]],
        out: &mut [f32],
    ) -> Result<(), RangeError> {
        let of_photo = Numbers::new(self.seed, index, 0);
        let of_view = Numbers::new(self.seed, index, 1 + u64::from(view));
        let signal = mixed(&view_weights(photo, &of_view.weights(0), VIEW_SHARE), embeddings);
        let mut noise = [[0.0_f64; EMBEDDING_WIDTH]; 2];
        let mut rest = [0.0_f64; 2 * CONTENT];
        for (numbers, (noise, rest)) in
            [of_photo, of_view].into_iter().zip(noise.iter_mut().zip(rest.chunks_exact_mut(CONTENT)))
        {
            numbers.fill_normal(FIRST_NOISE, noise);
            numbers.fill_normal(FIRST_CONTENT, rest);
        }
        let size = (EMBEDDING_WIDTH as f64).sqrt();
        let y =
            (0..EMBEDDING_WIDTH).map(|at| size * signal[at] + PHOTO_NOISE * noise[0][at] + VIEW_NOISE * noise[1][at]);
        out.iter_mut().zip(y.chain(rest)).for_each(|(out, value)| *out = value as f32);
        Ok(())
    }

    fn look_map(&self, device: Device) -> Result<LookMap, ShardsError> {
        let matrix = |rows: usize, columns: usize, which: u64| -> Result<Tensor, ShardsError> {
            let mut values = vec![0.0_f64; rows * columns];
            for (row, values) in (0..).zip(values.chunks_exact_mut(columns)) {
                Numbers::new(MAP_SEED, row, which).fill_normal(0, values);
            }
            let scale = 1.0 / (columns as f64).sqrt();
            let values: Vec<f32> = values.into_iter().map(|value| (value * scale) as f32).collect();
            let matrix = Tensor::f_from_slice(&values)?.f_view([rows as i64, columns as i64])?;
            Ok(matrix.f_tr()?.f_contiguous()?.f_to_device(device)?)
        };
        let bias = (0..HIDDEN as u64).map(|row| {
            let mut pair = [0.0; 2];
            Numbers::new(MAP_SEED, row, 3).fill_normal(0, &mut pair);
            (BIAS * pair[0]) as f32
        });
        let bias_h = Tensor::f_from_slice(&bias.collect::<Vec<f32>>())?.f_to_device(device)?;
        let (first_lh, second_he) = (matrix(HIDDEN, FEATURE_WIDTH, 1)?, matrix(FEATURE_WIDTH, HIDDEN, 2)?);
        Ok(LookMap::Relu { first_lh, bias_h, second_he })
    }

    fn image_head(&self) -> ImageHead {
        ImageHead::Trained
    }

    fn views_max(&self) -> u32 {
        VIEWS_MAX
    }
}
