//! Utilisation of the device: FLOP/s, their share of the peak rate, and memory.

use std::time::{Duration, Instant};

use locdiff_core::config::RunConfig;
use tch::{Device, Kind, TchError, Tensor};

use crate::comm::Communicator;
use crate::native::cuda;
use crate::train::data::share;
use crate::train::step::Trainer;

/// Peak rates of GPUs in TFLOP/s without sparsity, from NVIDIA's data sheets. Each entry has one or more words of a
/// GPU's name, the bf16 rate on tensor cores (`None` if the GPU has no bf16), and the f32 rate without tensor cores.
/// The first entry whose words all occur in the name of a GPU applies to that GPU.
const PEAKS_TFLOPS: [(&str, Option<f64>, f64); 15] = [
    ("B200", Some(2250.0), 75.0),
    ("GH200", Some(989.0), 67.0),
    ("H200", Some(989.0), 67.0),
    ("H100 PCIe", Some(756.0), 51.0),
    ("H100 NVL", Some(835.0), 60.0),
    ("H100", Some(989.0), 67.0),
    ("A100", Some(312.0), 19.5),
    ("L40S", Some(362.0), 91.6),
    ("L4", Some(121.0), 30.3),
    ("A40", Some(149.7), 37.4),
    ("A10", Some(125.0), 31.2),
    ("RTX 4090", Some(165.2), 82.6),
    ("RTX 3090", Some(71.0), 35.6),
    ("V100", None, 15.7),
    ("T4", None, 8.1),
];
const GIB: f64 = (1_u64 << 30) as f64;

/// Number of matrix products in a series that is timed before training.
const PRODUCTS: u32 = 4;
/// Maximum number of timed series. Two series are always timed; others begin only within [`PATIENCE`].
const SERIES_MAX: u32 = 5;
/// Limits the time for which the other ranks wait for the timed series.
const PATIENCE: Duration = Duration::from_millis(50);

/// Measures the utilisation of one rank's device.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::train) struct Meter {
    device: Device,
    /// The number format of the matrix products.
    kind: Kind,
    /// Floating-point operations of a step on one rank.
    step_flops: f64,
    peak_flops: Option<f64>,
}

impl Meter {
    /// A meter for this rank.
    pub(in crate::train) fn new(config: &RunConfig, trainer: &Trainer, ranks: &Communicator) -> Self {
        let method = &trainer.work.method;
        // Count the operations of one replica directly. Dividing the operations of the whole step by the number of
        // replicas would be wrong, because every replica runs the time layers for all timesteps.
        let rows = share(ranks).rows(config.train.global_batch);
        let replica = method.step_flops(rows.end - rows.start);
        let (device, kind) = (ranks.world().device(), method.placement().compute_kind());
        let peak = config.train.peak_tflops.value().or_else(|| match device {
            Device::Cuda(index) => cuda::properties(index).ok().and_then(|found| peak_tflops(&found.name, kind)),
            _ => None,
        });
        let step_flops = replica / f64::from(ranks.tensor().size());
        Self { device, kind, step_flops, peak_flops: peak.map(|tflops| tflops * 1e12) }
    }

    /// A rough lower bound on the seconds that `steps` steps take: the time of their matrix products at the speed of
    /// large products on this device.
    pub(in crate::train) fn seconds_min(&self, steps: u64) -> Result<f64, TchError> {
        let size: i64 = if self.device.is_cuda() { 4096 } else { 512 };
        let factor = Tensor::f_ones([size, size], (self.kind, self.device))?;
        let (begun, mut seconds) = (Instant::now(), f64::MAX);
        // Use the fastest series: the first products are slow, and so are products that share a core with another
        // process.
        for series in 0..SERIES_MAX {
            if series > 1 && begun.elapsed() > PATIENCE {
                break;
            }
            let begun = Instant::now();
            let mut product = factor.f_matmul(&factor)?;
            for _ in 1..PRODUCTS {
                product = factor.f_matmul(&factor)?;
            }
            // Read a value, to wait until the device has computed the products.
            product.f_select(0, 0)?.f_select(0, 0)?.f_double_value(&[])?;
            seconds = seconds.min(begun.elapsed().as_secs_f64() / f64::from(PRODUCTS));
        }
        Ok(self.step_flops * steps as f64 * seconds / (2.0 * (size as f64).powi(3)))
    }

