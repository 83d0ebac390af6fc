//! Harmonics on the GPU, by a kernel that computes in f64 and returns f32.
//!
//! The kernel performs the same operations as the CPU in the same order, without fused multiply-add. Callers should
//! nevertheless assume that the results of GPU and CPU are equal only up to rounding. [`Encoder::new`] compiles the
//! kernel and uploads tables, so call it before a CUDA graph capture begins.
//!
//! There are two ways to encode points. [`Encoder::encode`] checks that every point is a unit vector, and the host
//! waits for this check. [`Encoder::encode_unchecked`] does not check the points and does not wait, so it can be used
//! within a CUDA graph capture. It is meant for points that are known to be unit vectors. Other points give
//! meaningless numbers, but never an invalid memory access.

use locdiff_core::geo::UnitVector;
use tch::{Device, Kind, Tensor};

use super::ShddError;
use super::harmonics::Basis;
use crate::native::nvrtc::{Arg, Kernel};

const SOURCE: &str = include_str!("../native/kernels/harmonics.cu");
/// Without fused multiply-add, every operation rounds as it does on the CPU.
const OPTIONS: &[&str] = &["--fmad=false", "--std=c++17"];
/// Threads per warp.
const WARP: u32 = 32;
/// Number of threads per block, unless one point needs more because the degree is high.
const THREADS: u32 = 256;

/// Largest accepted difference between the length of a point and 1. Rounding in f64 causes differences of about 1e-16.
/// For points that were stored in f32, the difference is usually 1e-8 or more, so they are rejected.
const LENGTH_ERROR_MAX: f64 = 1e-9;

/// Encodes points on one GPU with the harmonics of one [`Basis`].
#[derive(Debug)]
pub struct Encoder {
    kernel: Kernel,
    scores: Kernel,
    degree: u32,
    device: Device,
    sectoral: Tensor,
    recursion: Tensor,
}

impl Encoder {
    /// Compiles the kernel for the current device and uploads the tables of `basis` to `device`. `device` must be the
    /// current device.
    pub fn new(basis: &Basis, device: Device) -> Result<Self, ShddError> {
        let [kernel, scores] = ["harmonics", "scores_at"].map(|name| Kernel::compile(name, SOURCE, OPTIONS));
        let sectoral = Tensor::f_from_slice(&basis.sectoral)?.f_to_device(device)?;
        let recursion = Tensor::f_from_slice(basis.recursion.as_flattened())?.f_to_device(device)?;
        Ok(Self { kernel: kernel?, scores: scores?, degree: basis.degree(), device, sectoral, recursion })
    }

    /// Encodes the unit vectors `points_n3`, f64 `[n, 3]` on the encoder's device, as f32 `[n, (L+1)²]`. If a row is
    /// not a finite vector of length 1, the error names the first such row. The host waits for the device, so do
    /// not call this function during a CUDA graph capture.
    pub fn encode(&self, points_n3: &Tensor) -> Result<Tensor, ShddError> {
        self.expect_points(points_n3)?;
        expect_unit(points_n3)?;
        self.encode_unchecked(points_n3)
    }

    /// Like [`Encoder::encode`], but does not check that the points are unit vectors. The host does not wait.
    pub fn encode_unchecked(&self, points_n3: &Tensor) -> Result<Tensor, ShddError> {
        self.expect_points(points_n3)?;
        let shape = points_n3.size();
        let points_n3 = points_n3.f_contiguous()?;
        let width = self.degree + 1;
        let out = Tensor::f_empty([shape[0], i64::from(width * width)], (Kind::Float, self.device))?;
        if shape[0] == 0 {
            return Ok(out);
        }
        let (grid, block) = self.threads(shape[0])?;
        let arguments = [
            Arg::Tensor(&out),
            Arg::Tensor(&points_n3),
            Arg::Tensor(&self.sectoral),
            Arg::Tensor(&self.recursion),
            Arg::I32(self.degree.cast_signed()),
            Arg::I64(shape[0]),
        ];
        self.kernel.launch(grid, block, &arguments)?;
        Ok(out)
    }

