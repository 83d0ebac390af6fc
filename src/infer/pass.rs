//! Locates many blocks of images, one after the other.
//!
//! On a GPU, a pass collapses the network at the timesteps of the sampler ([`Collapsed`]) and captures all steps of a
//! block in one CUDA graph. The collapsed network and the graph are freed at the end of the pass. While the GPU samples
//! and decodes a block, the CPU aggregates the samples of the previous block.
//!
//! On the CPU, blocks are small, so the network is not collapsed. On a GPU, it is not collapsed if a bottleneck would
//! make the collapsed network larger. If the matrices A_t of all timesteps exceed the memory limit, they are formed
//! again at every step. The answers stay the same, so the limit may depend on the GPU.
// Letters in tensor names: i images of a block, v views, k samples of an image, n = i·k denoising chains, d dimensions
// of the code.

use locdiff_core::pulse;
use tch::{Kind, Tensor};

use super::engine::{Engine, Sampled};
use super::error::InferError;
use super::rows::ImageBlock;
use crate::diffusion::{CODE_SCALE, Chains, Predictions};
use crate::model::{Collapsed, ImageTerms, Workspace};
use crate::native::cuda::{self, Graph};
use crate::retrieval::ImageSamples;

/// The matrices A_t of all timesteps are kept if they fit into the free memory of the GPU divided by this number.
const KEPT_PART: u64 = 3;

/// A block of images with its answers.
#[derive(Debug)]
pub struct Located {
    /// The block.
    pub block: ImageBlock,
    /// The embeddings of the block on the device of the engine.
    pub embeddings_ive: Tensor,
    /// The samples and the answer of each image.
    pub samples: Vec<ImageSamples>,
    /// The unscaled codes of all samples, image by image, on the device of the engine.
    pub codes_nd: Tensor,
}

impl Engine {
    /// Locates the images of each block. All blocks must have the same size and number of views.
    pub fn locate_all<'a>(
        &'a self,
        mut blocks: impl Iterator<Item = Result<ImageBlock, InferError>> + 'a,
    ) -> impl Iterator<Item = Result<Located, InferError>> + 'a {
        let (mut chains, mut started) = (None, None);
        std::iter::from_fn(move || {
            let _without_gradients = tch::no_grad_guard();
            let mut start = || blocks.next().map(|block| self.start_block(block?, &mut chains)).transpose();
            let mut next = || -> Result<Option<Located>, InferError> {
                let current = started.take().unwrap_or_else(&mut start)?;
                let Some(Started { block, embeddings_ive, sampled }) = current else { return Ok(None) };
                if self.device().is_cuda() {
                    // An error is returned by the next call, after the answers of the current block.
                    started = Some(start());
                }
                let codes_nd = sampled.codes_nd.shallow_clone();
                let samples = self.finish(&block, sampled)?;
                pulse::advance();
                Ok(Some(Located { block, embeddings_ive, samples, codes_nd }))
            };
            next().transpose()
        })
    }

    /// Whether a pass collapses the network.
    pub fn collapses(&self) -> bool {
        self.device().is_cuda() && Collapsed::is_smaller(self.network.architecture())
    }

    /// Number of operations of the network's matrix products for one image. The time layers, the image layers and the
    /// formation of the matrices A_t are not counted.
    pub fn flops_per_image(&self) -> f64 {
        let predictions = if self.config.guidance > 0.0 { 2.0 } else { 1.0 };
        let steps = self.sampler.steps().len() as f64 * f64::from(self.config.samples) * predictions;
        steps * self.network.architecture().sampler_step_flops(self.collapses())
    }

    fn start_block<'a>(
        &'a self,
        block: ImageBlock,
        chains: &mut Option<CollapsedChains<'a>>,
    ) -> Result<Started, InferError> {
        let embeddings_ive = block.embeddings(self.device())?;
        if self.collapses() && chains.is_none() {
            *chains = Some(CollapsedChains::new(self, &block, self.keeps_matrices()?)?);
        }
        let (codes_nd, expected_id) = match chains {
            Some(chains) => chains.run(&block, &embeddings_ive)?,
            None => self.sample(&block, &embeddings_ive, |_, _, _| Ok(()))?,
        };
        pulse::advance();
        Ok(Started { sampled: self.start(codes_nd, &expected_id)?, block, embeddings_ive })
    }

    /// Whether the matrices A_t of all timesteps stay in memory.
    fn keeps_matrices(&self) -> Result<bool, InferError> {
        let steps = self.sampler.steps().len();
        let bytes_max = cuda::free_bytes(cuda::current_device()?)? / KEPT_PART;
        let bytes = Collapsed::kept_bytes(&self.network, steps);
        let [wanted, limit] = [bytes, bytes_max].map(|bytes| bytes as f64 / 1e9);
        let keeps = bytes <= bytes_max;
        let how = if keeps { "are kept" } else { "are formed again at every step" };
        tracing::info!(
            "sampling with collapsed modules: the matrices of {steps} timesteps take {wanted:.1} GB and {how} (limit \
             {limit:.1} GB)"
        );
        Ok(keeps)
    }
}