    /// Floating-point operations of a step on one rank.
    pub(in crate::train) fn step_flops(&self) -> f64 {
        self.step_flops
    }

    /// TensorBoard scalars for `steps` steps that took `seconds` seconds in total.
    pub(in crate::train) fn scalars(&self, steps: u64, seconds: f64) -> Vec<(&'static str, f64)> {
        let flops = self.step_flops * steps as f64 / seconds;
        let mut scalars = vec![("device/tflops", flops / 1e12)];
        scalars.extend(self.peak_flops.map(|peak| ("device/percent_of_peak", 100.0 * flops / peak)));
        scalars.extend(self.memory());
        scalars
    }

    /// Memory of this rank in GiB. On a GPU, torch's allocator reports it. On the CPU, it is the resident memory of the
    /// process.
    fn memory(&self) -> Vec<(&'static str, f64)> {
        let Device::Cuda(index) = self.device else {
            return resident_bytes()
                .map(|bytes| ("device/memory_resident_gib", bytes as f64 / GIB))
                .into_iter()
                .collect();
        };
        let Ok(memory) = cuda::memory(index) else { return Vec::new() };
        vec![
            ("device/memory_allocated_gib", memory.allocated_bytes as f64 / GIB),
            ("device/memory_reserved_gib", memory.reserved_bytes as f64 / GIB),
            ("device/memory_peak_gib", memory.allocated_peak_bytes as f64 / GIB),
        ]
    }
}

fn peak_tflops(name: &str, kind: Kind) -> Option<f64> {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    let matches = |key: &str| key.split(' ').all(|word| words.contains(&word));
    let (_, bf16, f32) = PEAKS_TFLOPS.iter().find(|(key, ..)| matches(key))?;
    if kind == Kind::BFloat16 { *bf16 } else { Some(*f32) }
}

/// Resident memory of this process.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    kib.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_found_by_whole_words() {
        let peaks = |name: &str| [Kind::BFloat16, Kind::Float].map(|kind| peak_tflops(name, kind));
        assert_eq!(peaks("NVIDIA H200"), [Some(989.0), Some(67.0)]);
        assert_eq!(peaks("NVIDIA H100 PCIe"), [Some(756.0), Some(51.0)]);
        assert_eq!(peaks("NVIDIA H100 80GB HBM3"), [Some(989.0), Some(67.0)]);
        assert_eq!(peaks("NVIDIA A100-SXM4-80GB"), [Some(312.0), Some(19.5)]);
        assert_eq!(peaks("NVIDIA L40S"), [Some(362.0), Some(91.6)]);
        assert_eq!(peaks("NVIDIA L4"), [Some(121.0), Some(30.3)]);
        assert_eq!(peaks("Tesla V100-SXM2-16GB"), [None, Some(15.7)]);
        assert_eq!(peaks("Something Else 4000"), [None, None]);
    }

    #[test]
    fn scalars_have_the_rate_and_the_share_of_the_peak() {
        let meter = Meter { device: Device::Cpu, kind: Kind::Float, step_flops: 3e12, peak_flops: Some(120e12) };
        let scalars = meter.scalars(20, 2.0);
        assert_eq!(scalars[..2], [("device/tflops", 30.0), ("device/percent_of_peak", 25.0)]);
        assert!(scalars[2].0 == "device/memory_resident_gib" && scalars[2].1 > 0.001, "{scalars:?}");
        let unknown = Meter { peak_flops: None, ..meter };
        assert!(unknown.scalars(1, 1.0).iter().all(|(tag, _)| *tag != "device/percent_of_peak"));
    }
}
