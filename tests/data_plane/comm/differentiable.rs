//! Gradients through each differentiable collective equal the gradients of the same computation on one rank.
//!
//! All comparisons are in f64 with a tolerance of 1e-10. The values are about 10. Adding them in a different order
//! changes a sum by a few units in the last place. Each such unit is 2e-16 of the sum.
//!
//! The letters after the last underscore of a tensor's name are its dimensions: b for the batch, i for the input, h for
//! the hidden layer, and o for the output.

use std::time::{Duration, Instant};

use locdiff::comm::{Group, differentiable};
use tch::{Device, Kind, Tensor};

use super::harness::run_ranks;

const TOLERANCE: f64 = 1e-10;

/// Random numbers that depend only on `seed` and `shape`, so every rank gets the same numbers.
fn same(seed: i64, shape: &[i64]) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, (Kind::Double, Device::Cpu))
}

fn leaf(tensor: &Tensor) -> Tensor {
    tensor.detach().copy().set_requires_grad(true)
}

fn assert_close(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(got.size(), want.size(), "{what} has the wrong shape");
    let difference = (got - want).abs().max().double_value(&[]);
    assert!(difference < TOLERANCE, "{what} differs by {difference:e}");
}

fn own_slice(group: &Group, whole: &Tensor, dim: i64) -> Tensor {
    let length = whole.size()[usize::try_from(dim).expect("the dimension is not negative")] / i64::from(group.size());
    whole.narrow(dim, i64::from(group.rank()) * length, length)
}

#[test]
fn column_then_row_linear_equals_the_unsplit_one() {
    for world in [2, 4] {
        run_ranks(column_then_row_linear_equals_the_unsplit_one, world, |me| {
            let communicator = me.connect(me.world);
            let group = communicator.tensor();
            let (x_bi, up_ih, down_ho, bias_o) = (same(1, &[5, 6]), same(2, &[6, 8]), same(3, &[8, 3]), same(4, &[3]));
            let weight_bo = same(5, &[5, 3]);

            let [x, up, down, bias] = [&x_bi, &up_ih, &down_ho, &bias_o].map(leaf);
            let whole = x.matmul(&up).gelu("none").matmul(&down) + &bias;
            (&whole * &weight_bo).sum(Kind::Double).backward();

            let (x_r, up_r) = (leaf(&x_bi), leaf(&own_slice(group, &up_ih, 1)));
            let (down_r, bias_r) = (leaf(&own_slice(group, &down_ho, 0)), leaf(&bias_o));
            let hidden = differentiable::copy(group, &x_r).expect("all ranks take part").matmul(&up_r).gelu("none");
            let summed = differentiable::reduce(group, &hidden.matmul(&down_r)).expect("all ranks take part");
            let output = summed + &bias_r;
            (&output * &weight_bo).sum(Kind::Double).backward();

            assert_close(&output, &whole, "output");
            assert_close(&x_r.grad(), &x.grad(), "input");
            assert_close(&up_r.grad(), &own_slice(group, &up.grad(), 1), "column weight");
            assert_close(&down_r.grad(), &own_slice(group, &down.grad(), 0), "row weight");
            assert_close(&bias_r.grad(), &bias.grad(), "bias");
        });
    }
}

#[test]
fn split_log_softmax_equals_the_unsplit_one() {
    for world in [2, 4] {
        run_ranks(split_log_softmax_equals_the_unsplit_one, world, |me| {
            let communicator = me.connect(me.world);
            let group = communicator.tensor();
            let (logits_bo, target_bo) = (same(1, &[3, 8]), same(2, &[3, 8]).softmax(-1, Kind::Double));

            let whole = leaf(&logits_bo);
            let loss = -(whole.log_softmax(-1, Kind::Double) * &target_bo).sum(Kind::Double);
            loss.backward();

            // Each rank computes with its slice of the classes. The ranks gather the log-sum-exps of their slices and
            // sum their parts of the loss.
            let replicated = leaf(&logits_bo);
            let mine = differentiable::split(group, &replicated, -1).expect("all ranks take part");
            let sums =
                differentiable::gather_replicated(group, &mine.logsumexp([-1], true), -1).expect("all ranks take part");
            // Each rank's part of the loss depends on the whole log-sum-exp, so backward gives each rank only a part of
            // the log-sum-exp's gradient. `copy` sums these parts over the ranks.
            let normaliser = differentiable::copy(group, &sums.logsumexp([-1], true)).expect("all ranks take part");
            let part = -((mine - normaliser) * own_slice(group, &target_bo, 1)).sum(Kind::Double);
            let split_loss = differentiable::reduce(group, &part).expect("all ranks take part");
            split_loss.backward();

            assert_close(&split_loss, &loss, "loss");
            assert_close(&replicated.grad(), &whole.grad(), "logits");
        });
    }
}

