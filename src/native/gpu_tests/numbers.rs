//! Tests that random numbers, optimiser updates and norms agree on GPU and CPU, and that matrix products have the
//! expected precision.

use anyhow::ensure;
use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::{CheckOutcome, GPU, largest_difference};
use crate::native::cuda;
use crate::native::gemm::mm_f32;
use crate::native::optim::{AdamW, Moments, UpdateInputs, clip_divisor, not_finite, squared_norm};
use crate::native::random::{DeviceCounter, RandomTensors, RowDraw, Step};

const PHILOX: Philox = Philox::new(0x0123_4567_89ab_cdef);

/// Four draws with 1.3 million numbers in total. Together they use every field of the counter. A Philox block has four
/// numbers. Only the first draw has rows whose length is a multiple of four.
fn draws() -> [RowDraw<'static>; 4] {
    let rows = |stream, step, first_sample, samples, elements| RowDraw {
        stream,
        step: Step::At(step),
        first_sample,
        samples,
        elements,
    };
    [
        rows(Stream::Noise, 0, 0, 128, 2304),
        rows(Stream::Dropout(7), 123_456, 4096, 200, 2011),
        rows(Stream::Sampler, 0x12_3456_789a, 0xab_cdef_0123, 97, 4099),
        rows(Stream::Timestep, 99, 512, 200_000, 1),
    ]
}

pub(super) fn device_reports_its_properties() -> CheckOutcome {
    cuda::set_device(0)?;
    let properties = cuda::properties(0)?;
    ensure!(
        properties.multiprocessors > 0 && properties.total_bytes > 1 << 30,
        "impossible properties: {properties:?}"
    );
    ensure!(cuda::properties(999).is_err(), "device 999 has properties");
    Ok(format!("{properties:?}"))
}

pub(super) fn integers_uniforms_and_masks_equal_those_of_the_cpu() -> CheckOutcome {
    let mut compared = 0;
    for rows in draws() {
        let both = |draw: &dyn Fn(Device) -> anyhow::Result<Tensor>| -> anyhow::Result<bool> {
            Ok(draw(GPU)?.to_device(Device::Cpu) == draw(Device::Cpu)?)
        };
        ensure!(both(&|device| Ok(PHILOX.int(device, 1000, rows)?))?, "integers differ: {rows:?}");
        ensure!(both(&|device| Ok(PHILOX.uniform(device, rows)?))?, "uniforms differ: {rows:?}");
        ensure!(both(&|device| Ok(PHILOX.mask(device, 0.9, rows)?))?, "masks differ: {rows:?}");
        compared += rows.samples * rows.elements;
    }
    Ok(format!("{compared} integers, {compared} uniforms and {compared} mask values are equal"))
}

pub(super) fn normals_equal_those_of_the_cpu() -> CheckOutcome {
    let (mut largest, mut unequal, mut compared) = (0.0_f64, 0, 0);
    for rows in draws() {
        let (gpu, cpu) = (PHILOX.normal(GPU, rows)?.to_device(Device::Cpu), PHILOX.normal(Device::Cpu, rows)?);
        let relative = (&gpu - &cpu).abs() / (cpu.abs() + 1.0);
        largest = largest.max(relative.max().f_double_value(&[])?);
        unequal += gpu.f_ne_tensor(&cpu)?.sum(Kind::Int64).f_int64_value(&[])?;
        compared += rows.samples * rows.elements;
    }
    ensure!(largest <= 1e-6, "normals differ by {largest:e}");
    Ok(format!("{unequal} of {compared} normals differ, by {largest:e} at most"))
}

pub(super) fn counter_draws_the_numbers_of_its_step() -> CheckOutcome {
    let mut counter = DeviceCounter::new(GPU, 41)?;
    counter.set(42)?;
    let draw = |step| {
        let rows = RowDraw { stream: Stream::Noise, step, first_sample: 3, samples: 16, elements: 100 };
        PHILOX.normal(GPU, rows)
    };
    let (by_counter, by_host) = (draw(Step::Counter(&counter))?, draw(Step::At(42))?);
    ensure!(by_counter == by_host, "a counter at 42 does not give the random numbers of step 42");
    ensure!(by_counter != draw(Step::At(41))?, "steps 41 and 42 draw the same numbers");
    ensure!(counter.get()? == 42, "the counter is {}, wanted 42", counter.get()?);
    Ok("a counter at 42 gives the random numbers of step 42".to_owned())
}

