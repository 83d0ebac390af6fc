//! Compares the explicit engine with autograd on a real GPU: losses, every gradient and every updated tensor. In the
//! CPU variant, these tests are ignored.

use std::time::Duration;

use locdiff_core::config::{AutoOr, KlDirection, Precision, RunConfig};
use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::comm::remote_keys::tests::own_keys;
use crate::comm::{Backend, Layout, Rendezvous};
use crate::native::cuda;
use crate::native::random::{RandomTensors, RowDraw, Step};
use crate::shards::Position;

const WIDTH: u32 = 24;
/// Number of batches over which errors are summed.
const BATCHES: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(60);

/// A communicator of one rank on the first GPU.
fn alone() -> Communicator {
    cuda::set_device(0).expect("the machine has a GPU");
    let rendezvous = Rendezvous {
        rank: 0,
        layout: Layout::new(1, 1).expect("one rank is a valid layout"),
        keys: own_keys(),
        backend: Backend::Nccl { device: 0 },
        connect_timeout: PATIENCE,
        collective_timeout: PATIENCE,
    };
    Communicator::connect(rendezvous).expect("one rank connects to itself")
}

fn small(degree: u32) -> RunConfig {
    let mut config = RunConfig::default();
    config.model.degree = degree;
    config.model.dropout = 0.0;
    config.diffusion.timesteps = 20;
    config.loss.anchors = 128;
    config.train.global_batch = 100;
    config.train.precision = Precision::F32;
    config.train.learning_rate = 1e-3;
    config
}

/// The configurations to compare, each with a name. They cover every term of the loss, every option of the network, and
/// widths that are not multiples of four.
fn cases() -> Vec<(&'static str, RunConfig)> {
    let with = |degree: u32, change: &dyn Fn(&mut RunConfig)| {
        let mut config = small(degree);
        change(&mut config);
        config
    };
    vec![
        ("plain", small(7)),
        ("odd widths", small(8)),
        (
            "all losses",
            with(7, &|config| {
                (config.loss.l1_weight, config.loss.cosine_weight) = (0.3, 0.2);
                config.loss.kl = KlDirection::Forward;
            }),
        ),
        ("no KL", with(7, &|config| config.loss.kl_weight = AutoOr::Value(0.0))),
        (
            "only KL",
            with(7, &|config| {
                (config.loss.kl_weight, config.loss.l2_weight) = (AutoOr::Value(1.0), 0.0);
            }),
        ),
        ("dropout", with(7, &|config| config.model.dropout = 0.3)),
        ("dropped conditions", with(7, &|config| config.diffusion.condition_drop = 0.4)),
        ("micro-batches", with(7, &|config| config.train.micro_batch = 32)),
        ("bottleneck", with(7, &|config| config.model.bottleneck = 12)),
        ("clipped", with(7, &|config| config.train.clip_norm = 1e-3)),
        ("low-pass filter", with(9, &|config| config.model.low_pass_dims = 40)),
    ]
}

fn filter_of(config: &RunConfig) -> Option<Filter> {
    let kept = config.model.low_pass_dims;
    let dims = config.model.dims() as usize;
    (kept > 0).then(|| Filter::from_indices(&(0..kept).collect::<Vec<_>>(), dims).expect("the indices are in range"))
}

fn batch(config: &RunConfig, step: u64, width: u32) -> Batch {
    let rows = config.train.global_batch as usize;
    let draw = |stream: u16, elements: usize| RowDraw {
        stream: Stream::Test(stream),
        step: Step::At(step),
        first_sample: 0,
        samples: rows,
        elements,
    };
    let philox = Philox::new(5);
    let image_be = philox.normal(Device::Cuda(0), draw(0, width as usize)).expect("the draw is in range");
    let uniform = philox.uniform(Device::Cpu, draw(1, 2)).expect("the draw is in range");
    let uniform = Vec::<f64>::try_from(uniform.to_kind(Kind::Double).view([-1])).expect("the tensor is on the CPU");
    let coordinates = [
        uniform.iter().step_by(2).map(|share| 178.0 * share - 89.0).collect(),
        uniform.iter().skip(1).step_by(2).map(|share| 360.0 * share - 180.0).collect(),
    ];
    let position = Position { seed: 0, epoch: 0, step, global_batch: config.train.global_batch };
    Batch::of(image_be.to_kind(Kind::Half), coordinates, position, 0..rows as u64)
}