#[test]
fn gather_is_correct_along_every_dimension() {
    for world in [2, 4] {
        run_ranks(gather_is_correct_along_every_dimension, world, |me| {
            let communicator = me.connect(me.world);
            let group = communicator.tensor();
            for (dim, negative) in [(0, -3), (1, -2), (2, -1)] {
                let whole = leaf(&same(1, &[4, 8, 4]));
                let weights: Vec<Tensor> = (0..me.world).map(|rank| same(10 + i64::from(rank), &[4, 8, 4])).collect();

                // Every rank computes the same loss from the gathered tensor.
                (whole.sin() * &weights[0]).sum(Kind::Double).backward();
                let mine = leaf(&own_slice(group, &whole, dim));
                let gathered = differentiable::gather_replicated(group, &mine, negative).expect("all ranks take part");
                assert_close(&gathered, &whole, "gathered");
                (gathered.sin() * &weights[0]).sum(Kind::Double).backward();
                assert_close(&mine.grad(), &own_slice(group, &whole.grad(), dim), "replicated");
            }
        });
    }
}

#[test]
fn split_and_copy_give_every_rank_the_whole_gradient() {
    for world in [2, 4] {
        run_ranks(split_and_copy_give_every_rank_the_whole_gradient, world, |me| {
            let communicator = me.connect(me.world);
            let group = communicator.tensor();
            let weight = same(2, &[8, 4]);
            let whole = leaf(&same(1, &[8, 4]));
            (whole.sin() * &weight).sum(Kind::Double).backward();
            for dim in [0, 1] {
                let input = leaf(&whole);
                let mine = differentiable::split(group, &input, dim).expect("all ranks take part");
                let part = (mine.sin() * own_slice(group, &weight, dim)).sum(Kind::Double);
                differentiable::reduce(group, &part).expect("all ranks take part").backward();
                assert_close(&input.grad(), &whole.grad(), "split");
            }
            let input = leaf(&whole);
            let share =
                differentiable::copy(group, &input).expect("all ranks take part").sin() * &weight / f64::from(me.world);
            differentiable::reduce(group, &share.sum(Kind::Double)).expect("all ranks take part").backward();
            assert_close(&input.grad(), &whole.grad(), "copy");
        });
    }
}

#[test]
fn second_derivative_is_an_error() {
    run_ranks(second_derivative_is_an_error, 2, |me| {
        let communicator = me.connect(me.world);
        let input = leaf(&same(1, &[3]));
        let output =
            differentiable::reduce(communicator.tensor(), &input).expect("all ranks take part").sin().sum(Kind::Double);
        let error =
            Tensor::f_run_backward(&[&output], &[&input], true, true).expect_err("there is no second derivative");
        assert!(error.to_string().contains("cannot be differentiated twice"), "wrong error text: {error}");
        let first = Tensor::f_run_backward(&[&output], &[&input], false, false).expect("there is a first derivative");
        assert_eq!(first.len(), 1);
    });
}

#[test]
fn missing_peer_in_backward_is_an_error() {
    run_ranks(missing_peer_in_backward_is_an_error, 2, |me| {
        let communicator = me.connect(me.world);
        let timeout = Duration::from_secs(1);
        let group = communicator.tensor().with_timeout(timeout);
        let input = leaf(&same(1, &[3]));
        let output = differentiable::copy(&group, &input).expect("all ranks take part").sum(Kind::Double);
        if me.rank == 0 {
            let started = Instant::now();
            let error = output.f_backward().expect_err("rank 1 runs no backward pass").to_string();
            assert!(error.contains("all_reduce of group tensor, rank 0 of 2: "), "wrong error text: {error}");
            assert!(
                started.elapsed() < timeout + Duration::from_secs(1),
                "the error came only after {:?}",
                started.elapsed()
            );
        }
        // This barrier in another group keeps rank 1 running until rank 0 has received its error.
        communicator.world().barrier().expect("the world group still works");
    });
}
