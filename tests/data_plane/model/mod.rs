//! Tests of the network on one rank.

mod golden;
mod gpu;
mod split;
pub(crate) mod support;

use locdiff::model::{Architecture, Conditioned, CsUnet, DropoutDraws, Placement, Timesteps};
use locdiff::native::random::Step;
use locdiff_core::config::{ModelConfig, Precision};
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use crate::model::support::{assert_close, named, normals};

const EMBEDDING: u32 = 6;
const TIMESTEPS: u32 = 10;

fn config(degree: u32) -> ModelConfig {
    ModelConfig { degree, dropout: 0.3, ..ModelConfig::default() }
}

fn placement() -> Placement {
    Placement { kind: Kind::Double, ..Placement::on(Device::Cpu, Precision::F32) }
}

/// A small network in f64. No parameter is 0, so every parameter affects the output.
fn network() -> CsUnet {
    let architecture = Architecture::new(&config(3), EMBEDDING, TIMESTEPS);
    let mut network = CsUnet::new(architecture, placement(), Philox::new(1)).expect("the architecture is valid");
    let moved = |(index, (name, tensor)): (usize, (String, Tensor))| {
        (name, tensor.detach() + normals(100 + index as i64, &tensor.size(), Kind::Double) * 0.05)
    };
    let weights: Vec<_> = named(&network).into_iter().enumerate().map(moved).collect();
    network.parameters_mut().load(&weights).expect("the shapes match");
    network
}

fn image(rows: i64) -> Tensor {
    normals(5, &[rows, i64::from(EMBEDDING)], Kind::Double)
}

fn code(rows: i64) -> Tensor {
    normals(6, &[rows, 16], Kind::Double)
}

fn predict(
    network: &CsUnet,
    x: &Tensor,
    t: Timesteps<'_>,
    image: &Conditioned,
    dropout: Option<DropoutDraws<'_>>,
) -> Tensor {
    let time = network.time_table().expect("the architecture is valid");
    network.forward(x, t, &time, image, dropout).expect("the shapes match").detach()
}

#[test]
fn parameter_count_equals_that_of_the_configuration() {
    let count = |config: &ModelConfig| Architecture::new(config, 768, 200).parameter_count() as u64;
    assert_eq!(count(&config(47)), 75_870_720);
    for degree in [4, 23, 47] {
        for (bottleneck, width_factor) in [(0, 1.0), (32, 1.0), (0, 0.5), (128, 1.7)] {
            let config = ModelConfig { bottleneck, width_factor, ..config(degree) };
            assert_eq!(
                count(&config),
                config.parameters(768),
                "wrong parameter count for degree {degree}, bottleneck {bottleneck}, width factor {width_factor}"
            );
            let filtered = ModelConfig { low_pass_dims: 17, ..config };
            assert_eq!(Architecture::new(&filtered, 768, 200).dims, 17);
            assert_eq!(
                count(&filtered),
                filtered.parameters(768),
                "17 dimensions: wrong parameter count for degree {degree}, bottleneck {bottleneck}, width factor {width_factor}"
            );
        }
    }
}

#[test]
fn initial_weights_follow_the_recipe() {
    let architecture = Architecture::new(&config(7), 32, TIMESTEPS);
    let network = CsUnet::new(architecture, Placement::on(Device::Cpu, Precision::F32), Philox::new(1))
        .expect("the architecture is valid");
    let named = named(&network);
    let get = |name: &str| {
        &named.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("the network has no parameter {name}")).1
    };
    let largest = |name: &str| get(name).abs().max().double_value(&[]);
    for (name, bound) in
        [("down1.x.weight", 6.0 / 64.0), ("up2.out.weight", 6.0 / 32.0), ("up1.image.weight", 1.0 / 32.0)]
    {
        let bound = f64::sqrt(bound);
        assert!(
            largest(name) <= bound * (1.0 + 1e-6) && largest(name) > 0.95 * bound,
            "{name}: the largest value is {}, wanted about {bound}",
            largest(name)
        );
        assert!(get(name).mean(Kind::Double).double_value(&[]).abs() < 0.1 * bound, "{name}: the mean is not near 0");
    }
    for name in ["down2.time.2.weight", "down2.time.2.bias", "out.bias"] {
        assert!(largest(name) == 0.0, "{name} is not 0");
    }
    assert!((get("out.weight").std(true).double_value(&[]) - 0.02).abs() < 0.001);
    assert!(named.iter().all(|(_, tensor)| tensor.requires_grad() && tensor.is_leaf()));
    assert_eq!(named[0].0, "down1.x.weight");
    assert_eq!(named[61].0, "out.bias");
    assert_eq!(named.len(), 62);
}

