//! GeoCLIP's image head has the loss, the gradients and the outputs of the PyTorch reference in
//! `tests/golden/make_geoclip_head.py`.
//!
//! The tolerance is 1e-4 of each tensor's norm: the reference computes in f64, and this program in f32.

use std::fmt::Write as _;
use std::ops::Range;

use locdiff::comm::ReduceOp;
use locdiff::geoclip::{EMBEDDING_WIDTH, FEATURE_WIDTH};
use locdiff::infer::Weights;
use locdiff::infer::retrieval_data::trained_head;
use locdiff::methods::{ContrastiveHead, TrainableMethod as _};
use locdiff::shards::{Batch, Position};
use locdiff_core::config::RunConfig;
use tch::{Device, Kind, Tensor};

use crate::comm::harness::{Rank, run_ranks};
use crate::geoclip::support::folder;
use crate::model::support::{Golden, assert_close};

const TOLERANCE: f64 = 1e-4;
/// Rows of the global batch.
const ROWS: u64 = 16;
const SEED: u64 = 7;
const STEP: u64 = 3;
const NEGATIVES: u32 = 20;

/// The matrix of the same name in the script.
fn wave(rows: usize, columns: usize, phase: f64) -> Tensor {
    let numbers = |count: usize| Tensor::arange(count as i64, (Kind::Double, Device::Cpu));
    let (i, j) = (numbers(rows).unsqueeze(1), numbers(columns));
    (&i * 0.37 + &j * 0.11 + &i * &j * 0.013 + phase).sin()
}

fn weights() -> Weights {
    let named = |name: &str, tensor: Tensor| (name.to_owned(), tensor.to_kind(Kind::Float));
    let small = |rows: usize, columns: usize, phase: f64| wave(rows, columns, phase) * 0.05;
    Weights {
        parameters: vec![
            named("image.0.weight", small(FEATURE_WIDTH, FEATURE_WIDTH, 4.0)),
            named("image.0.bias", small(1, FEATURE_WIDTH, 5.0).get(0)),
            named("image.2.weight", small(EMBEDDING_WIDTH, FEATURE_WIDTH, 6.0)),
            named("image.2.bias", small(1, EMBEDDING_WIDTH, 7.0).get(0)),
            named("logit_scale", Tensor::from(2.0)),
        ],
        standardisation: [wave(1, FEATURE_WIDTH, 2.0).get(0) * 0.1, wave(1, FEATURE_WIDTH, 3.0).get(0) * 0.5 + 1.0]
            .map(|tensor| tensor.to_kind(Kind::Float)),
    }
}

fn photos() -> Tensor {
    wave(ROWS as usize, FEATURE_WIDTH, 1.0).to_kind(Kind::Half)
}

/// Latitudes and longitudes of places in the golden file of GeoCLIP.
fn places(name: &str) -> Vec<[f64; 2]> {
    let all = Golden::of("geoclip.safetensors").get(name).to_kind(Kind::Double).view([-1]);
    Vec::<f64>::try_from(all).expect("the tensor is on the CPU").as_chunks::<2>().0.to_vec()
}

/// The rows `slice` of the batch.
fn batch(slice: Range<u64>) -> Batch {
    let places = [places("probe_latlon"), places("gallery_latlon")[3..13].to_vec()].concat();
    let own = &places[slice.start as usize..slice.end as usize];
    let coordinates = [0, 1].map(|axis| own.iter().map(|place| place[axis]).collect());
    let embeddings = photos().narrow(0, slice.start as i64, (slice.end - slice.start) as i64).copy();
    Batch::of(embeddings, coordinates, Position { seed: SEED, epoch: 0, step: STEP, global_batch: ROWS as u32 }, slice)
}