/// A block that is being sampled and decoded.
struct Started {
    block: ImageBlock,
    embeddings_ive: Tensor,
    sampled: Sampled,
}

/// The chains of a block, with the collapsed network. All tensors stay in place from block to block.
struct CollapsedChains<'a> {
    engine: &'a Engine,
    network: Collapsed,
    chains: Chains,
    /// For each chain, the row of the image terms, i32.
    rows_n: Tensor,
    image: ImageTerms,
    work: Workspace,
    /// For guidance: the terms without an image, the rows of these terms, and memory for a second prediction.
    no_image: Option<(ImageTerms, Tensor, Workspace)>,
    /// The captured steps, and for each image the mean of the predictions in the first step. `None` on the CPU, and
    /// before the first block.
    captured: Option<(Graph, Tensor)>,
}

impl<'a> CollapsedChains<'a> {
    /// Makes room for blocks like `block`.
    fn new(engine: &'a Engine, block: &ImageBlock, keeps: bool) -> Result<Self, InferError> {
        let (network, device) = (&engine.network, engine.device());
        let timesteps: Vec<usize> = engine.sampler.steps().iter().map(|(t, _)| *t).collect();
        let collapsed = Collapsed::new(network, &timesteps, keeps)?;
        let samples = engine.config.samples as usize;
        let count = block.size * samples;
        let dims = network.architecture().dims as usize;
        let no_embeddings =
            Tensor::f_zeros([(block.size * block.views) as i64, block.width as i64], (Kind::Half, device))?;
        let no_image = if engine.config.guidance > 0.0 {
            let terms = collapsed.image_terms(&network.prepare_unconditional()?)?;
            Some((terms, Tensor::f_zeros([count as i64], (Kind::Int, device))?, collapsed.workspace(count)?))
        } else {
            None
        };
        Ok(Self {
            engine,
            chains: Chains::new(block.size, samples, dims, (collapsed.kind(), device))?,
            rows_n: engine.rows_of_chains(block, Kind::Int)?,
            image: collapsed.image_terms(&network.prepare(&no_embeddings, None)?)?,
            work: collapsed.workspace(count)?,
            no_image,
            captured: None,
            network: collapsed,
        })
    }

    /// Samples the chains of a block. Returns the codes of the chains, and for each image the mean of the predictions
    /// in the first step. Codes and means are unscaled.
    fn run(&mut self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<(Tensor, Tensor), InferError> {
        let image = self.network.image_terms(&self.engine.network.prepare(embeddings_ive, None)?)?;
        self.image.copy_from(&image)?;
        let seeds = block.seeds(self.engine.seed);
        self.chains.start(seeds.clone())?;
        let expected_id = if self.engine.device().is_cuda() {
            if self.captured.is_none() {
                // The first step is taken once before the capture, because no code may be loaded during a capture.
                let _ = self.take_steps(1)?;
                self.chains.start(seeds)?;
                self.captured = Some(Graph::capture("sampler steps", || self.take_steps(usize::MAX))?);
            }
            let (graph, expected_id) = self.captured.as_mut().expect("the steps were captured above");
            graph.replay()?;
            expected_id.shallow_clone()
        } else {
            self.take_steps(usize::MAX)?
        };
        Ok((self.chains.codes().f_div_scalar(CODE_SCALE)?, expected_id.f_div_scalar(CODE_SCALE)?))
    }

    /// Takes at most `count` steps. Returns the mean prediction of the first step for each image, over its samples.
    fn take_steps(&self, count: usize) -> Result<Tensor, InferError> {
        let (x_nd, bias_d) = (self.chains.input(), self.network.head_bias());
        let mut expected_id = None;
        for (k, (_, update)) in self.engine.sampler.steps().iter().enumerate().take(count) {
            self.network.predict(k, x_nd, &self.image, &self.rows_n, &self.work)?;
            if let Some((terms, rows_n, work)) = &self.no_image {
                self.network.predict(k, x_nd, terms, rows_n, work)?;
            }
            let (conditional_nd, guidance) = (self.work.predicted(), self.engine.config.guidance);
            if k == 0 {
                let shape = [-1, i64::from(self.engine.config.samples), conditional_nd.size()[1]];
                let mean_id = conditional_nd.f_view(shape)?.f_mean_dim([1_i64].as_slice(), false, Kind::Float)?;
                expected_id = Some(mean_id.f_add(bias_d)?);
            }
            let unconditional = self.no_image.as_ref().map(|(_, _, work)| (work.predicted(), guidance));
            self.chains.step(k, *update, &Predictions { conditional_nd, unconditional, bias_d })?;
        }
        Ok(expected_id.expect("a sampler has at least one step"))
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "tests print what they measured")]
mod tests {
    use locdiff_core::config::{EvalConfig, Precision, RunConfig};
    use locdiff_core::geo::fibonacci_grid;
    use locdiff_core::random::{Philox, Stream};
    use tch::Device;

