//! Network, loss, sampler and decoder give the same results on a GPU as on the CPU. The CPU variant ignores these
//! tests.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, c for the coefficients
//! of a code, d for the dimensions of a code, e for the embedding, a for the anchors, n for points, and 3 for their
//! coordinates.

use locdiff::diffusion::{ChainNoise, Forward, NoiseSchedule, Sampler, TrainingDraws};
use locdiff::loss::{Inputs, Loss};
use locdiff::model::{Architecture, CsUnet, DropoutDraws, Placement, Timesteps};
use locdiff::native::random::Step;
use locdiff::shdd::decode::{Anchors, Budget, Coarse, Decoder};
use locdiff::shdd::gpu::{Encoder, upload};
use locdiff::shdd::{Basis, Filter, uniform_points};
use locdiff_core::config::{DiffusionConfig, LossConfig, ModelConfig, Precision};
use locdiff_core::geo::{UnitVector, fibonacci_grid};
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use crate::model::support::{ChainError, named, normals, relative};

const GPU: Device = Device::Cuda(0);
const DEGREE: u32 = 47;
const BATCH: usize = 64;
const PHILOX: Philox = Philox::new(5);

fn model(degree: u32) -> ModelConfig {
    ModelConfig { degree, dropout: 0.1, ..ModelConfig::default() }
}

fn network(device: Device, precision: Precision, degree: u32) -> CsUnet {
    CsUnet::new(Architecture::new(&model(degree), 768, 200), Placement::on(device, precision), PHILOX)
        .expect("the architecture is valid")
}

