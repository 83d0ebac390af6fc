//! Harmonics on the GPU: one kernel, f64 inside, f32 out.
//!
//! The kernel does the operations of the CPU in their order, none fused; callers should rely on equality to rounding
//! only. [`Encoder::new`] compiles and uploads, so make one before a capture begins.

use tch::{Device, Kind, Tensor};

use super::harmonics::Basis;
use super::{ShddError, torch_error};
use crate::native::nvrtc::{Arg, Kernel};

const SOURCE: &str = include_str!("../native/kernels/harmonics.cu");
/// Without fused multiply-add every operation rounds as it does on the CPU.
const OPTIONS: &[&str] = &["--fmad=false", "--std=c++17"];
/// Threads of one warp, which write together.
const WARP: u32 = 32;
/// About how many threads a block has, where the degree needs no more.
const THREADS: u32 = 256;

/// The harmonics to one degree on one device.
#[derive(Debug)]
pub struct Encoder {
    kernel: Kernel,
    degree: u32,
    device: Device,
    sectoral: Tensor,
    recursion: Tensor,
}

impl Encoder {
    /// Compiles the kernel for the current device and puts the tables of `basis` on `device`, which must be the same.
    pub fn new(basis: &Basis, device: Device) -> Result<Self, ShddError> {
        let kernel = Kernel::compile("harmonics", SOURCE, OPTIONS)?;
        let upload = |values: &[f64]| {
            Tensor::f_from_slice(values)
                .and_then(|values| values.f_to_device(device))
                .map_err(|error| torch_error("tables of harmonics", &error))
        };
        let sectoral = upload(&basis.sectoral)?;
        let recursion = upload(basis.recursion.as_flattened())?;
        Ok(Self { kernel, degree: basis.degree(), device, sectoral, recursion })
    }

    /// Codes `[n, (L+1)²]` in f32 of unit vectors `[n, 3]` in f64 on the encoder's device; the host does not wait.
    pub fn encode(&self, points_n3: &Tensor) -> Result<Tensor, ShddError> {
        let shape = points_n3.size();
        let described = || format!("{:?} {shape:?} on {:?}", points_n3.kind(), points_n3.device());
        if shape.len() != 2 || shape[1] != 3 || points_n3.kind() != Kind::Double || points_n3.device() != self.device {
            let want = format!("Double [n, 3] on {:?}", self.device);
            return Err(ShddError::Tensor { what: "points to encode", got: described(), want });
        }
        let points_n3 = points_n3.contiguous();
        let width = self.degree + 1;
        let out = Tensor::f_empty([shape[0], i64::from(width * width)], (Kind::Float, self.device))
            .map_err(|error| torch_error("codes of points", &error))?;
        if shape[0] == 0 {
            return Ok(out);
        }
        let orders = width.next_multiple_of(WARP);
        let points_per_block = (THREADS / orders).max(1);
        let blocks = shape[0].cast_unsigned().div_ceil(u64::from(points_per_block));
        let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= i32::MAX as u32).ok_or_else(|| {
            ShddError::Tensor { what: "points to encode", got: described(), want: "fewer than 2^31 blocks".to_owned() }
        })?;
        let arguments = [
            Arg::Tensor(&out),
            Arg::Tensor(&points_n3),
            Arg::Tensor(&self.sectoral),
            Arg::Tensor(&self.recursion),
            Arg::I32(self.degree.cast_signed()),
            Arg::I64(shape[0]),
        ];
        self.kernel.launch([blocks, 1, 1], [orders, points_per_block, 1], &arguments)?;
        Ok(out)
    }
}

/// Codes of unit vectors `[n, 3]` in f64 on a device, once; who encodes often keeps an [`Encoder`].
pub fn encode(basis: &Basis, points_n3: &Tensor) -> Result<Tensor, ShddError> {
    Encoder::new(basis, points_n3.device())?.encode(points_n3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::UnitVector;
    use crate::shdd::points::uniform_points;

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    #[allow(clippy::print_stdout, reason = "tests print what they measured")]
    fn gpu_codes_equal_cpu_codes() {
        let mut points = uniform_points(7, 0, 0, 9_998).expect("in range");
        points.extend([UnitVector::NORTH_POLE, UnitVector::SOUTH_POLE]);
        let flat: Vec<f64> = points.iter().flat_map(|point| point.xyz()).collect();
        let points_n3 = Tensor::from_slice(&flat).view([-1, 3]).to_device(Device::Cuda(0));
        for degree in [0, 1, 31, 32, 47, 127] {
            let basis = Basis::new(degree).expect("in range");
            let want = basis.tensor(&points, Device::Cpu).expect("encodes");
            let got = encode(&basis, &points_n3).expect("encodes").to_device(Device::Cpu);
            let difference = (&got - &want).abs().max().double_value(&[]) / want.abs().max().double_value(&[]);
            println!("degree {degree}: max|dY| / max|Y| = {difference:e}");
            // One unit in the last place of f32, if a sum in f64 falls on the other side of a rounding boundary.
            assert!(difference <= 1e-6, "degree {degree}: {difference:e}");
        }
    }

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    fn gpu_refuses_tensors_of_the_wrong_form() {
        let encoder = Encoder::new(&Basis::new(3).expect("in range"), Device::Cuda(0)).expect("compiles");
        let on_gpu = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cuda(0)));
        for wrong in [
            on_gpu([4, 3], Kind::Float),
            on_gpu([4, 2], Kind::Double),
            Tensor::zeros([4, 3], (Kind::Double, Device::Cpu)),
        ] {
            assert!(matches!(encoder.encode(&wrong), Err(ShddError::Tensor { .. })), "{wrong:?}");
        }
        assert_eq!(encoder.encode(&on_gpu([0, 3], Kind::Double)).expect("none").size(), [0, 16]);
    }
}
