//! Tests that kernels, streams, events and memory behave as documented.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tch::{Device, Kind, Tensor};

use super::{CheckOutcome, GPU};
use crate::native::cuda::{self, CudaEvent, CudaStream, Priority, WaitError, with_stream};
use crate::native::host::{HostRows, pinned_bytes};
use crate::native::nvrtc::{Arg, Kernel};
use crate::native::row_pool::RowPlaces;

/// Two kernels. `add` adds a multiple of one tensor to another, and `spin` keeps one thread busy for a given time.
const SOURCE: &str = r#"
extern "C" __global__ void add(float* out, const float* in, int factor, unsigned count) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] += factor * in[i];
}
extern "C" __global__ void spin(long long nanoseconds, int* done) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
  atomicAdd(done, 1);
}
"#;

/// The kernel `spin`, with a counter of the launches that have ended.
pub(super) struct Spin {
    kernel: Kernel,
    done: Tensor,
}

impl Spin {
    pub(super) fn new() -> anyhow::Result<Self> {
        let done = Tensor::f_zeros([1], (Kind::Int, GPU))?;
        Ok(Self { kernel: Kernel::compile("spin", SOURCE, &[])?, done })
    }

    pub(super) fn launch(&self, time: Duration) -> anyhow::Result<()> {
        let nanoseconds = i64::try_from(time.as_nanos())?;
        Ok(self.kernel.launch([1; 3], [1; 3], &[Arg::I64(nanoseconds), Arg::Tensor(&self.done)])?)
    }

    /// Waits for the current stream, and returns the number of launches that have ended.
    pub(super) fn count(&self) -> anyhow::Result<i64> {
        Ok(self.done.f_int64_value(&[0])?)
    }
}

pub(super) fn compile_error_contains_the_log() -> CheckOutcome {
    let broken = "extern \"C\" __global__ void broken(float* out) { out[0] = no_such_name; }";
    let Err(error) = Kernel::compile("broken", broken, &[]) else { anyhow::bail!("a broken kernel was compiled") };
    ensure!(error.text.contains("no_such_name") && error.text.contains("broken.cu(1)"), "the log is missing: {error}");
    let Err(missing) = Kernel::compile("no_such_kernel", SOURCE, &[]) else {
        anyhow::bail!("a missing kernel was found")
    };
    let first_line = error.text.lines().nth(1).unwrap_or_default();
    Ok(format!("log: `{first_line}`; missing function: `{missing}`"))
}

pub(super) fn wrong_kernel_arguments_are_refused() -> CheckOutcome {
    let add = Kernel::compile("add", SOURCE, &[])?;
    let (out, addend) = (Tensor::ones([1000], (Kind::Float, GPU)), Tensor::full([1000], 2.0, (Kind::Float, GPU)));
    let launch = |target: &Tensor, rest: &[Arg<'_>]| {
        let mut arguments = vec![Arg::Tensor(target), Arg::Tensor(&addend)];
        arguments.extend(rest);
        add.launch([4, 1, 1], [256, 1, 1], &arguments)
    };
    let rest = [Arg::I32(3), Arg::U32(1000)];
    launch(&out, &rest)?;
    ensure!(out.f_eq(7.0)?.all().f_int64_value(&[])? == 1, "the kernel did not compute 1 + 3 × 2 = 7");
    let refused = |result: Result<(), crate::native::NativeError>| result.err().map(|error| error.to_string());
    let cpu = refused(launch(&out.to_device(Device::Cpu), &rest)).context("a CPU tensor was accepted")?;
    let gaps = Tensor::zeros([100, 20], (Kind::Float, GPU)).tr();
    let gaps = refused(launch(&gaps, &rest)).context("a transposed tensor was accepted")?;
    let short = refused(launch(&out, &rest[..1])).context("a missing argument was accepted")?;
    let wide = refused(launch(&out, &[Arg::I64(3), rest[1]])).context("a 64-bit argument was accepted for an int")?;
    ensure!(cpu.contains("cpu") && gaps.contains("contiguous"), "wrong error texts: `{cpu}`, `{gaps}`");
    Ok(format!("refused: `{short}`, `{wide}`"))
}

pub(super) fn event_waits_for_its_stream_until_a_timeout() -> CheckOutcome {
    let spin = Spin::new()?;
    let main = CudaStream::current()?;
    let side = CudaStream::from_pool(Priority::High)?;
    ensure!(side != main, "the pool handed out the current stream");
    let (mut end, mut unrelated) = (CudaEvent::new()?, CudaEvent::new()?);
    unrelated.record(&main)?;
    unrelated.synchronize()?;
    let inside = with_stream(side, || -> anyhow::Result<CudaStream> {
        spin.launch(Duration::from_millis(50))?;
        end.record(&side)?;
        Ok(CudaStream::current()?)
    })??;
    ensure!(inside == side && CudaStream::current()? == main, "the current stream was not set or not restored");
    ensure!(unrelated.query()? && !end.query()?, "the side stream finished early, or the main stream did not finish");
    let limit = Duration::from_millis(5);
    ensure!(
        end.wait_for(limit) == Err(WaitError::TimedOut(limit)),
        "a wait of 5 ms for a kernel of 50 ms did not time out"
    );
    end.synchronize()?;
    ensure!(spin.count()? == 1, "the host did not wait for the kernel");
    let before = Instant::now();
    end.wait_for(limit)?;
    Ok(format!("a wait for a finished event took {:?}", before.elapsed()))
}

pub(super) fn memory_statistics_follow_allocations() -> CheckOutcome {
    const BYTES: u64 = 64 << 20;
    cuda::synchronize()?;
    let before = cuda::memory(0)?;
    let held = Tensor::f_zeros([BYTES as i64], (Kind::Uint8, GPU))?;
    let during = cuda::memory(0)?;
    drop(held);
    let after = cuda::memory(0)?;
    ensure!(
        during.allocated_bytes == before.allocated_bytes + BYTES,
        "the statistics did not grow by {BYTES} bytes: {before:?} then {during:?}"
    );
    ensure!(after.allocated_bytes == before.allocated_bytes, "not all bytes were freed: {before:?} then {after:?}");
    ensure!(after.allocated_peak_bytes >= during.allocated_bytes, "the peak fell: {during:?} then {after:?}");
    ensure!(during.reserved_bytes >= during.allocated_bytes, "fewer bytes reserved than allocated: {during:?}");
    cuda::empty_cache()?;
    let emptied = cuda::memory(0)?;
    ensure!(emptied.reserved_bytes < during.reserved_bytes, "the cache was not emptied: {emptied:?}");
    Ok(format!("{during:?}"))
}

/// When `HostRows::reuse` gets a pinned tensor, a copy from its memory to the GPU may still be running. Only torch's
/// allocator knows when the copy is done, so `reuse` must not accept pinned memory.
pub(super) fn pinned_rows_are_not_reused() -> CheckOutcome {
    for pinned in [false, true] {
        let (mut rows, mut places) = (HostRows::new(1, 4, pinned)?, RowPlaces::new(1, 8));
        rows.assign(&mut places, 0);
        places.write(&[0; 8]);
        places.finish();
        let is_reused = HostRows::reuse(rows.into_tensor(), 1, 4).is_some();
        ensure!(is_reused != pinned, "got reused = {is_reused} for rows with pinned = {pinned}");
    }
    let bytes = pinned_bytes(6)?;
    ensure!(
        bytes.kind() == Kind::Uint8 && bytes.size() == [6] && bytes.is_pinned(GPU),
        "wanted 6 pinned bytes, got {bytes:?}"
    );
    Ok("the memory of pinned rows goes back to torch's allocator".to_owned())
}
