//! `eval --suite perturbation`: adds noise of variance 0.01 to unscaled codes and measures the mean drift. The drift is
//! the distance by which the mode of the density moves.
//!
//! Theory predicts the drift. Let L be the degree, σ the standard deviation of the noise, R the radius of the Earth,
//! and g the gradient of the noise at the true point. The curvature at the peak of a code without noise is
//! ```text
//! I = Σ_l l(l+1)(2l+1) / 8π = L (L+1)² (L+2) / 16π
//! ```
//! To first order the mode moves by the angle `g / I`, and g has variance `σ² I` along each axis. The drift is
//! therefore Rayleigh distributed with mean `√(π/2) σ R / √I`. At L = 47 the mean is 2.46 km, whereas the paper reports
//! 5.3 km.
//!
//! The search for the mode runs on the continuous sphere in f64. It starts at the true point, which saves time. For the
//! first [`SEARCHED_PER_BLOCK`] points of each block, a second search does not use the true point: it starts at the
//! best point of a grid over the whole sphere. It is an error if the second search finds a different mode. No such
//! error is expected: at L = 47 the noise has a standard deviation of 1.4 everywhere on the sphere, while the peak has
//! a height of 183 and the side lobes have a height of 12.
//!
//! Each point and its noise are functions of the seed, the degree and the index of the point, and the division into
//! blocks is fixed. The result is therefore bit-identical for any number of workers and threads.

use anyhow::{Context, ensure};
use locdiff_core::geo::{EARTH_RADIUS_KM, UnitVector};
use locdiff_core::parallel::in_parallel;
use locdiff_core::protocol::{PerturbationBlock, WorkerSlot};
use locdiff_core::pulse;
use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Kind, Tensor};

use crate::shdd::decode::{Anchors, grid_points_min, refine};
use crate::shdd::{Basis, uniform_points};

/// The degrees of the codes to measure. The table has one row for each degree.
pub const DEGREES: [u32; 4] = [23, 47, 63, 95];
/// Standard deviation of the noise. Its variance is 0.01.
pub const SIGMA: f64 = 0.1;
/// Points per block.
pub const BLOCK_POINTS: u32 = 250;
/// Number of points per block whose mode is searched a second time, over the whole sphere, as a check.
pub const SEARCHED_PER_BLOCK: u32 = 2;
const SEED: u64 = 20_240_047;
/// Two searches found the same mode if their results are at most this many radians apart, which is 6 cm on Earth. Each
/// search is accurate to 6 mm.
const SAME_MODE_RAD: f64 = 1e-8;

/// The mean drift in km that theory predicts, to first order.
pub fn theory_km(degree: u32) -> f64 {
    let degree = f64::from(degree);
    let curvature = degree * (degree + 1.0).powi(2) * (degree + 2.0) / (16.0 * std::f64::consts::PI);
    (std::f64::consts::FRAC_PI_2).sqrt() * SIGMA * EARTH_RADIUS_KM / curvature.sqrt()
}

/// For each degree, measures the blocks of points that are assigned to this worker. `points` is the number of points
/// per degree, over all workers.
pub fn run(points: u32, worker: &WorkerSlot) -> anyhow::Result<Vec<PerturbationBlock>> {
    let mut blocks = Vec::new();
    for degree in DEGREES {
        blocks.extend(run_degree(degree, points, worker).with_context(|| format!("perturbation at degree {degree}"))?);
    }
    Ok(blocks)
}

/// For one degree, measures the blocks of points that are assigned to this worker. The results are in the order of
/// blocks.
pub fn run_degree(degree: u32, points: u32, worker: &WorkerSlot) -> anyhow::Result<Vec<PerturbationBlock>> {
    let basis = Basis::new(degree)?;
    let mine: Vec<u32> = (worker.rank..points.div_ceil(BLOCK_POINTS)).step_by(worker.world as usize).collect();
    let results = in_parallel(worker.threads as usize, &mine, |block| Block::measure(&basis, *block, points));
    let blocks = results.into_iter().collect::<anyhow::Result<Vec<Block>>>()?;
    confirm_modes(&basis, &blocks)?;
    Ok(blocks.into_iter().map(|block| block.sums).collect())
}