/// The loss and the gradients of one training step. Every device draws the same random numbers.
fn step(device: Device, precision: Precision) -> (f64, Vec<(String, Tensor)>) {
    let network = network(device, precision, DEGREE);
    let basis = Basis::new(DEGREE).expect("the degree is at most 511");
    let codes = |seed, count| {
        basis
            .tensor(&uniform_points(seed, 0, 0, count).expect("the draw is in range"), device)
            .expect("the codes fit into memory")
    };
    let (x0_bd, basis_ad) = (codes(1, BATCH), codes(2, 512));
    let schedule = NoiseSchedule::new(&DiffusionConfig::default(), &model(DEGREE));
    let draws = TrainingDraws { philox: PHILOX, step: Step::At(3), first_sample: 0, samples: BATCH, device };
    let t_b = draws.timesteps(&schedule).expect("the draw is in range");
    let noise_bd = draws.noise(basis.dims()).expect("the draw is in range");
    let forward = Forward::new(&schedule, Kind::Float, device).expect("the schedule is valid");
    let x_bd = forward.noised(&x0_bd, &t_b, &noise_bd).expect("the shapes match");
    let image_be = normals(9, &[BATCH as i64, 768], Kind::Float).to_device(device);
    let (time, image) = (
        network.time_table().expect("the architecture is valid"),
        network.prepare(&image_be, None).expect("the embeddings have the right width"),
    );
    let dropout = Some(DropoutDraws { philox: PHILOX, step: Step::At(3), first_sample: 0 });
    let predicted_bd = network.forward(&x_bd, Timesteps::Each(&t_b), &time, &image, dropout).expect("the shapes match");
    let loss = Loss::new(&LossConfig::default(), DEGREE, precision);
    let inputs = Inputs { predicted_bd: &predicted_bd, truth_bd: &x0_bd, basis_ad: &basis_ad, anchors_split: None };
    let losses = loss.compute(inputs).expect("the shapes match");
    let total = losses.check(3, 0).expect("the loss is finite");
    losses.total.backward();
    let grads = named(&network).into_iter().map(|(name, tensor)| (name, tensor.grad().to_device(Device::Cpu)));
    (total, grads.collect())
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn step_on_the_gpu_equals_the_step_on_the_cpu() {
    let (want, want_grads) = step(Device::Cpu, Precision::F32);
    let compare = |precision, loss_tolerance: f64, gradient_tolerance: f64| {
        let (got, grads) = step(GPU, precision);
        let worst = grads.iter().zip(&want_grads).map(|((_, got), (_, want))| relative(got, want)).fold(0.0, f64::max);
        println!("{precision:?}: loss {got}, wanted {want}; gradients differ by at most {worst:.2e} of their norm");
        assert!(
            (got - want).abs() <= loss_tolerance * want.abs(),
            "the loss is {got} on the GPU and {want} on the CPU"
        );
        assert!(worst <= gradient_tolerance, "the gradients differ by {worst} of their norm");
        grads
    };
    // In f32, the results differ only because the GPU and the CPU add thousands of products in different orders.
    compare(Precision::F32, 1e-5, 2e-4);
    // Each of the six modules rounds the input of its sines to bf16, which shifts the phase. In a measurement, the
    // gradients differed by 12 %.
    let (once, again) = (compare(Precision::Bf16, 0.01, 0.2), compare(Precision::Bf16, 0.01, 0.2));
    assert!(once.iter().zip(&again).all(|((_, once), (_, again))| once.equal(again)), "two runs on the GPU differ");
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn chain_on_the_gpu_equals_the_chain_on_the_cpu() {
    let chain = |device: Device| {
        let network = network(device, Precision::F32, 15);
        let schedule = NoiseSchedule::new(&DiffusionConfig::default(), &model(15));
        let image_be = normals(9, &[8, 768], Kind::Float).to_device(device);
        let (time, image) = (
            network.time_table().expect("the architecture is valid"),
            network.prepare(&image_be, None).expect("the embeddings have the right width"),
        );
        let noise = ChainNoise { seeds: vec![5, 6], samples: 4, dims: 256, kind: Kind::Float, device };
        let predict = |x: &Tensor, t: usize| -> Result<Tensor, ChainError> {
            Ok(network.forward(x, Timesteps::All(t), &time, &image, None)?)
        };
        let sampler = Sampler::few_steps(&schedule, 20, 1.0).expect("the chain is valid");
        tch::no_grad(|| sampler.run_with(|draw| noise.draw(draw), predict))
            .expect("the shapes match")
            .to_device(Device::Cpu)
    };
    let difference = relative(&chain(GPU), &chain(Device::Cpu));
    println!("after 20 steps, GPU and CPU differ by {difference:.2e} of the norm");
    // In each of the twenty steps the devices differ by a few units in the last place of f32, and the sines amplify the
    // differences.
    assert!(difference < 1e-3, "the chains differ by {difference:e} of their norm");
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn decoding_on_the_gpu_finds_the_right_points() {
    let basis = Basis::new(DEGREE).expect("the degree is at most 511");
    // The points of the gallery are about 50 km apart. Depending on `kept_bytes_max`, their harmonics are kept in
    // memory or computed tile by tile.
    let gallery: Vec<UnitVector> = fibonacci_grid(200_000);
    let chosen: Vec<usize> = (0..gallery.len()).step_by(400).collect();
    let points: Vec<UnitVector> = chosen.iter().map(|index| gallery[*index]).collect();
    let codes_bc = basis.tensor(&points, GPU).expect("the codes fit into memory");
    for kept_bytes_max in [0, Budget::default().kept_bytes_max] {
        let budget = Budget { kept_bytes_max, ..Budget::default() };
        let anchors =
            Anchors::new(basis.clone(), gallery.clone(), GPU, Coarse::of(GPU), budget).expect("the gallery has points");
        let best = anchors.best(&codes_bc, 1).expect("the codes are finite");
        let right = best.rows.iter().zip(&chosen).filter(|(row, wanted)| row[0].0 == **wanted).count();
        println!("{right} of {} anchors found, coarse pass in {:?}", chosen.len(), Coarse::of(GPU));
        assert_eq!(right, chosen.len());
    }
    let anchors = Anchors::grid(basis, 21_000, GPU).expect("the grid has points");
    let found =
        Decoder::new(anchors, 0.0, true).expect("the radius is 0").decode(&codes_bc).expect("the codes are finite");
    let worst = found.iter().zip(&points).map(|(found, point)| found.point.distance(*point).0).fold(0.0, f64::max);
    println!("refined to {:.2e} m", worst * 1000.0);
    assert!(worst < 0.001, "the worst refined place is off by {worst} km");
}

/// Each device computes the harmonics of the anchors itself. The GPU gives the same scores as the CPU, for whole codes
/// and for filtered codes.
#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn anchors_on_the_gpu_equal_anchors_on_the_cpu() {
    let basis = Basis::new(DEGREE).expect("the degree is at most 511");
    let kept: Vec<u32> = (0..basis.dims() as u32).filter(|index| index % 3 != 0).collect();
    let filter = Filter::from_indices(&kept, basis.dims()).expect("the indices are valid");
    let truth = uniform_points(21, 0, 0, 40).expect("the draw is in range");
    let whole_bc = basis.tensor(&truth, Device::Cpu).expect("the codes fit into memory");
    for filter in [None, Some(filter)] {
        let codes_bc = filter.as_ref().map_or_else(
            || whole_bc.shallow_clone(),
            |kept| kept.to_device(whole_bc.device()).and_then(|kept| kept.apply(&whole_bc)).expect("the shapes match"),
        );
        for kept_bytes_max in [0, Budget::default().kept_bytes_max] {
            let best = |device: Device| {
                let budget = Budget { kept_bytes_max, ..Budget::default() };
                let points = fibonacci_grid(30_000);
                let anchors =
                    Anchors::filtered(basis.clone(), filter.clone(), points, device, Coarse::of(device), budget);
                let anchors = anchors.expect("the gallery has points");
                let scores_ba = anchors.scores(&codes_bc).expect("the codes are finite");
                (anchors.best(&codes_bc, 4).expect("the codes are finite").rows, scores_ba)
            };
            let (got, want) = (best(GPU), best(Device::Cpu));
            for (got, want) in got.0.iter().zip(&want.0) {
                for ((anchor, score), (same, wanted)) in got.iter().zip(want) {
                    // The devices add 2304 products in f32 in different orders. Anchors with nearly equal scores may
                    // therefore swap places.
                    assert!(
                        (score - wanted).abs() < 1e-3,
                        "anchor {anchor} has score {score} on the GPU, anchor {same} has {wanted} on the CPU"
                    );
                }
                assert_eq!(got[0].0, want[0].0);
            }
            // On the GPU, the best 64 scores are computed from f32 factors and all other scores from f16 factors.
            let difference = relative(&got.1, &want.1);
            println!("relative difference of the scores: {difference:.2e}");
            assert!(difference < 2e-3, "the relative difference of the scores is {difference:e}");
        }
    }
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn only_the_checked_encoder_names_an_invalid_point() {
    let encoder = Encoder::new(&Basis::new(7).expect("the degree is at most 511"), GPU).expect("the kernel compiles");
    let points_n3 =
        upload(&uniform_points(3, 0, 0, 100).expect("the draw is in range"), GPU).expect("the points fit into memory");
    let (checked, unchecked) = (encoder.encode(&points_n3), encoder.encode_unchecked(&points_n3));
    assert!(checked.expect("the points are unit vectors").equal(&unchecked.expect("the points are f64")));
    let _ = points_n3.get(41).fill_(f64::NAN);
    let error = encoder.encode(&points_n3).expect_err("NaN is not a unit vector").to_string();
    assert!(error.starts_with("points to encode: row 41 is [NaN, "), "wrong error text: {error}");
    let codes = encoder.encode_unchecked(&points_n3).expect("`encode_unchecked` does not check points");
    let finite = codes.isfinite().all_dim(1, false).to_device(Device::Cpu);
    let finite: Vec<bool> = Vec::try_from(&finite).expect("the tensor holds booleans");
    assert!(finite.iter().enumerate().all(|(row, finite)| *finite == (row != 41)));
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn timestep_outside_the_table_makes_the_loss_nan_on_the_gpu() {
    let network = network(GPU, Precision::F32, 7);
    let image_be = normals(9, &[3, 768], Kind::Float).to_device(GPU);
    let (time, image) = (
        network.time_table().expect("the architecture is valid"),
        network.prepare(&image_be, None).expect("the embeddings have the right width"),
    );
    let x_bd = normals(8, &[3, 64], Kind::Float).to_device(GPU);
    let t_b = Tensor::from_slice(&[0_i64, 200, 199]).to_device(GPU);
    let predicted_bd = network.forward(&x_bd, Timesteps::Each(&t_b), &time, &image, None).expect("the shapes match");
    let nan = predicted_bd.isnan().any_dim(1, false).to_device(Device::Cpu);
    assert_eq!(Vec::<bool>::try_from(&nan).expect("the tensor holds booleans"), [false, true, false]);
}