    use super::*;
    use crate::diffusion::Forward;
    use crate::infer::{Denoiser, Image};
    use crate::model::Timesteps;
    use crate::native::random::{RandomTensors, RowDraw, Step};
    use crate::shdd::Basis;

    const WIDTH: usize = 24;
    /// Number of embeddings: two views of each image.
    const VIEWS: usize = 12;

    fn normals(stream: u16, samples: usize, elements: usize, device: Device) -> Tensor {
        let draw = RowDraw { stream: Stream::Test(stream), step: Step::At(0), first_sample: 0, samples, elements };
        Philox::new(5).normal(Device::Cpu, draw).expect("the draw is in range").to_device(device)
    }

    /// The weights of a test.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum TestWeights {
        /// Random weights. The time layers, which are 0 at the start of a training, are random too.
        Random,
        /// Weights after a short training.
        Trained,
    }

    fn denoiser(degree: u32, precision: Precision, device: Device) -> Denoiser {
        let mut config = RunConfig::default();
        config.model.degree = degree;
        config.train.precision = precision;
        Denoiser::new(&config, WIDTH as u32, None, device).expect("the sizes are valid")
    }

    fn engine(denoiser: Denoiser, eval: &EvalConfig) -> Engine {
        Engine::new(denoiser, eval, 3, fibonacci_grid(2000)).expect("the settings are valid")
    }

    fn randomise(denoiser: &Denoiser) {
        let _without_gradients = tch::no_grad_guard();
        for (index, parameter) in denoiser.network.parameters().iter().enumerate() {
            if parameter.name.contains("time.2") {
                // Hidden layers have (L + 1)² numbers, so dividing by L + 1 gives scales and shifts the same size at
                // any degree.
                let size = 0.24 / f64::from(denoiser.degree + 1);
                let noise = normals(index as u16, 1, parameter.tensor.numel(), parameter.tensor.device()) * size;
                parameter.tensor.shallow_clone().copy_(&noise.view(parameter.tensor.size().as_slice()));
            }
        }
    }

    /// Trains the network to predict one place for each view of the tests. Each step follows the sign of the gradient.
    fn train(denoiser: &Denoiser) {
        const STEPS: u16 = 150;
        const COPIES: i64 = 16;
        let (network, device) = (&denoiser.network, denoiser.network.placement().device);
        let copied = |tensor: &Tensor| tensor.repeat_interleave_self_int(COPIES, 0, None::<i64>);
        let image = copied(&normals(0, VIEWS, WIDTH, device));
        let basis = Basis::new(denoiser.degree).expect("the degree is valid");
        let codes = copied(&basis.tensor(&fibonacci_grid(VIEWS), device).expect("the points are valid"));
        let forward = Forward::new(&denoiser.schedule, Kind::Float, device).expect("the schedule is valid");
        for step in 0..STEPS {
            let rows = codes.size()[0] as usize;
            let noise = normals(100 + step, rows, basis.dims(), device);
            let draw = RowDraw {
                stream: Stream::Test(99),
                step: Step::At(step.into()),
                first_sample: 0,
                samples: rows,
                elements: 1,
            };
            let bound = denoiser.schedule.timesteps() as u32;
            let t_b = Philox::new(5)
                .int(Device::Cpu, bound, draw)
                .expect("the draw is in range")
                .to_device(device)
                .view([-1]);
            let x = forward.noised(&codes, &t_b, &noise).expect("the shapes match");
            let time = network.time_table().expect("the weights are valid");
            let image = network.prepare(&image, None).expect("the shapes match");
            let predicted = network.forward(&x, Timesteps::Each(&t_b), &time, &image, None).expect("the shapes match");
            let loss = (predicted - &codes * CODE_SCALE).square().mean(Kind::Float);
            if step % 50 == 0 || step == STEPS - 1 {
                println!("step {step}: loss {:.4}", loss.double_value(&[]));
            }
            loss.backward();
            let _without_gradients = tch::no_grad_guard();
            for mut weight in network.parameters().tensors() {
                let mut gradient = weight.grad();
                let rate = 3e-4 * f64::from(STEPS - step) / f64::from(STEPS);
                let _ = weight.g_sub_(&(gradient.sign() * rate));
                let _ = gradient.zero_();
            }
        }
    }

