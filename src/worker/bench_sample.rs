//! `bench sample`: times the location of images with random weights and random embeddings. The times include all work
//! of an evaluation without retrieval: the preparation of the sampler, the copies to and from the device, sampling,
//! decoding and aggregation. Retrieval is timed on its own: the image head, and the search for the best gallery point.

use std::collections::HashMap;
use std::time::Instant;

use locdiff_core::geo::fibonacci_grid;
use locdiff_core::protocol::{SampleBench, SampleBenched, StepProfile, WorkerSlot};
use locdiff_core::pulse;
use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use crate::geoclip::{EMBEDDING_WIDTH, FEATURE_WIDTH, GeoclipHead};
use crate::infer::{Denoiser, Engine, Image, ImageBlock, block_images};
use crate::native::cuda;
use crate::native::random::{RandomTensors, RowDraw, Step};
use crate::retrieval::{Gallery, QueryHead, Retriever};
use crate::shards::ELEMENT_BYTES;
use crate::train::{ceilings, embedding_width, peak_gib, profile_steps, spread};

/// Number of places among which samples are decoded: the size of GeoCLIP's gallery.
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
    let kind = denoiser.network.placement().compute_kind();
    let engine = Engine::new(denoiser, &config.eval, config.train.seed, fibonacci_grid(ANCHORS))?;
    let size = block_images(device, config.eval.samples);
    let images = random_images(size, width)?;
    locate(&engine, &images, size, width)?;
    let prepare_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut times_ms = locate(&engine, &images, job.images as usize, width)?;
    let s_per_image = begun.elapsed().as_secs_f64() / f64::from(job.images);
    let [ms_lo, ms_per_image, ms_hi] = spread(&mut times_ms);
    let (anchors, peak_gib) = (ANCHORS as u64, peak_gib(device)?);
    let path = if engine.collapses() { "collapsed" } else { "eager" }.to_owned();
    let tflops = engine.flops_per_image() / s_per_image / 1e12;
    let steps = (job.images as usize).div_ceil(size) as u64 * u64::from(config.eval.sampler_steps);
    let profile = if job.profile {
        let work = || locate(&engine, &images, job.images as usize, width).map(drop);
        Some(StepProfile { is_graph: engine.collapses(), rows: profile_steps(device, steps, work)? })
    } else {
        None
    };
    // Collapsed networks multiply f16 instead of bf16 numbers.
    let kind = if engine.collapses() && kind == Kind::BFloat16 { Kind::Half } else { kind };
    drop((engine, images));
    let retrieval = job.retrieval.then(|| time_retrieval(job.images as usize, size, device, slot.threads as usize));
    let retrieval_s_per_image = retrieval.transpose()?;
    let ceilings = ceilings(device, kind)?;
    Ok(SampleBenched {
        path,
        s_per_image,
        ms_per_image,
        ms_lo,
        ms_hi,
        prepare_s,
        tflops,
        anchors,
        retrieval_s_per_image,
        peak_gib,
        ceilings,
        profile,
    })
}

/// Times GeoCLIP's retrieval with a random gallery and a head with random weights. Returns the time per image, seconds.
/// `count` images are located in blocks of `size` images, after a first block that is not timed.
fn time_retrieval(count: usize, size: usize, device: Device, threads: usize) -> anyhow::Result<f64> {
    let random = |stream: u16, rows: usize, columns: usize| -> anyhow::Result<Tensor> {
        let (stream, step) = (Stream::Test(stream), Step::At(0));
        let draw = RowDraw { stream, step, first_sample: 0, samples: rows, elements: columns };
        Ok(Philox::new(0).normal(Device::Cpu, draw)?.to_kind(Kind::Float))
    };
    let gallery_gw = random(1, ANCHORS, EMBEDDING_WIDTH)?;
    let gallery = Gallery::of_embeddings("random".to_owned(), fibonacci_grid(ANCHORS), gallery_gw)?;
    let retriever = Retriever::new(&gallery, device, threads)?;
    let weights = HashMap::from([
        ("logit_scale".to_owned(), Tensor::from(1.0_f32)),
        ("image.0.weight".to_owned(), random(2, FEATURE_WIDTH, FEATURE_WIDTH)?),
        ("image.0.bias".to_owned(), random(3, 1, FEATURE_WIDTH)?.f_view([-1])?),
        ("image.2.weight".to_owned(), random(4, EMBEDDING_WIDTH, FEATURE_WIDTH)?),
        ("image.2.bias".to_owned(), random(5, 1, EMBEDDING_WIDTH)?.f_view([-1])?),
    ]);
    let head = QueryHead::of(GeoclipHead::new(&weights, device)?, device);
    let images_ive = random(6, size, FEATURE_WIDTH)?.f_view([size as i64, 1, FEATURE_WIDTH as i64])?;
    let locate = |images: usize| -> anyhow::Result<()> {
        let queries = head.queries(&images_ive.f_narrow(0, 0, images as i64)?)?;
        retriever.score(&queries, &vec![Vec::new(); images], 1, None)?;
        Ok(())
    };
    locate(size)?;
    let begun = Instant::now();
    (0..count).step_by(size).try_for_each(|first| {
        pulse::advance();
        locate(size.min(count - first))
    })?;
    Ok(begun.elapsed().as_secs_f64() / count as f64)
}

/// `count` images with random embeddings.
fn random_images(count: usize, width: usize) -> anyhow::Result<Vec<Image>> {
    let draw = RowDraw { stream: Stream::Test(0), step: Step::At(0), first_sample: 0, samples: count, elements: width };
    let embeddings_ie = Philox::new(0).normal(Device::Cpu, draw)?.to_kind(Kind::Half);
    let mut bytes = vec![0; count * width * ELEMENT_BYTES];
    embeddings_ie.f_copy_data_u8(&mut bytes, count * width)?;
    let image = |(row, views): (u64, &[u8])| Image { row, id: row.to_string(), truth: None, views: views.to_vec() };
    Ok((0..).zip(bytes.chunks_exact(width * ELEMENT_BYTES)).map(image).collect())
}

/// Locates `count` images in blocks that repeat `images`. Returns the time per image of each block, in milliseconds.
fn locate(engine: &Engine, images: &[Image], count: usize, width: usize) -> anyhow::Result<Vec<f64>> {
    let size = images.len();
    let blocks = (0..count).step_by(size).map(|first| {
        let images = images[..size.min(count - first)].to_vec();
        Ok(ImageBlock { first: first as u64, images, size, views: 1, width })
    });
    let (mut times_ms, mut begun) = (Vec::new(), Instant::now());
    for located in engine.locate_all(blocks) {
        located?;
        times_ms.push(begun.elapsed().as_secs_f64() * 1e3 / size as f64);
        begun = Instant::now();
    }
    Ok(times_ms)
}