/// The gradient of each parameter.
fn gradients(work: &Work) -> Vec<Tensor> {
    match &work.engine {
        StepEngine::Autograd(_) => work.method.parameters().iter().map(|parameter| parameter.tensor.grad()).collect(),
        StepEngine::Explicit(engine) => engine.gradients_of_parameters(),
    }
}

/// The norm of the difference divided by the norm of `wanted`.
fn relative(got: &Tensor, wanted: &Tensor) -> f64 {
    let wide = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double);
    let (got, wanted) = (wide(got), wide(wanted));
    let norm = wanted.norm().double_value(&[]);
    (got - wanted).norm().double_value(&[]) / if norm > 0.0 { norm } else { 1.0 }
}

fn numbers() -> StepNumbers {
    StepNumbers { learning_rate: 1e-4, average_weight: 0.9, requests: Requests::default() }
}

/// Replaces the weights, for example to give two networks the same weights.
fn load(work: &mut Work, weights: &[Tensor]) {
    let _without_gradients = tch::no_grad_guard();
    for (parameter, weight) in work.method.parameters().tensors().iter().zip(weights) {
        parameter.shallow_clone().copy_(weight);
    }
    work.weights_changed().expect("the weights can be rounded");
}

/// Random values for all parameters, because some initial weights are zero.
fn random_weights(work: &Work) -> Vec<Tensor> {
    tch::manual_seed(1);
    let random = |tensor: &Tensor| {
        let fan = tensor.size().last().copied().unwrap_or(1) as f64;
        Tensor::randn(tensor.size(), (Kind::Float, tensor.device())) * (0.7 / fan.sqrt())
    };
    work.method.parameters().tensors().iter().map(random).collect()
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn explicit_step_in_f32_equals_autograd() {
    let ranks = alone();
    for (name, config) in cases() {
        let make = |explicit| {
            Work::with_engine(&config, WIDTH, filter_of(&config), &ranks, explicit).expect("the configuration is valid")
        };
        let (mut autograd, mut explicit) = (make(None), make(Some(Kind::Float)));
        let weights = random_weights(&autograd);
        let mut worst: f64 = 0.0;
        for step in 0..3 {
            let batch = batch(&config, step, WIDTH);
            let mut reports = Vec::new();
            let mut found = Vec::new();
            for work in [&mut autograd, &mut explicit] {
                if step == 0 {
                    load(work, &weights);
                }
                let average_weight = 1.0 - (step + 1) as f64 / (step + 10) as f64;
                work.take(step, &batch, &StepNumbers { average_weight, ..numbers() }).expect("the batch is valid");
                let losses = work.compute_gradients(false).expect("the gradient can be computed");
                found.push(gradients(work).iter().map(Tensor::copy).collect::<Vec<_>>());
                let report = work.conclude(losses).expect("the weights can be updated");
                reports.push(Vec::<f64>::try_from(report.numbers.to_device(Device::Cpu)).expect("the numbers are f64"));
            }
            for (index, parameter) in autograd.method.parameters().iter().enumerate() {
                let error = relative(&found[1][index], &found[0][index]);
                assert!(error < 1e-4, "{name}, step {step}: the gradient of {} differs by {error}", parameter.name);
                worst = worst.max(error);
            }
            // The last number is the largest logit. Noise in the smallest gradients changes it through AdamW.
            for (got, wanted) in reports[1].iter().zip(&reports[0]).take(12) {
                let error = (got - wanted).abs() / wanted.abs().max(1e-12);
                assert!(error < 1e-4, "{name}, step {step}: got {:?}, wanted {:?}", reports[1], reports[0]);
            }
        }
        let lists =
            |work: &Work| [work.method.parameters().tensors(), work.ema.iter().map(Tensor::shallow_clone).collect()];
        for (kind, (got, wanted)) in ["weights", "average"].iter().zip(lists(&explicit).iter().zip(&lists(&autograd))) {
            for (got, wanted) in got.iter().zip(wanted) {
                // AdamW's first updates are nearly the signs of the gradients, and the engines may give a tiny gradient
                // different signs.
                let error = relative(got, wanted);
                assert!(error < 1e-3, "{name}: {kind} differ by {error}");
            }
        }
        println!("{name}: the largest relative difference of a gradient is {worst:.1e}");
    }
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn explicit_bf16_gradients_are_not_further_from_f32_than_those_of_autograd() {
    let ranks = alone();
    let mut config = RunConfig::default();
    config.model.degree = 47;
    config.train.global_batch = 512;
    config.model.dropout = 0.0;
    let f32_config = {
        let mut config = config.clone();
        config.train.precision = Precision::F32;
        config
    };
    let make = |config: &RunConfig, explicit| {
        Work::with_engine(config, 768, None, &ranks, explicit).expect("the configuration is valid")
    };
    let (mut exact, mut autograd) = (make(&f32_config, None), make(&config, None));
    let mut explicit = make(&config, Some(Kind::BFloat16));
    for steps in [0, 500] {
        for step in 0..steps {
            explicit.take(step, &batch(&config, step % 16, 768), &numbers()).expect("the batch is valid");
            explicit.run().expect("the step runs");
        }
        let rounded: Vec<Tensor> = explicit
            .method
            .parameters()
            .tensors()
            .iter()
            .map(|weight| weight.detach().to_kind(Kind::BFloat16).to_kind(Kind::Float))
            .collect();
        // One batch would not be enough: the gradients of some biases are small differences of large sums.
        let mut squares = vec![[0.0; 3]; explicit.method.parameters().iter().len()];
        for index in 0..BATCHES {
            let batch = batch(&config, steps + index, 768);
            let mut found = Vec::new();
            for work in [&mut exact, &mut autograd, &mut explicit] {
                load(work, &rounded);
                work.take(steps + index, &batch, &numbers()).expect("the batch is valid");
                work.compute_gradients(false).expect("the gradient can be computed");
                found.push(gradients(work).iter().map(|gradient| gradient.to_kind(Kind::Double)).collect::<Vec<_>>());
            }
            for (tensor, sums) in squares.iter_mut().enumerate() {
                let square = |of: &Tensor| of.square().sum(Kind::Double).double_value(&[]);
                sums[0] += square(&found[0][tensor]);
                sums[1] += square(&(&found[1][tensor] - &found[0][tensor]));
                sums[2] += square(&(&found[2][tensor] - &found[0][tensor]));
            }
        }
        let mut worse = Vec::new();
        for (index, parameter) in explicit.method.parameters().iter().enumerate() {
            let [whole, of_autograd, of_explicit] = squares[index].map(f64::sqrt);
            let [of_autograd, of_explicit] = [of_autograd, of_explicit].map(|error| error / whole.max(1e-300));
            println!("{steps} steps, {}: autograd {of_autograd:.2e}, explicit {of_explicit:.2e}", parameter.name);
            if of_explicit > of_autograd {
                worse.push(format!("{} {:.3}", parameter.name, of_explicit / of_autograd));
            }
        }
        assert!(worse.is_empty(), "after {steps} steps, these gradients are further from f32: {worse:?}");
    }
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn two_explicit_runs_have_the_same_bits() {
    let ranks = alone();
    let config = {
        let mut config = small(9);
        config.model.dropout = 0.1;
        config.train.precision = Precision::Auto;
        config
    };
    let run = || {
        let mut work = Work::new(&config, WIDTH, None, &ranks).expect("the configuration is valid");
        assert_eq!(work.path(), "explicit");
        for step in 0..20 {
            work.take(step, &batch(&config, step, WIDTH), &numbers()).expect("the batch is valid");
            work.run().expect("the step runs");
        }
        work.replicated()
    };
    assert!(run().iter().zip(&run()).all(|(first, second)| first.equal(second)), "two equal runs differ");
}