    /// The scores `code · Y(point)` of the points with the indices `chosen_bk` (i64), for each code of `codes_bc`.
    /// `codes_bc` holds whole codes in f32. Products and sums are f64, the result `[b, k]` is f32. The indices are not
    /// checked, and the host does not wait.
    pub fn scores(&self, points_n3: &Tensor, chosen_bk: &Tensor, codes_bc: &Tensor) -> Result<Tensor, ShddError> {
        self.expect_points(points_n3)?;
        let (chosen_bk, codes_bc) = (chosen_bk.f_contiguous()?, codes_bc.f_contiguous()?);
        let out_bk = Tensor::f_empty(chosen_bk.size(), (Kind::Float, self.device))?;
        let count = chosen_bk.numel() as i64;
        if count == 0 {
            return Ok(out_bk);
        }
        let (grid, block) = self.threads(count)?;
        let arguments = [
            Arg::Tensor(&out_bk),
            Arg::Tensor(points_n3),
            Arg::Tensor(&chosen_bk),
            Arg::Tensor(&codes_bc),
            Arg::Tensor(&self.sectoral),
            Arg::Tensor(&self.recursion),
            Arg::I32(self.degree.cast_signed()),
            Arg::I32(chosen_bk.size()[1] as i32),
            Arg::I64(count),
        ];
        self.scores.launch(grid, block, &arguments)?;
        Ok(out_bk)
    }

    /// The grid and the thread blocks for `count` points. The threads of a point have the same `threadIdx.y`.
    fn threads(&self, count: i64) -> Result<([u32; 3], [u32; 3]), ShddError> {
        let orders = (self.degree + 1).next_multiple_of(WARP);
        let points_per_block = (THREADS / orders).max(1);
        let blocks = i32::try_from(count.cast_unsigned().div_ceil(u64::from(points_per_block)));
        let blocks = blocks.map_err(|_| ShddError::Bad(format!("points to encode: {count} points are too many")))?;
        Ok(([blocks.cast_unsigned(), 1, 1], [orders, points_per_block, 1]))
    }

    fn expect_points(&self, points_n3: &Tensor) -> Result<(), ShddError> {
        let shape = points_n3.size();
        if shape.len() == 2 && shape[1] == 3 && points_n3.kind() == Kind::Double && points_n3.device() == self.device {
            return Ok(());
        }
        Err(mismatch(points_n3, &format!("Double [n, 3] on {:?}", self.device)))
    }
}

fn mismatch(points: &Tensor, want: &str) -> ShddError {
    let (kind, size, device) = (points.kind(), points.size(), points.device());
    ShddError::Bad(format!("points to encode: tensor is {kind:?} {size:?} on {device:?}, wanted {want}"))
}

/// Checks that every row of `points_n3` is a finite vector of length 1. The error names the first wrong row. The
/// points may be on any device. The host waits for the device.
pub fn expect_unit(points_n3: &Tensor) -> Result<(), ShddError> {
    let error_n =
        points_n3.f_square()?.f_sum_dim_intlist([1_i64].as_slice(), false, Kind::Double)?.f_sub_scalar(1.0)?;
    // Twice the limit, because the error of a squared length is twice the error of the length. The code tests `<=`
    // instead of negating `>`, so that NaN does not pass.
    let right_n = error_n.f_abs()?.f_le(2.0 * LENGTH_ERROR_MAX)?;
    if right_n.f_all()?.f_int64_value(&[])? == 1 {
        return Ok(());
    }
    let row = right_n.f_logical_not()?.f_to_kind(Kind::Float)?.f_argmax(0, false)?.f_int64_value(&[])?;
    let got: Vec<f64> = Vec::try_from(points_n3.f_get(row)?.f_to_device(Device::Cpu)?)?;
    Err(ShddError::Bad(format!("points to encode: row {row} is {got:?}, wanted a finite vector of length 1")))
}

