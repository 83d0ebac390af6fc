//! A random tensor has the same numbers as a slice that the core crate fills. The GPU kernels, compiled for the host,
//! give the same numbers as Rust. Without a GPU, every call that needs one returns an error.

use std::io::Write;
use std::process::{Command, Stdio};

use locdiff::native::cuda::{self, CudaEvent, CudaStream, Graph};
use locdiff::native::nvrtc::Kernel;
use locdiff::native::random::{DeviceCounter, RandomTensors, RowDraw, Step};
use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Kind, Tensor};

const PHILOX: Philox = Philox::new(0xfeed_0123_4567_89ab);

fn rows(step: Step<'_>) -> RowDraw<'_> {
    RowDraw { stream: Stream::Noise, step, first_sample: 5, samples: 3, elements: 7 }
}

#[test]
fn tensors_have_the_same_numbers_as_slices() {
    let draw = Draw { stream: Stream::Noise, step: 9, first_sample: 5, elements: 7 };
    let mut normals = vec![0.0; 21];
    PHILOX.fill_normal(draw, &mut normals).expect("the draw is in range");
    let tensor = PHILOX.normal(Device::Cpu, rows(Step::At(9))).expect("the draw is in range");
    assert_eq!((tensor.size(), tensor.kind()), (vec![3, 7], Kind::Float));
    assert_eq!(tensor, Tensor::from_slice(&normals).view([3, 7]));
    assert_eq!(PHILOX.uniform(Device::Cpu, rows(Step::At(9))).expect("the draw is in range").kind(), Kind::Float);
    assert_eq!(PHILOX.int(Device::Cpu, 5, rows(Step::At(9))).expect("the draw is in range").kind(), Kind::Int64);
    assert_eq!(PHILOX.mask(Device::Cpu, 0.5, rows(Step::At(9))).expect("the draw is in range").kind(), Kind::Bool);
    assert!(PHILOX.int(Device::Cpu, 0, rows(Step::At(9))).is_err());
    assert!(PHILOX.mask(Device::Cpu, 1.5, rows(Step::At(9))).is_err());
}

#[test]
fn counter_draws_the_numbers_of_its_step_on_the_cpu() {
    let mut counter = DeviceCounter::new(Device::Cpu, 8).expect("the step is in range");
    counter.set(9).expect("the step is in range");
    assert_eq!(counter.get().expect("the counter is on the CPU"), 9);
    let by_counter = PHILOX.normal(Device::Cpu, rows(Step::Counter(&counter))).expect("the draw is in range");
    assert_eq!(by_counter, PHILOX.normal(Device::Cpu, rows(Step::At(9))).expect("the draw is in range"));
    assert!(counter.set(1 << 40).is_err());
}

/// Compiles the source of the GPU kernels as C++, runs the threads one after another, and compares the output with
/// Rust. This tests everything except the GPU itself.
#[test]
fn kernel_source_run_on_the_host_equals_rust() {
    let folder = tempfile::tempdir().expect("the temporary folder is writable");
    let program = folder.path().join("philox_host");
    let root = env!("CARGO_MANIFEST_DIR");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let compiled = Command::new(compiler)
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-I", &format!("{root}/src/native/kernels"), "-o"])
        .args([program.as_os_str(), format!("{root}/tests/data_plane/native/philox_host.cpp").as_ref()])
        .status();
    assert!(compiled.expect("the compiler that built the shim is installed").success());
    let draws = [
        (Draw { stream: Stream::Noise, step: 0, first_sample: 0, elements: 96 }, 40, 0),
        (Draw { stream: Stream::Dropout(7), step: 0x12_3456_789a, first_sample: 0xab_cdef_0123, elements: 1003 }, 9, 5),
        (Draw { stream: Stream::Timestep, step: 77, first_sample: 9, elements: 1 }, 333, 77),
    ];
    for (draw, samples, counter) in draws {
        let count = samples * draw.elements;
        let run = |kernel: &str, extra: u64| host_kernel(&program, kernel, draw, samples, counter, extra);
        let mut floats = vec![0_f32; count];
        PHILOX.fill_uniform(draw, &mut floats).expect("the draw is in range");
        assert_eq!(run("fill_uniform", 0), bytes(&floats, |value| value.to_ne_bytes()), "wrong numbers for {draw:?}");
        PHILOX.fill_normal(draw, &mut floats).expect("the draw is in range");
        assert_eq!(run("fill_normal", 0), bytes(&floats, |value| value.to_ne_bytes()), "wrong numbers for {draw:?}");
        let mut integers = vec![0_i64; count];
        PHILOX.fill_int(draw, 1000, &mut integers).expect("the draw is in range");
        assert_eq!(run("fill_int", 1000), bytes(&integers, |value| value.to_ne_bytes()), "wrong numbers for {draw:?}");
        let mut mask = vec![false; count];
        PHILOX.fill_mask(draw, 0.25, &mut mask).expect("the draw is in range");
        assert_eq!(run("fill_mask", 1 << 30), bytes(&mask, |value| [u8::from(value)]), "wrong numbers for {draw:?}");
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], convert: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| convert(*value)).collect()
}

/// Runs one kernel and returns its output. The kernel adds the value of its counter to its argument `step`. The counter
/// is set to `counter` and the argument to `draw.step - counter`, so that their sum is `draw.step`.
fn host_kernel(
    program: &std::path::Path,
    kernel: &str,
    draw: Draw,
    samples: usize,
    counter: u64,
    extra: u64,
) -> Vec<u8> {
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program was just compiled");
    let stream = draw.stream.id().expect("the stream has an id");
    let mut input = child.stdin.take().expect("standard input is piped");
    let (seed, step) = (PHILOX.seed, draw.step - counter);
    let line =
        format!("{kernel} {seed} {stream} {counter} {step} {} {samples} {} {extra}", draw.first_sample, draw.elements);
    writeln!(input, "{line}").expect("the program reads its input");
    drop(input);
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success(), "the program failed for the input {line}");
    output.stdout
}

#[test]
fn without_a_gpu_every_call_returns_an_error() {
    if tch::Cuda::device_count() > 0 {
        return;
    }
    let mut refusals = vec![
        cuda::set_device(0).expect_err("the machine has no GPU").to_string(),
        cuda::current_device().expect_err("the machine has no GPU").to_string(),
        cuda::properties(0).expect_err("the machine has no GPU").to_string(),
        cuda::memory(0).expect_err("the machine has no GPU").to_string(),
        CudaStream::current().expect_err("the machine has no GPU").to_string(),
        Kernel::compile("x", "", &[]).expect_err("the machine has no GPU").to_string(),
    ];
    let graph =
        Graph::capture("x", || -> Result<(), std::convert::Infallible> { Ok(()) }).expect_err("the machine has no GPU");
    refusals.push(std::error::Error::source(&graph).expect("the error has a cause").to_string());
    if !cfg!(locdiff_cuda) {
        refusals.push(CudaEvent::new().expect_err("the build has no CUDA").to_string());
        for refusal in &refusals {
            assert!(
                refusal.contains("this build has no CUDA; rebuild with `LOCDIFF_CUDA=1 make build`"),
                "wrong error text: {refusal}"
            );
        }
    }
}
