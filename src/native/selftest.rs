//! Checks of the CUDA parts on the GPU at hand, for machines where the tests themselves cannot be built.
//!
//! Each check catches its own panic: one that fails does not hide the others. A check that breaks the CUDA context
//! (an illegal address) fails those after it too; the first failure is the cause.

mod graphs;
mod kernels;
mod numbers;

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use super::cuda;
use super::cuda::panic_text;

/// The device that is checked.
const GPU: Device = Device::Cuda(0);

/// One finished check.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// What is claimed.
    pub name: &'static str,
    /// Whether it holds.
    pub ok: bool,
    /// What was measured, or what went wrong.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
}

/// The detail of a check that holds.
type Outcome = anyhow::Result<String>;
type Body = fn() -> Outcome;

/// Every check, in the order in which they are run.
const CHECKS: &[(&str, Body)] = &[
    ("device has properties", numbers::device_has_properties),
    ("philox integers equal the CPU to the bit", numbers::philox_integers),
    ("philox normals equal the CPU", numbers::philox_normals),
    ("philox follows a counter on the device", numbers::philox_counter),
    ("fused AdamW equals the CPU", numbers::fused_adamw),
    ("norm, clip and flag equal the CPU", numbers::norm_and_flag),
    ("bf16 GEMM with f32 result beats bf16", numbers::gemm),
    ("kernel compile error gives the log", kernels::compile_error_gives_the_log),
    ("kernel arguments are checked", kernels::arguments_are_checked),
    ("streams and events order and time", kernels::streams_and_events),
    ("memory statistics move", kernels::memory_statistics),
    ("replayed steps equal eager steps, with CUDA in another thread", graphs::replay_equals_eager),
    ("failed captures leave torch usable", graphs::failed_captures),
    ("replay that hangs is timed out", graphs::replay_times_out),
    ("timeout costs less than 20 us a step", graphs::timeout_is_cheap),
    ("10,000 replays and launches leak nothing", graphs::nothing_leaks),
];

/// Runs every check on device 0.
pub fn run_cuda() -> Vec<Check> {
    if cuda::device_count() == 0 {
        let detail = match cuda::set_device(0) {
            Err(error) => error.to_string(),
            Ok(()) => "no visible GPU".to_owned(),
        };
        return vec![Check { name: "a GPU is visible", ok: false, detail, seconds: 0.0 }];
    }
    CHECKS.iter().map(|(name, body)| run(name, *body)).collect()
}

fn run(name: &'static str, body: impl FnOnce() -> Outcome) -> Check {
    let start = Instant::now();
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(body));
    let (ok, detail) = match outcome {
        Ok(Ok(detail)) => (true, detail),
        Ok(Err(error)) => (false, format!("{error:#}")),
        Err(panic) => (false, format!("panicked: {}", panic_text(panic.as_ref()))),
    };
    Check { name, ok, detail, seconds: start.elapsed().as_secs_f64() }
}

/// The largest absolute difference, computed in f64 on the CPU; NaN anywhere gives NaN.
fn largest_difference(a: &Tensor, b: &Tensor) -> anyhow::Result<f64> {
    let wide = |tensor: &Tensor| tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double);
    Ok(wide(a).f_sub(&wide(b))?.abs().max().f_double_value(&[])?)
}

/// Memory of this process that is in RAM.
fn resident_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = text.split_whitespace().nth(1).unwrap_or("0").parse()?;
    Ok(pages * 4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_reports_its_own_failure() {
        assert!(run("holds", || Ok("fine".to_owned())).ok);
        let failed = run("fails", || anyhow::bail!("not so"));
        assert_eq!((failed.ok, failed.detail.as_str()), (false, "not so"));
        let panicked = run("panics", || panic!("out of {}", "order"));
        assert_eq!((panicked.ok, panicked.detail.as_str()), (false, "panicked: out of order"));
    }

    #[test]
    fn every_check_holds_or_says_that_there_is_no_gpu() {
        for check in run_cuda() {
            assert!(check.ok || cuda::device_count() == 0, "{}: {}", check.name, check.detail);
            if !cuda::is_built() {
                assert!(check.detail.contains("this build has no CUDA"), "{}", check.detail);
            }
        }
    }
}