#[test]
fn shared_timestep_equals_the_same_timestep_for_each_row() {
    let network = network();
    let image = network.prepare(&image(4), None).expect("the embeddings have the right width");
    let each = predict(&network, &code(4), Timesteps::Each(&Tensor::from_slice(&[7_i64; 4])), &image, None);
    assert_close(&predict(&network, &code(4), Timesteps::All(7), &image, None), &each, 1e-14, "prediction");
    let other = predict(&network, &code(4), Timesteps::All(2), &image, None);
    assert!((other - each).norm().double_value(&[]) > 1e-3, "the timestep has no effect");
    let time = network.time_table().expect("the architecture is valid");
    let error = network.forward(&code(4), Timesteps::All(10), &time, &image, None).expect_err("the last timestep is 9");
    assert_eq!(error.to_string(), "timestep 10 is not in 0..10");
    let t_b = Tensor::from_slice(&[0_i64, 9, 10, -1]);
    let error = network
        .forward(&code(4), Timesteps::Each(&t_b), &time, &image, None)
        .expect_err("two timesteps are outside the table");
    assert_eq!(error.to_string(), "row 2: timestep 10 is not in 0..10");
}

#[test]
fn image_terms_can_be_prepared_once_for_an_ensemble() {
    let network = network();
    let twice = network
        .prepare(&image(2), None)
        .expect("the embeddings have the right width")
        .repeated(2)
        .expect("the count is positive");
    let rows = image(2).repeat_interleave_self_int(2, 0, None);
    let want = predict(
        &network,
        &code(4),
        Timesteps::All(3),
        &network.prepare(&rows, None).expect("the embeddings have the right width"),
        None,
    );
    assert_close(&predict(&network, &code(4), Timesteps::All(3), &twice, None), &want, 1e-14, "prediction");
}

#[test]
fn dropped_condition_gives_the_unconditional_prediction() {
    let network = network();
    let kept = Tensor::from_slice(&[true, false]).unsqueeze(1);
    let mixed = network.prepare(&image(2), Some(&kept)).expect("the embeddings have the right width");
    let mixed = predict(&network, &code(2), Timesteps::All(3), &mixed, None);
    let conditional = network.prepare(&image(2), None).expect("the embeddings have the right width");
    let conditional = predict(&network, &code(2), Timesteps::All(3), &conditional, None);
    let unconditional = network.prepare_unconditional().expect("the embeddings have the right width");
    let unconditional = predict(&network, &code(2), Timesteps::All(3), &unconditional, None);
    assert_close(&mixed.get(0), &conditional.get(0), 1e-13, "kept");
    assert_close(&mixed.get(1), &unconditional.get(1), 1e-13, "dropped");
    // If the condition of an image is dropped, the embedding of the image does not affect the prediction.
    let broken = image(2);
    let _ = broken.get(1).fill_(f64::NAN);
    let broken = network.prepare(&broken, Some(&kept)).expect("the embeddings have the right width");
    let broken = predict(&network, &code(2), Timesteps::All(3), &broken, None);
    assert!(broken.equal(&mixed), "NaN in a dropped image reaches the prediction");
}

#[test]
fn network_sees_standardised_embeddings() {
    let mut network = network();
    let want = predict(
        &network,
        &code(4),
        Timesteps::All(3),
        &network.prepare(&image(4), None).expect("the embeddings have the right width"),
        None,
    );
    let (mean, deviation) = (normals(8, &[6], Kind::Double), normals(9, &[6], Kind::Double).abs() + 0.1);
    network.standardisation_mut().set(&mean, &deviation).expect("the shapes match");
    let raw = network.prepare(&(image(4) * &deviation + &mean), None).expect("the embeddings have the right width");
    assert_close(&predict(&network, &code(4), Timesteps::All(3), &raw, None), &want, 1e-12, "prediction");
    let error = network.standardisation_mut().set(&mean, &deviation.zeros_like()).expect_err("the deviation is 0");
    assert_eq!(error.to_string(), "standard deviation of embedding dimension 0 is 0, wanted a finite number above 0");
    for (wrong, text) in [(f64::NAN, "NaN"), (f64::NEG_INFINITY, "-inf")] {
        let means = mean.copy();
        let _ = means.get(4).fill_(wrong);
        let error =
            network.standardisation_mut().set(&means, &deviation).expect_err("a mean is not finite").to_string();
        assert_eq!(error, format!("mean of embedding dimension 4 is {text}, wanted a finite number"));
    }
}

