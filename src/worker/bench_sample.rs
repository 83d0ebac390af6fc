//! `bench sample`: times the location of images with random weights and random embeddings. The times include sampling,
//! decoding and aggregation, as in an evaluation.

use std::time::Instant;

use locdiff_core::geo::fibonacci_grid;
use locdiff_core::protocol::{SampleBench, SampleBenched, WorkerSlot};
use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind};

use crate::infer::{BLOCK_IMAGES, Denoiser, Engine, ImageBlock};
use crate::native::cuda;
use crate::native::random::{RandomTensors, RowDraw, Step};
use crate::train::{embedding_width, peak_gib, spread};

/// Number of places among which samples are decoded: that of GeoCLIP's gallery.
const ANCHORS: usize = 100_000;

/// Times the location of images.
pub(super) fn run(job: &SampleBench, slot: &WorkerSlot) -> anyhow::Result<SampleBenched> {
    let device = slot.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize));
    if let Device::Cuda(index) = device {
        cuda::set_device(index)?;
    }
    let config = &job.config;
    let width = embedding_width(config) as usize;
    let begun = Instant::now();
    let denoiser = Denoiser::new(config, width as u32, None, device)?;
    let engine = Engine::new(denoiser, &config.eval, config.train.seed, fibonacci_grid(ANCHORS))?;
    locate(&engine, 0, width)?;
    let prepare_s = begun.elapsed().as_secs_f64();
    let blocks = (job.images as usize).div_ceil(BLOCK_IMAGES).max(1);
    let begun = Instant::now();
    let mut times_ms = Vec::new();
    for block in 1..=blocks {
        let begun = Instant::now();
        locate(&engine, block as u64, width)?;
        times_ms.push(begun.elapsed().as_secs_f64() * 1e3 / BLOCK_IMAGES as f64);
    }
    let s_per_image = begun.elapsed().as_secs_f64() / (blocks * BLOCK_IMAGES) as f64;
    let [ms_lo, ms_per_image, ms_hi] = spread(&mut times_ms);
    let (path, anchors, peak_gib) = ("eager".to_owned(), ANCHORS as u64, peak_gib(device)?);
    Ok(SampleBenched { path, s_per_image, ms_per_image, ms_lo, ms_hi, prepare_s, anchors, peak_gib })
}

/// Locates one block of random images. Returns after the answers have been copied to main memory.
fn locate(engine: &Engine, block: u64, width: usize) -> anyhow::Result<()> {
    let draw = RowDraw {
        stream: Stream::Test(0),
        step: Step::At(block),
        first_sample: 0,
        samples: BLOCK_IMAGES,
        elements: width,
    };
    let embeddings_ie = Philox::new(0).normal(engine.device(), draw)?.to_kind(Kind::Half);
    let block = ImageBlock { first: block * BLOCK_IMAGES as u64, images: Vec::new(), views: 1, width };
    engine.locate(&block, &embeddings_ie, |_, _, _| Ok(()))?;
    Ok(())
}