/// A sampled point with the mode that the local search found. A search over the whole sphere must confirm this mode.
struct ModePoint {
    index: u64,
    code: Vec<f64>,
    mode: UnitVector,
}

struct Block {
    sums: PerturbationBlock,
    samples: Vec<ModePoint>,
}

impl Block {
    fn measure(basis: &Basis, block: u32, points_all: u32) -> anyhow::Result<Self> {
        pulse::advance();
        let degree = basis.degree();
        let first = u64::from(block) * u64::from(BLOCK_POINTS);
        let count = BLOCK_POINTS.min(points_all - block * BLOCK_POINTS);
        let points = uniform_points(SEED, u64::from(degree), first, count as usize)?;
        let (mut samples, mut drifts_km) = (Vec::new(), Vec::new());
        for (point, index) in points.into_iter().zip(first..) {
            let code = noisy_code(basis, point, index)?;
            let mode = refine(basis, &code, point)?;
            ensure!(mode.converged, "point {index}: the search for the mode did not converge in {} steps", mode.steps);
            drifts_km.push(point.distance(mode.point).0);
            if index < first + u64::from(SEARCHED_PER_BLOCK) {
                samples.push(ModePoint { index, code, mode: mode.point });
            }
        }
        let sums = PerturbationBlock {
            degree,
            block,
            points: count,
            drift_km_sum: drifts_km.iter().sum(),
            drift_km2_sum: drifts_km.iter().map(|drift| drift * drift).sum(),
            drift_km_max: drifts_km.iter().copied().fold(0.0, f64::max),
            theory_km: theory_km(degree),
            searched: samples.len() as u32,
        };
        Ok(Self { sums, samples })
    }
}

/// The code of `point` plus noise. `index` is the index of the point and selects the random numbers.
fn noisy_code(basis: &Basis, point: UnitVector, index: u64) -> anyhow::Result<Vec<f64>> {
    let draw =
        Draw { stream: Stream::Noise, step: u64::from(basis.degree()), first_sample: index, elements: basis.dims() };
    let mut noise = vec![0.0; basis.dims()];
    Philox::new(SEED).fill_normal(draw, &mut noise)?;
    let clean = basis.encode_f64(&[point]);
    Ok(clean.into_iter().zip(noise).map(|(clean, noise)| clean + SIGMA * f64::from(noise)).collect())
}

/// Fails if, for any sampled point of `blocks`, a search over the whole sphere ends at another mode than the search from
/// the true point.
fn confirm_modes(basis: &Basis, blocks: &[Block]) -> anyhow::Result<()> {
    let samples: Vec<&ModePoint> = blocks.iter().flat_map(|block| &block.samples).collect();
    if samples.is_empty() {
        return Ok(());
    }
    let anchors = Anchors::grid(basis.clone(), grid_points_min(basis.degree()), Device::Cpu)?;
    let codes: Vec<Tensor> = samples.iter().map(|sample| Tensor::from_slice(&sample.code)).collect();
    let best = anchors.best(&Tensor::f_stack(&codes, 0)?.f_to_kind(Kind::Float)?, 1)?;
    for (sample, row) in samples.iter().zip(&best.rows) {
        let mode = refine(basis, &sample.code, anchors.points()[row[0].0])?;
        let apart = mode.point.angle(sample.mode);
        ensure!(
            mode.converged && apart <= SAME_MODE_RAD,
            "point {}: the searches from the true point and over the whole sphere ended {apart} rad apart, wanted at \
             most {SAME_MODE_RAD}",
            sample.index
        );
    }
    Ok(())
}
