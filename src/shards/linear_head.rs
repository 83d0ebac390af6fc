//! The matrix Q, which maps GeoCLIP's 512-dimensional space to the 768 dimensions of a simulated photo's embedding.
//!
//! ```text
//! e = Q y        y: an embedding in GeoCLIP's space; e: the embedding that the shards store
//! y = Qᵀ e       maps e back; this is the linear image head of simulated shards
//! ```
//!
//! Q is a 768 x 512 matrix, and Qᵀ Q is the identity. Q depends only on its seed: Philox draws a matrix of normal
//! random numbers, and Q is the orthogonal factor of its QR decomposition, computed in f64. The sign of each column of
//! Q is chosen such that the diagonal of the R factor is positive, so every QR implementation gives the same Q up to
//! rounding. Training and test shards use the same seed.

use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::ShardsError;
use crate::geoclip::{EMBEDDING_WIDTH, FEATURE_WIDTH};

/// Seed of the matrix Q. All simulated shards use this seed, whatever the seed of their simulation.
pub const PROJECTION_SEED: u64 = 768_512;
/// Step of [`Stream::Simulation`] at which the random numbers for Q are drawn. It is the last possible step, and is far
/// above the steps of simulated photos and views.
const STEP: u64 = (1 << 40) - 1;

/// Computes Q for a seed: `[768, 512]`, f32, on the CPU.
pub fn projection(seed: u64) -> Result<Tensor, ShardsError> {
    let mut normals = vec![0.0_f32; FEATURE_WIDTH * EMBEDDING_WIDTH];
    let draw = Draw { stream: Stream::Simulation, step: STEP, first_sample: 0, elements: EMBEDDING_WIDTH };
    Philox::new(seed).fill_normal(draw, &mut normals).map_err(|error| ShardsError::Argument(error.to_string()))?;
    let shape = [FEATURE_WIDTH as i64, EMBEDDING_WIDTH as i64];
    let normals = Tensor::f_from_slice(&normals)?.f_view(shape)?.f_to_kind(Kind::Double)?;
    let (columns, triangle) = Tensor::f_linalg_qr(&normals, "reduced")?;
    let signs = triangle.f_diagonal(0, 0, 1)?.f_sign()?;
    Ok(columns.f_mul(&signs)?.f_to_kind(Kind::Float)?.f_contiguous()?.f_to_device(Device::Cpu)?)
}
