//! Tests of the CUDA code on a real GPU. Many tests compare the results of the GPU with those of the CPU. In the CPU
//! variant, the tests are ignored. In the CUDA variant, they need a GPU.

mod graphs;
mod kernels;
mod numbers;

use tch::{Device, Kind, Tensor};

/// The device under test.
const GPU: Device = Device::Cuda(0);

/// The result of a check: a text with the measured values, or an error.
type CheckOutcome = anyhow::Result<String>;

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
    device_reports_its_properties in numbers;
    integers_uniforms_and_masks_equal_those_of_the_cpu in numbers;
    normals_equal_those_of_the_cpu in numbers;
    counter_draws_the_numbers_of_its_step in numbers;
    adamw_updates_as_on_the_cpu in numbers;
    squared_norm_equals_that_of_the_cpu_and_flags_nan in numbers;
    f32_product_is_more_exact_than_bf16 in numbers;
    compile_error_contains_the_log in kernels;
    wrong_kernel_arguments_are_refused in kernels;
    event_waits_for_its_stream_until_a_timeout in kernels;
    memory_statistics_follow_allocations in kernels;
    pinned_rows_are_not_reused in kernels;
    replay_equals_eager in graphs;
    torch_is_usable_after_failed_captures in graphs;
    hanging_replay_times_out in graphs;
    timeout_costs_less_than_20_us in graphs;
    nothing_leaks in graphs;
}

/// The largest absolute difference between the elements of `a` and `b`, computed in f64 on the CPU. NaN if any element
/// is NaN.
fn largest_difference(a: &Tensor, b: &Tensor) -> anyhow::Result<f64> {
    let wide = |tensor: &Tensor| tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double);
    Ok(wide(a).f_sub(&wide(b))?.abs().max().f_double_value(&[])?)
}

/// Resident memory of this process.
fn resident_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = text.split_whitespace().nth(1).unwrap_or("0").parse()?;
    Ok(pages * 4096)
}