/// Copies points to `device` as an f64 tensor `[n, 3]`, the input of an [`Encoder`].
pub fn upload(points: &[UnitVector], device: Device) -> Result<Tensor, ShddError> {
    let flat: Vec<f64> = points.iter().flat_map(|point| point.xyz()).collect();
    Ok(Tensor::f_from_slice(&flat)?.f_view([points.len() as i64, 3])?.f_to_device(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shdd::points::uniform_points;

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    #[allow(clippy::print_stdout, reason = "prints the measured difference")]
    fn gpu_codes_equal_cpu_codes() {
        let mut points = uniform_points(7, 0, 0, 9_998).expect("the draw is in range");
        points.extend([UnitVector::NORTH_POLE, UnitVector::SOUTH_POLE]);
        let points_n3 = upload(&points, Device::Cuda(0)).expect("the points fit into memory");
        for degree in [0, 1, 31, 32, 47, 127] {
            let basis = Basis::new(degree).expect("the degree is at most 511");
            let want = basis.tensor(&points, Device::Cpu).expect("the points are unit vectors");
            let got = Encoder::new(&basis, Device::Cuda(0))
                .and_then(|encoder| encoder.encode(&points_n3))
                .expect("the points are unit vectors")
                .to_device(Device::Cpu);
            let difference = (&got - &want).abs().max().double_value(&[]) / want.abs().max().double_value(&[]);
            println!("degree {degree}: max|dY| / max|Y| = {difference:e}");
            // Allow a few units in the last place of f32, in case small differences in f64 round to different f32
            // values.
            assert!(difference <= 1e-6, "degree {degree}: GPU and CPU differ by {difference:e} of the largest value");
        }
    }

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    fn gpu_refuses_tensors_of_the_wrong_shape_kind_or_device() {
        let encoder = Encoder::new(&Basis::new(3).expect("the degree is at most 511"), Device::Cuda(0))
            .expect("the kernel compiles");
        let on_gpu = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cuda(0)));
        for wrong in [
            on_gpu([4, 3], Kind::Float),
            on_gpu([4, 2], Kind::Double),
            Tensor::zeros([4, 3], (Kind::Double, Device::Cpu)),
        ] {
            let error = encoder.encode(&wrong).expect_err("the points are invalid").to_string();
            assert!(error.ends_with("wanted Double [n, 3] on Cuda(0)"), "wrong error text: {error}");
        }
        assert_eq!(
            encoder.encode(&on_gpu([0, 3], Kind::Double)).expect("a list without points is valid").size(),
            [0, 16]
        );
        let zeros = encoder.encode(&on_gpu([4, 3], Kind::Double)).expect_err("zeros are not unit vectors");
        assert!(
            zeros.to_string().starts_with("points to encode: row 0 is [0.0, 0.0, 0.0], wanted"),
            "wrong error text: {zeros}"
        );
    }

    #[test]
    fn points_that_are_not_unit_vectors_are_named_by_row() {
        let points_n3 = upload(&uniform_points(7, 0, 0, 9).expect("the draw is in range"), Device::Cpu)
            .expect("the points fit into memory");
        expect_unit(&points_n3).expect("the points are unit vectors");
        expect_unit(&points_n3.narrow(0, 0, 0)).expect("a list without points is valid");
        let rounded_to_f32 = points_n3.get(5).to_kind(Kind::Float).to_kind(Kind::Double);
        for (wrong, text) in [
            (Tensor::from_slice(&[0.0, f64::NAN, 1.0]), "row 5 is [0.0, NaN, 1.0]"),
            (Tensor::from_slice(&[f64::INFINITY, 0.0, 0.0]), "row 5 is [inf, 0.0, 0.0]"),
            (Tensor::from_slice(&[0.0, 0.0, 1.0 + 1e-8]), "row 5 is [0.0, 0.0, 1.00000001]"),
            (rounded_to_f32, "row 5 is ["),
        ] {
            let points_n3 = points_n3.copy();
            points_n3.get(5).copy_(&wrong);
            points_n3.get(8).copy_(&wrong);
            let error = expect_unit(&points_n3).expect_err("the points are invalid").to_string();
            assert!(
                error.contains(text) && error.ends_with("wanted a finite vector of length 1"),
                "wrong error text: {error}"
            );
        }
    }
}