/// Compares the loss and all gradients of the global batch with the reference. Each rank has a slice of the batch and
/// computes it in micro-batches of at most `micro` rows.
fn compare(head: &mut ContrastiveHead, rank: &Rank, sum: impl Fn(&mut Tensor), micro: u64) {
    let golden = Golden::of("geoclip_head.safetensors");
    let [first, end] = [rank.rank, rank.rank + 1].map(|index| ROWS * u64::from(index) / u64::from(rank.world));
    head.take(STEP, &batch(first..end)).expect("the batch fits the head");
    head.begin().expect("all ranks take part");
    head.parameters().tensors().iter_mut().for_each(Tensor::zero_grad);
    let mut loss = Tensor::zeros([1], (Kind::Float, Device::Cpu));
    for from in (0..end - first).step_by(micro as usize) {
        let count = micro.min(end - first - from);
        let share = head.losses(from, count).expect("the rows are in the slice").total * (count as f64 / ROWS as f64);
        share.backward();
        loss += share.detach();
    }
    sum(&mut loss);
    assert_close(&loss.get(0), golden.get("loss"), TOLERANCE, "loss");
    for parameter in head.parameters().iter() {
        let (name, mut gradient) = (&parameter.name, parameter.tensor.grad());
        sum(&mut gradient);
        if gradient.dim() < 2 {
            assert_close(&gradient, golden.get(&format!("grad.{name}")), TOLERANCE, name);
            continue;
        }
        let (rows, columns) = gradient.size2().expect("the gradient is a matrix");
        let vector = |length: i64, phase: f64| wave(1, length as usize, phase).get(0).to_kind(Kind::Float);
        let left = gradient.tr().mv(&vector(rows, 9.0));
        assert_close(&left, golden.get(&format!("left.{name}")), TOLERANCE, name);
        let right = gradient.mv(&vector(columns, 10.0));
        assert_close(&right, golden.get(&format!("right.{name}")), TOLERANCE, name);
    }
}

/// 16 rows give three ranks slices of different sizes: 5, 5 and 6 rows.
#[test]
fn gradients_of_the_head_equal_the_reference_on_one_and_three_ranks() {
    for world in [1, 3] {
        run_ranks(gradients_of_the_head_equal_the_reference_on_one_and_three_ranks, world, |rank| {
            let scratch = tempfile::tempdir().expect("a temporary folder can be created");
            let gallery = scratch.path().join("gallery.csv");
            let mut text = String::from("lat,lon\n");
            for [latitude, longitude] in places("gallery_latlon") {
                writeln!(text, "{latitude},{longitude}").expect("writing to a string cannot fail");
            }
            std::fs::write(&gallery, text).expect("the folder is writable");
            let mut config = RunConfig::default();
            (config.train.seed, config.train.global_batch) = (SEED, ROWS as u32);
            config.loss.negatives = NEGATIVES;
            config.retrieval.geoclip = folder().display().to_string();
            config.retrieval.gallery = gallery.display().to_string();
            let ranks = rank.connect(1);
            let mut head = ContrastiveHead::new(&config, FEATURE_WIDTH as u32, &ranks).expect("the files exist");
            let Weights { parameters, standardisation: [mean, deviation] } = weights();
            head.parameters_mut().load(&parameters).expect("the names and shapes match");
            head.standardisation_mut().set(&mean, &deviation).expect("the shapes match");
            for micro in [ROWS, 2] {
                let sum = |tensor: &mut Tensor| {
                    ranks.data().all_reduce(tensor, ReduceOp::Sum).expect("all ranks take part");
                };
                compare(&mut head, rank, sum, micro);
            }
        });
    }
}

/// When the head is used, its first layer contains the standardisation.
#[test]
fn queries_of_a_trained_head_equal_the_reference() {
    let head = trained_head(&weights(), Device::Cpu).expect("the weights are complete");
    assert!((head.factor() - 2.0_f64.exp()).abs() < 1e-5, "the factor is {}", head.factor());
    let queries = head.queries(&photos().narrow(0, 0, 4).unsqueeze(1)).expect("the photos have the right width");
    let directions = &queries / queries.norm_scalaropt_dim(2.0, [1].as_slice(), true);
    let golden = Golden::of("geoclip_head.safetensors");
    assert_close(&directions, golden.get("encoded"), TOLERANCE, "queries");
}