pub(super) fn adamw_updates_as_on_the_cpu() -> CheckOutcome {
    const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.01 };
    let run = |device: Device| -> anyhow::Result<Vec<Tensor>> {
        let ramp = Tensor::arange(4096, (Kind::Float, Device::Cpu)) / 4096.0 - 0.5;
        let params =
            vec![ramp.view([64, 64]).copy().to_device(device), (ramp.narrow(0, 0, 77) * 3.0).to_device(device)];
        let mut moments = Moments::zeros(&params);
        let scalar = |value: f32| Tensor::from(value).to_device(device);
        let (rate, divisor, keep, skip) = (scalar(1e-3), scalar(2.0), scalar(0.0), scalar(1.0));
        for step in 0..30 {
            // The gradients depend only on the step and are computed on the CPU for both devices, so that differences
            // between the parameters do not affect later gradients.
            let wave = (&ramp * (3 * step) + 0.3).sin();
            // Both gradients are copies of parts of `wave`. Without the copies they would share memory on the CPU, and
            // the update, which divides gradients in place, would divide some numbers twice.
            let grads = [wave.view([64, 64]).copy().to_device(device), wave.narrow(0, 9, 77).copy().to_device(device)];
            let found_inf = Some(if step % 10 == 9 { &skip } else { &keep });
            let control = UpdateInputs { learning_rate: &rate, grad_divisor: Some(&divisor), found_inf };
            ADAMW.update(&params, &grads, &mut moments, control)?;
        }
        let step = moments.step.f_double_value(&[])?;
        ensure!(step == 27.0, "the step is {step} after 27 updates and 3 skipped updates");
        Ok(params.into_iter().chain(moments.exp_avgs).chain(moments.exp_avg_sqs).collect())
    };
    let mut largest = 0.0_f64;
    for (gpu, cpu) in run(GPU)?.iter().zip(&run(Device::Cpu)?) {
        largest = largest.max(largest_difference(gpu, cpu)?);
    }
    // The limit allows an error of 1.2e-7, the spacing of f32 numbers between 1 and 2, for each of the thirty updates.
    ensure!(largest < 30.0 * 1.2e-7, "parameters or moments differ by {largest:e}");
    Ok(format!("30 updates, 3 of them skipped, differ by {largest:e} at most"))
}

pub(super) fn squared_norm_equals_that_of_the_cpu_and_flags_nan() -> CheckOutcome {
    let cpu = [
        Tensor::linspace(-1.0, 2.0, 10_007, (Kind::Float, Device::Cpu)),
        Tensor::linspace(0.0, 1.0, 513, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16),
    ];
    let gpu = cpu.each_ref().map(|tensor| tensor.to_device(GPU));
    let (cpu_square, gpu_square) = (squared_norm(&cpu)?, squared_norm(&gpu)?);
    let relative = largest_difference(&gpu_square, &cpu_square)? / cpu_square.f_double_value(&[])?;
    ensure!(relative < 1e-4, "squared norms differ by {relative:e}");
    ensure!(
        gpu_square.device() == GPU && clip_divisor(&gpu_square, 1.0)?.device() == GPU,
        "the norm or the divisor is not on the GPU"
    );
    let flag = |norm: &Tensor| -> anyhow::Result<f64> { Ok(not_finite(norm)?.f_double_value(&[])?) };
    ensure!(flag(&gpu_square)? == 0.0, "finite gradients are flagged");
    let broken = [gpu[0].copy(), gpu[1].full_like(f64::NAN)];
    ensure!(flag(&squared_norm(&broken)?)? == 1.0, "NaN is not flagged");
    Ok(format!("squared norms differ by {relative:e}"))
}

pub(super) fn f32_product_is_more_exact_than_bf16() -> CheckOutcome {
    let factor = |stream, samples, elements| -> anyhow::Result<Tensor> {
        let rows = RowDraw { stream, step: Step::At(0), first_sample: 0, samples, elements };
        Ok(PHILOX.normal(GPU, rows)?.to_kind(Kind::BFloat16))
    };
    let (a, b) = (factor(Stream::Test(0), 512, 1024)?, factor(Stream::Test(1), 1024, 256)?);
    let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
    let scale = exact.abs().max().f_double_value(&[])?;
    let error = |product: &Tensor| -> anyhow::Result<f64> { Ok(largest_difference(product, &exact)? / scale) };
    let wide = mm_f32(&a, &b)?;
    ensure!(wide.kind() == Kind::Float, "the result is {:?}, wanted Float", wide.kind());
    let (wide_error, narrow_error) = (error(&wide)?, error(&a.matmul(&b))?);
    ensure!(
        wide_error < 1e-3 && wide_error * 10.0 < narrow_error,
        "relative error {wide_error:e} with an f32 result, {narrow_error:e} with a bf16 result"
    );
    let a = a.set_requires_grad(true);
    let loss = mm_f32(&a, &b)?.sum(Kind::Float);
    let grads = Tensor::f_run_backward(&[loss], &[&a], false, false)?;
    let row_sums = b.sum_dim_intlist([1_i64].as_slice(), false, Kind::Float).expand([512, 1024], false);
    let grad_error = largest_difference(&grads[0], &row_sums)? / row_sums.abs().max().f_double_value(&[])?;
    ensure!(
        grads[0].kind() == Kind::BFloat16 && grad_error < 0.01,
        "the gradient is not bf16 or is off by {grad_error:e}"
    );
    Ok(format!("relative errors: f32 result {wide_error:e}, bf16 result {narrow_error:e}, gradient {grad_error:e}"))
}
