//! A network that is split over tensor-parallel ranks has the same predictions, losses and gradients as the whole
//! network.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, a for the anchors, and
//! d for the dimensions of a code.

use locdiff::comm::Group;
use locdiff::loss::{Inputs, Loss};
use locdiff::model::{Architecture, CsUnet, DropoutDraws, Placement, Split, Timesteps};
use locdiff::native::random::Step;
use locdiff_core::config::{LossConfig, ModelConfig, Precision};
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use crate::comm::harness::run_ranks;
use crate::model::support::{assert_close, named, normals};

const BATCH: i64 = 5;
const EMBEDDING: u32 = 6;
const TIMESTEPS: u32 = 10;
const DEGREE: u32 = 7;
const ANCHORS: i64 = 32;

fn network(bottleneck: u32, kind: Kind, group: Option<&Group>) -> CsUnet {
    let config = ModelConfig { degree: DEGREE, bottleneck, dropout: 0.3, ..ModelConfig::default() };
    let placement = Placement { device: Device::Cpu, kind, precision: Precision::F32, tensor_parallel: group.cloned() };
    CsUnet::new(Architecture::new(&config, EMBEDDING, TIMESTEPS), placement, Philox::new(1))
        .expect("the architecture is valid")
}

/// The weights of the network plus noise, so that no weight is 0.
fn moved(network: &CsUnet) -> Vec<(String, Tensor)> {
    let moved = |(index, (name, tensor)): (usize, (String, Tensor))| {
        let noise = normals(100 + index as i64, &tensor.size(), Kind::Double) * 0.05;
        (name, tensor.detach() + noise.to_kind(tensor.kind()))
    };
    named(network).into_iter().enumerate().map(moved).collect()
}

/// Runs the forward and backward pass of one training step. Returns the prediction and the loss, and leaves the
/// gradients in the parameters.
fn step(network: &CsUnet, kind: Kind, basis_ad: &Tensor, anchors_split: Option<&Group>) -> (Tensor, Tensor) {
    let dims = network.architecture().dims;
    let t_b = Tensor::from_slice(&[0_i64, 9, 3, 3, 7]);
    let draws = DropoutDraws { philox: Philox::new(2), step: Step::At(4), first_sample: 0 };
    let image = network
        .prepare(&normals(2, &[BATCH, i64::from(EMBEDDING)], kind), None)
        .expect("the embeddings have the right width");
    let time = network.time_table().expect("the architecture is valid");
    let x_bd = normals(3, &[BATCH, dims], kind);
    let predicted_bd =
        network.forward(&x_bd, Timesteps::Each(&t_b), &time, &image, Some(draws)).expect("the shapes match");
    let truth_bd = normals(4, &[BATCH, dims], kind);
    let loss = Loss::new(&LossConfig::default(), DEGREE, Precision::F32);
    let inputs = Inputs { predicted_bd: &predicted_bd, truth_bd: &truth_bd, basis_ad, anchors_split };
    let losses = loss.compute(inputs).expect("the shapes match");
    losses.total.backward();
    (predicted_bd, losses.total)
}

fn split_equals_whole(group: &Group, bottleneck: u32, kind: Kind, tolerance: f64) {
    let (mut whole, mut split) = (network(bottleneck, kind, None), network(bottleneck, kind, Some(group)));
    for ((name, first), (_, want)) in split
        .parameters()
        .gather_whole(&split.parameters().tensors(), Some(group))
        .expect("all ranks take part")
        .iter()
        .zip(named(&whole))
    {
        assert!(first.equal(&want), "the initial value of {name} depends on the split");
    }
    let weights = moved(&whole);
    whole.parameters_mut().load(&weights).expect("the shapes match");
    split.parameters_mut().load(&weights).expect("the shapes match");
    let (rank, ranks) = (i64::from(group.rank()), i64::from(group.size()));
    let basis_ad = normals(5, &[ANCHORS, whole.architecture().dims], kind) * 0.3;
    let (want, want_loss) = step(&whole, kind, &basis_ad, None);
    for own_anchors in [false, true] {
        let share = ANCHORS / ranks;
        let own_ad = if own_anchors { basis_ad.narrow(0, rank * share, share) } else { basis_ad.shallow_clone() };
        let (got, loss) = step(&split, kind, &own_ad, own_anchors.then_some(group));
        assert_close(&got, &want, tolerance, "prediction");
        assert_close(&loss, &want_loss, tolerance, "loss");
        for (parameter, want) in split.parameters().iter().zip(whole.parameters().iter()) {
            let want =
                want.split.piece(&want.name, &want.tensor.grad(), rank, ranks).expect("the widths are divisible");
            assert_close(&parameter.tensor.grad(), &want, tolerance, &parameter.name);
            let _ = parameter.tensor.grad().zero_();
        }
    }
}

#[test]
fn split_network_equals_the_whole() {
    for world in [2, 4] {
        run_ranks(split_network_equals_the_whole, world, |me| {
            let communicator = me.connect(me.world);
            // The split network and the whole network add hundreds of terms in different orders, which matters in f32.
            for (kind, tolerance) in [(Kind::Double, 1e-10), (Kind::Float, 2e-4)] {
                for bottleneck in [0, 8] {
                    split_equals_whole(communicator.tensor(), bottleneck, kind, tolerance);
                }
            }
        });
    }
}

#[test]
fn replicated_gradients_are_the_same_on_every_rank() {
    run_ranks(replicated_gradients_are_the_same_on_every_rank, 2, |me| {
        let communicator = me.connect(me.world);
        let group = communicator.tensor();
        let mut network = network(0, Kind::Float, Some(group));
        let weights = moved(&self::network(0, Kind::Float, None));
        network.parameters_mut().load(&weights).expect("the shapes match");
        let _ = step(&network, Kind::Float, &normals(5, &[ANCHORS, 64], Kind::Float), None);
        let replicated: Vec<_> =
            network.parameters().iter().filter(|parameter| parameter.split == Split::Replicated).collect();
        // Each of the six modules has three replicated parameters: two in its time MLP, and a bias. The bias of the
        // head is also replicated.
        assert_eq!(replicated.len(), 6 * 3 + 1);
        for parameter in replicated {
            let all = group.all_gather(&parameter.tensor.grad()).expect("all ranks take part");
            assert!(all.get(0).equal(&all.get(1)), "the ranks have different gradients of {}", parameter.name);
        }
    });
}

#[test]
fn indivisible_width_is_named() {
    let whole = normals(1, &[25, 4], Kind::Float);
    let error = Split::Rows.piece("down1.x.weight", &whole, 0, 2).expect_err("25 is not divisible by 2").to_string();
    assert_eq!(
        error,
        "down1.x.weight: 25 units cannot be divided among 2 tensor-parallel ranks; choose another number of ranks"
    );
    let pieces: Vec<Tensor> = (0..2)
        .map(|rank| Split::RowHalves.piece("x", &whole.narrow(0, 0, 8), rank, 2).expect("8 is divisible by 4"))
        .collect();
    assert!(Split::RowHalves.whole(&pieces).expect("the pieces match").equal(&whole.narrow(0, 0, 8)));
}
