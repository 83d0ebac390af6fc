//! Network, loss and sampler give the same tensors as the PyTorch reference in `tests/golden/make_reference.py`.
//!
//! The tolerance is 1e-4 of each tensor's norm, because both sides compute in f32 and add numbers in different orders.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, a for the anchors, and
//! d for the dimensions of a code.

use locdiff::diffusion::{Forward, NoiseSchedule, Sampler};
use locdiff::loss::{Inputs, Loss};
use locdiff::model::{Architecture, CsUnet, Placement, Timesteps};
use locdiff_core::config::{AutoOr, DiffusionConfig, LossConfig, ModelConfig, Precision, Schedule};
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use crate::model::support::{ChainError, Golden, assert_close, named};

const TOLERANCE: f64 = 1e-4;
const DEGREE: u32 = 4;

fn network(golden: &Golden) -> CsUnet {
    let config = ModelConfig { degree: DEGREE, ..ModelConfig::default() };
    let width = golden.get("image").size()[1] as u32;
    let placement = Placement::on(Device::Cpu, Precision::F32);
    let mut network = CsUnet::new(Architecture::new(&config, width, 200), placement, Philox::new(0))
        .expect("the architecture is valid");
    network.parameters_mut().load(&golden.with_prefix("weight.")).expect("the names and shapes match");
    network
}

fn schedule() -> NoiseSchedule {
    NoiseSchedule::new(
        &DiffusionConfig { schedule: Schedule::Cosine, ..DiffusionConfig::default() },
        &ModelConfig::default(),
    )
}

#[test]
fn schedule_equals_the_reference() {
    let golden = Golden::read();
    let alphas_bar = Tensor::from_slice(schedule().alphas_bar()).to_kind(Kind::Float);
    let difference = ((alphas_bar - golden.get("alphas_bar")) / golden.get("alphas_bar")).abs().max().double_value(&[]);
    // Both schedules are computed in f64 and rounded to f32 at the end.
    assert!(difference < 1.2e-7, "the schedules differ by {difference:e}, wanted less than 1.2e-7");
}

#[test]
fn loss_and_gradients_equal_the_reference() {
    let golden = Golden::read();
    let network = network(&golden);
    let [x0_bd, t_b, noise_bd] = ["x0", "t", "noise"].map(|name| golden.get(name));
    let x_bd =
        Forward::new(&schedule(), Kind::Float, Device::Cpu).and_then(|forward| forward.noised(x0_bd, t_b, noise_bd));
    let (time, image) = (
        network.time_table().expect("the architecture is valid"),
        network.prepare(golden.get("image"), None).expect("the embeddings have the right width"),
    );
    let predicted_bd = network
        .forward(&x_bd.expect("the shapes match"), Timesteps::Each(t_b), &time, &image, None)
        .expect("the shapes match");
    assert_close(&predicted_bd, golden.get("predicted"), TOLERANCE, "prediction");

    let kl_weight = AutoOr::Value(golden.get("kl_weight").double_value(&[]));
    let loss = Loss::new(&LossConfig { kl_weight, ..LossConfig::default() }, DEGREE, Precision::F32);
    let basis_ad = golden.get("basis");
    let inputs = Inputs { predicted_bd: &predicted_bd, truth_bd: x0_bd, basis_ad, anchors_split: None };
    let losses = loss.compute(inputs).expect("the shapes match");
    assert_close(&losses.total, golden.get("loss"), TOLERANCE, "loss");
    losses.total.backward();
    for (name, parameter) in named(&network) {
        assert_close(&parameter.grad(), golden.get(&format!("grad.{name}")), TOLERANCE, &name);
    }
}

#[test]
fn sampling_chains_equal_the_reference() {
    let golden = Golden::read();
    let network = network(&golden);
    let (time, image) = (
        network.time_table().expect("the architecture is valid"),
        network.prepare(golden.get("image"), None).expect("the embeddings have the right width"),
    );
    let noise = golden.get("chain.noise");
    for (eta, name) in [(0.0, "chain.eta0"), (1.0, "chain.eta1")] {
        let want = golden.get(name);
        let sampler = Sampler::few_steps(&schedule(), want.size()[0] as usize, eta).expect("the chain is valid");
        let (mut grid, mut seen) = (Vec::new(), Vec::new());
        let last = sampler.run_with(
            |draw| Ok(noise.get(draw as i64)),
            |x, t| {
                grid.push(t as i64);
                seen.push(x.shallow_clone());
                Ok::<_, ChainError>(network.forward(x, Timesteps::All(t), &time, &image, None)?)
            },
        );
        seen.push(last.expect("the shapes match"));
        assert!(
            Tensor::from_slice(&grid).equal(golden.get("grid")),
            "the timesteps of the chain differ from the reference: {grid:?}"
        );
        for (step, x) in seen[1..].iter().enumerate() {
            assert_close(x, &want.get(step as i64), TOLERANCE, &format!("{name}, after step {step}"));
        }
    }
}