    fn eval(sampler_steps: u32, guidance: f64, sampler_eta: f64) -> EvalConfig {
        EvalConfig { sampler_steps, guidance, sampler_eta, samples: 3, ..EvalConfig::default() }
    }

    fn relative(one: &Tensor, other: &Tensor) -> f64 {
        ((one - other).norm() / other.norm()).double_value(&[])
    }

    fn block() -> ImageBlock {
        let image = |row: u64| Image { row, id: row.to_string(), truth: None, views: vec![row as u8; 4 * WIDTH] };
        let images = (0..VIEWS as u64 / 2).map(image).collect();
        ImageBlock { first: 5, images, size: VIEWS / 2, views: 2, width: WIDTH }
    }

    /// The codes and the first predictions of the network itself.
    fn sampled(engine: &Engine) -> [Tensor; 2] {
        let embeddings_ive = normals(0, VIEWS, WIDTH, engine.device());
        let sampled = tch::no_grad(|| engine.sample(&block(), &embeddings_ive, |_, _, _| Ok(())));
        sampled.expect("the shapes match").into()
    }

    /// The codes and the first predictions of the collapsed network.
    fn sampled_collapsed(engine: &Engine, keeps: bool) -> [Tensor; 2] {
        tch::no_grad(|| {
            let mut chains = CollapsedChains::new(engine, &block(), keeps).expect("the network is not split");
            let _ = chains.run(&block(), &normals(9, VIEWS, WIDTH, engine.device())).expect("the shapes match");
            // The second block must not depend on the first.
            chains.run(&block(), &normals(0, VIEWS, WIDTH, engine.device())).expect("the shapes match").into()
        })
    }

    fn check(device: Device, degree: u32, weights: TestWeights) {
        for (steps, guidance, eta) in [(20, 0.0, 1.0), (20, 1.5, 0.0), (200, 0.0, 1.0)] {
            let denoiser = denoiser(degree, Precision::F32, device);
            match weights {
                TestWeights::Random => randomise(&denoiser),
                TestWeights::Trained => train(&denoiser),
            }
            let engine = engine(denoiser, &eval(steps, guidance, eta));
            let wanted = sampled(&engine);
            let [kept, formed] = [true, false].map(|keeps| {
                let got = sampled_collapsed(&engine, keeps);
                [0, 1].map(|index| relative(&got[index], &wanted[index]))
            });
            let [codes, first] = kept;
            println!(
                "L = {degree}, {weights:?} weights, {steps} steps, guidance {guidance}: codes differ by {codes:.1e} of \
                 their norm, first predictions by {first:.1e}"
            );
            assert!(kept.iter().all(|difference| *difference < 1e-4), "{steps} steps: {kept:?}");
            assert_eq!(kept, formed, "{steps} steps: the memory limit changes the codes");
        }
    }

    /// Checks that the collapsed network in f16 is nearer to the network in f32 than the network in bf16 is.
    fn check_16_bits(device: Device, degree: u32, steps: &[u32]) {
        for &steps in steps {
            let [wide, narrow] = [Precision::F32, Precision::Bf16].map(|precision| denoiser(degree, precision, device));
            train(&wide);
            let weights = narrow.network.parameters().tensors().into_iter().zip(wide.network.parameters().tensors());
            tch::no_grad(|| weights.for_each(|(mut own, other)| own.copy_(&other)));
            let [wide, narrow] = [wide, narrow].map(|denoiser| engine(denoiser, &eval(steps, 0.0, 1.0)));
            let (wanted, bf16, f16) = (sampled(&wide), sampled(&narrow), sampled_collapsed(&narrow, true));
            for (index, name) in ["codes", "first predictions"].into_iter().enumerate() {
                let [of_bf16, of_f16] = [&bf16, &f16].map(|got| relative(&got[index], &wanted[index]));
                println!(
                    "L = {degree}, {steps} steps: {name} differ from f32 by {of_bf16:.1e} in bf16 and {of_f16:.1e} in f16"
                );
                assert!(of_f16 < of_bf16, "{steps} steps, {name}: bf16 {of_bf16}, f16 {of_f16}");
            }
        }
    }

    #[test]
    fn collapsed_codes_equal_those_of_the_network() {
        check(Device::Cpu, 7, TestWeights::Random);
        check_16_bits(Device::Cpu, 7, &[20]);
    }