#[test]
fn dropout_keeps_the_mean() {
    let mut network = network();
    // The head reads the outputs of the last upward module and of the first downward module. The head's weights for the
    // upward module are set to 0. The network's output is then a linear function of the first downward module's output,
    // to which dropout has been applied.
    let mut weights = named(&network);
    for (_, tensor) in weights.iter_mut().filter(|(name, _)| name == "out.weight") {
        *tensor = tensor.detach().copy();
        let _ = tensor.narrow(1, 0, 16).fill_(0.0);
    }
    network.parameters_mut().load(&weights).expect("the shapes match");
    let rows = 4096;
    let (x, image) =
        (code(1).repeat([rows, 1]), network.prepare(&image(1), None).expect("the embeddings have the right width"));
    let image = image.repeated(rows).expect("the count is positive");
    let draws = DropoutDraws { philox: Philox::new(2), step: Step::At(0), first_sample: 0 };
    let mean = predict(&network, &x, Timesteps::All(3), &image, Some(draws)).mean_dim(
        Some([0].as_slice()),
        false,
        Kind::Double,
    );
    let want = predict(&network, &x, Timesteps::All(3), &image, None).get(0);
    // With a dropout of 0.3, a single draw deviates from the mean by about √(0.3 / 0.7) = 65 %, and the mean of 4096
    // draws by about 1 %.
    assert_close(&mean, &want, 0.05, "mean");
}

#[test]
fn dropout_does_not_depend_on_how_the_batch_is_split() {
    let network = network();
    let predict = |first: i64, rows: i64| {
        let draws = DropoutDraws { philox: Philox::new(2), step: Step::At(4), first_sample: 100 + first as u64 };
        let image =
            network.prepare(&image(8).narrow(0, first, rows), None).expect("the embeddings have the right width");
        predict(&network, &code(8).narrow(0, first, rows), Timesteps::All(3), &image, Some(draws))
    };
    assert_close(&Tensor::cat(&[predict(0, 3), predict(3, 5)], 0), &predict(0, 8), 1e-13, "prediction");
}

#[test]
fn loading_mismatched_tensors_names_them_and_changes_nothing() {
    let mut network = network();
    let before = named(&network)[0].1.detach().copy();
    let mut weights: Vec<_> =
        named(&network).iter().map(|(name, tensor)| (name.clone(), tensor.detach() * 2.0)).collect();
    let last = weights.pop().expect("the network has parameters");
    let error = network.parameters_mut().load(&weights).expect_err("a tensor is missing");
    assert_eq!(error.to_string(), "missing tensor `out.bias`: the network has a parameter of this name");
    weights.push((last.0.clone(), normals(1, &[3], Kind::Double)));
    let error = network.parameters_mut().load(&weights).expect_err("the shape is wrong");
    assert_eq!(error.to_string(), "out.bias has shape [3], wanted [16]");
    weights.push(("extra".to_owned(), last.1));
    let error = network.parameters_mut().load(&weights).expect_err("no parameter has this name");
    assert_eq!(error.to_string(), "unknown tensor `extra`: the network has no such parameter");
    assert!(named(&network)[0].1.equal(&before));
}

#[test]
fn bf16_prediction_is_close_to_f32() {
    let architecture = Architecture::new(&config(7), 32, TIMESTEPS);
    let predict = |precision| {
        let network = CsUnet::new(architecture.clone(), Placement::on(Device::Cpu, precision), Philox::new(1))
            .expect("the architecture is valid");
        let image =
            network.prepare(&normals(5, &[8, 32], Kind::Float), None).expect("the embeddings have the right width");
        let prediction = predict(&network, &normals(6, &[8, 64], Kind::Float), Timesteps::All(3), &image, None);
        assert_eq!(prediction.kind(), Kind::Float);
        prediction
    };
    assert_close(&predict(Precision::Bf16), &predict(Precision::F32), 0.05, "prediction");
}
