//! The CUDA parts against the CPU, on a real GPU. Ignored in the CPU variant; in the CUDA variant they need a GPU.

mod graphs;
mod kernels;
mod numbers;

use tch::{Device, Kind, Tensor};

/// The device that is checked.
const GPU: Device = Device::Cuda(0);

/// What a check measured, or what went wrong.
type Outcome = anyhow::Result<String>;

macro_rules! checks {
    ($($check:ident in $module:ident;)*) => {
        $(
            #[test]
            #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
            fn $check() {
                let detail = $module::$check().unwrap_or_else(|error| panic!("{error:#}"));
                println!("{}: {detail}", stringify!($check));
            }
        )*
    };
}

checks! {
    device_has_properties in numbers;
    philox_integers in numbers;
    philox_normals in numbers;
    philox_counter in numbers;
    fused_adamw in numbers;
    norm_and_flag in numbers;
    gemm in numbers;
    compile_error_gives_the_log in kernels;
    arguments_are_checked in kernels;
    streams_and_events in kernels;
    memory_statistics in kernels;
    pinned_rows_are_not_reused in kernels;
    replay_equals_eager in graphs;
    failed_captures in graphs;
    replay_times_out in graphs;
    timeout_is_cheap in graphs;
    nothing_leaks in graphs;
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