    #[test]
    fn products_too_large_for_f16_are_computed_in_bf16() {
        let narrow = denoiser(7, Precision::Bf16, Device::Cpu);
        let kind = |denoiser: &Denoiser| {
            Collapsed::new(&denoiser.network, &[0, 100, 199], true).expect("the network can be collapsed").kind()
        };
        assert_eq!(kind(&narrow), Kind::Half);
        tch::no_grad(|| {
            for parameter in narrow.network.parameters().iter().filter(|own| own.name == "down2.x.weight") {
                let _ = parameter.tensor.shallow_clone().f_mul_scalar_(1e5).expect("the weight can be scaled");
            }
        });
        assert_eq!(kind(&narrow), Kind::BFloat16);
        let [codes, first] = sampled_collapsed(&engine(narrow, &eval(20, 0.0, 1.0)), true);
        assert!(bool::try_from(codes.isfinite().all()).expect("one value"), "a code is not finite");
        assert!(bool::try_from(first.isfinite().all()).expect("one value"), "a first prediction is not finite");
    }

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    fn collapsed_codes_on_the_gpu_equal_those_of_the_network() {
        cuda::set_device(0).expect("there is a GPU");
        // At degree 7 the widths are not multiples of 8.
        check(Device::Cuda(0), 7, TestWeights::Random);
        check(Device::Cuda(0), 47, TestWeights::Trained);
        check_16_bits(Device::Cuda(0), 47, &[20, 200]);
    }

    /// Checks that the codes of an image are the same, to the bit, at any position in a block and with other images.
    fn check_positions(device: Device, degree: u32) {
        let denoiser = denoiser(degree, Precision::Bf16, device);
        randomise(&denoiser);
        let engine = engine(denoiser, &eval(20, 0.0, 1.0));
        let (size, samples) = (VIEWS as i64 / 2, i64::from(engine.config.samples));
        let embeddings_ive = normals(0, VIEWS, WIDTH, device);
        let by_image = |rows: &Tensor, each: i64| rows.view([size, each, -1]);
        let (forward, mut backward) = (block(), block());
        backward.images.reverse();
        let mut others = block();
        others.images[1..].iter_mut().for_each(|image| image.views.fill(77));
        let reversed_ive = by_image(&embeddings_ive, 2).flip([0]).view([VIEWS as i64, WIDTH as i64]);
        let others_ive = Tensor::cat(&[embeddings_ive.narrow(0, 0, 2), normals(8, VIEWS - 2, WIDTH, device)], 0);
        let network = |block: &ImageBlock, embeddings_ive: &Tensor| -> Tensor {
            let sampled = tch::no_grad(|| engine.sample(block, embeddings_ive, |_, _, _| Ok(())));
            by_image(&sampled.expect("the shapes match").0, samples)
        };
        let collapsed = |block: &ImageBlock, embeddings_ive: &Tensor| -> Tensor {
            let mut chains = CollapsedChains::new(&engine, block, true).expect("the network is not split");
            let sampled = tch::no_grad(|| chains.run(block, embeddings_ive));
            by_image(&sampled.expect("the shapes match").0, samples)
        };
        let check = |name: &str, codes: &dyn Fn(&ImageBlock, &Tensor) -> Tensor| {
            let wanted = codes(&forward, &embeddings_ive);
            assert!(codes(&backward, &reversed_ive).flip([0]).equal(&wanted), "{name}: the position changes a code");
            let alone = codes(&others, &others_ive).get(0);
            assert!(alone.equal(&wanted.get(0)), "{name}: other images change a code");
            assert!(!wanted.get(0).equal(&wanted.get(1)), "{name}: two images have the same codes");
        };
        check("network", &network);
        check("collapsed network", &collapsed);
    }

    #[test]
    fn codes_do_not_depend_on_position_or_company() {
        check_positions(Device::Cpu, 7);
    }

    #[test]
    #[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
    fn codes_on_the_gpu_do_not_depend_on_position_or_company() {
        cuda::set_device(0).expect("there is a GPU");
        check_positions(Device::Cuda(0), 7);
        check_positions(Device::Cuda(0), 47);
    }

    #[test]
    fn narrow_bottleneck_is_not_collapsed() {
        let mut config = RunConfig::default();
        let is_smaller = |config: &RunConfig| {
            Collapsed::is_smaller(&crate::model::Architecture::new(&config.model, 768, config.diffusion.timesteps))
        };
        assert!(is_smaller(&config));
        config.model.bottleneck = 64;
        assert!(!is_smaller(&config));
    }
}
