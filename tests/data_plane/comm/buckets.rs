//! Gradients that several processes reduce in buckets equal the gradients that one process computes from the whole
//! batch.
//!
//! Gradients are compared in f64 with a tolerance of 1e-10, because the two computations add the same terms in
//! different orders.

use std::sync::{Arc, Mutex};

use locdiff::comm::{Buckets, Communicator};
use tch::{Device, Kind, Tensor};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::harness::run_ranks;

/// Records the trace events of the buckets in the order in which they happen: `gradient`, `reduction started 0`, ...,
/// `finish`.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = String::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| match field.name() {
            "message" => text.insert_str(0, &format!("{value:?}")),
            "bucket" => text.push_str(&format!(" {value:?}")),
            _ => {}
        });
        self.0.lock().expect("only one thread uses the lock").push(text);
    }
}

/// Runs a step and returns its trace events. Only events of this thread are recorded. That is enough on the CPU, where
/// gradient hooks run on the thread that calls backward.
fn events_of(step: impl FnOnce()) -> Vec<String> {
    let events = Events::default();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(events.clone()), step);
    std::mem::take(&mut *events.0.lock().expect("only one thread uses the lock"))
}

/// The events that announce the start of each reduction, in the order of the buckets.
fn start_events(buckets: &Buckets) -> Vec<String> {
    (0..buckets.flats().len()).map(|bucket| format!("reduction started {bucket}")).collect()
}

const TOLERANCE: f64 = 1e-10;
const ROWS: i64 = 24;

/// The weights of five 6×6 layers, and a bias of 6 numbers. [`loss`] does not use layer 2.
fn parameters() -> Vec<Tensor> {
    tch::manual_seed(7);
    let mut all: Vec<Tensor> = (0..5).map(|_| Tensor::randn([6, 6], (Kind::Double, Device::Cpu)) * 0.3).collect();
    all.push(Tensor::randn([6], (Kind::Double, Device::Cpu)));
    all.into_iter().map(|tensor| tensor.set_requires_grad(true)).collect()
}

const UNUSED: usize = 2;

fn batch() -> Tensor {
    tch::manual_seed(8);
    Tensor::randn([ROWS, 6], (Kind::Double, Device::Cpu))
}

/// The mean loss over `rows`. All ranks have the same number of rows, so the mean of the losses of all ranks is the
/// loss of the whole batch.
fn loss(parameters: &[Tensor], rows: &Tensor) -> Tensor {
    let mut x = rows.shallow_clone();
    for (index, weight) in parameters[..5].iter().enumerate() {
        if index != UNUSED {
            x = x.matmul(weight).tanh();
        }
    }
    (x + &parameters[5]).square().sum_dim_intlist([-1i64].as_slice(), false, Kind::Double).mean(Kind::Double)
}

fn share(communicator: &Communicator) -> Tensor {
    let length = ROWS / i64::from(communicator.data().size());
    batch().narrow(0, i64::from(communicator.data().rank()) * length, length)
}

fn assert_gradients(parameters: &[Tensor], what: &str) {
    let whole = self::parameters();
    loss(&whole, &batch()).backward();
    for (index, (got, want)) in parameters.iter().zip(&whole).enumerate() {
        if index == UNUSED {
            assert_eq!(got.grad().abs().max().double_value(&[]), 0.0, "{what}: the unused parameter has a gradient");
            continue;
        }
        let difference = (got.grad() - want.grad()).abs().max().double_value(&[]);
        assert!(difference < TOLERANCE, "{what}: parameter {index} differs by {difference:e}");
    }
}

/// Bytes of a 6×6 layer in f64, padded to 40 numbers. With buckets of this size, every layer is in a separate bucket.
const ONE_LAYER_BYTES: usize = 40 * 8;

#[test]
fn gradients_equal_those_of_the_whole_batch() {
    for world in [1, 2, 4] {
        run_ranks(gradients_equal_those_of_the_whole_batch, world, |me| {
            let communicator = me.connect(1);
            for bucket_bytes in [1, ONE_LAYER_BYTES, 2 * ONE_LAYER_BYTES, usize::MAX] {
                let parameters = parameters();
                let buckets =
                    Buckets::new(communicator.data(), &parameters, bucket_bytes).expect("the parameters are valid");
                for step in 0..3 {
                    buckets.zero().expect("the gradients can be written");
                    loss(&parameters, &share(&communicator)).f_backward().expect("the loss has a graph");
                    buckets.finish().expect("all ranks take part");
                    assert_gradients(&parameters, &format!("buckets of {bucket_bytes} bytes, step {step}"));
                }
            }
        });
    }
}

#[test]
fn accumulation_reduces_once_and_gives_the_same_gradients() {
    for world in [2, 4] {
        run_ranks(accumulation_reduces_once_and_gives_the_same_gradients, world, |me| {
            let communicator = me.connect(1);
            let parameters = parameters();
            let buckets =
                Buckets::new(communicator.data(), &parameters, 2 * ONE_LAYER_BYTES).expect("the parameters are valid");
            let parts = share(&communicator).chunk(3, 0);
            for _ in 0..2 {
                buckets.zero().expect("the gradients can be written");
                for part in &parts[..2] {
                    let part_loss = loss(&parameters, part) / 3.0;
                    buckets.accumulate(|| part_loss.f_backward()).expect("the loss has a graph");
                }
                let mut events = events_of(|| {
                    (loss(&parameters, &parts[2]) / 3.0).f_backward().expect("the loss has a graph");
                    buckets.finish().expect("all ranks take part");
                });
                events.retain(|event| event.starts_with("reduction"));
                assert_eq!(events, start_events(&buckets), "not every bucket was reduced exactly once");
                assert_gradients(&parameters, "accumulated");
            }
        });
    }
}

#[test]
fn reductions_start_in_order_while_backward_runs() {
    run_ranks(reductions_start_in_order_while_backward_runs, 2, |me| {
        let communicator = me.connect(1);
        let used: Vec<Tensor> =
            parameters().into_iter().enumerate().filter(|(index, _)| *index != UNUSED).map(|(_, p)| p).collect();
        let buckets = Buckets::new(communicator.data(), &used, ONE_LAYER_BYTES).expect("the parameters are valid");
        let mut x = share(&communicator);
        for weight in &used[..4] {
            x = x.matmul(weight).tanh();
        }
        let events = events_of(|| {
            (x + &used[4]).square().mean(Kind::Double).f_backward().expect("the loss has a graph");
            buckets.finish().expect("all ranks take part");
        });
        // Hooks inside backward emit the `gradient` events. So if a reduction starts before the last `gradient` event,
        // it starts before backward ends.
        let last_gradient = events.iter().rposition(|event| event == "gradient");
        let starts = start_events(&buckets);
        let place = |start: &String| events.iter().position(|event| event == start).expect("every reduction starts");
        let starts: Vec<usize> = starts.iter().map(place).collect();
        assert!(starts.is_sorted(), "the reductions started out of order: {events:?}");
        assert!(
            starts[0] < last_gradient.expect("backward gives gradients"),
            "no reduction started during backward: {events:?}"
        );
        let before = starts.iter().filter(|start| **start < last_gradient.expect("backward gives gradients")).count();
        assert_eq!(before, starts.len() - 1, "all reductions except the last must start during backward: {events:?}");
        assert_eq!(events.last().expect("the step has events"), "finish", "`finish` started a reduction: {events:?}");
    });
}

#[test]
fn unused_parameter_delays_its_bucket_until_finish() {
    run_ranks(unused_parameter_delays_its_bucket_until_finish, 2, |me| {
        let communicator = me.connect(1);
        let parameters = parameters();
        let buckets =
            Buckets::new(communicator.data(), &parameters, ONE_LAYER_BYTES).expect("the parameters are valid");
        // Rank 1 does not use the first four layers. Both ranks must still start the reductions in the same order.
        let rows = share(&communicator);
        let loss = if me.rank == 0 {
            loss(&parameters, &rows)
        } else {
            (rows.matmul(&parameters[4]) + &parameters[5]).square().mean(Kind::Double)
        };
        let mut events = events_of(|| {
            loss.f_backward().expect("the loss has a graph");
            buckets.finish().expect("all ranks take part");
        });
        events.retain(|event| event.starts_with("reduction"));
        assert_eq!(events, start_events(&buckets));
        let zeros = parameters[UNUSED].grad().abs().max().double_value(&[]);
        assert_eq!(zeros, 0.0);
    });
}

#[test]
fn misuse_is_an_error_in_finish() {
    run_ranks(misuse_is_an_error_in_finish, 2, |me| {
        let communicator = me.connect(1);
        let parameters = parameters();
        let buckets = Buckets::new(communicator.data(), &parameters, usize::MAX).expect("the parameters are valid");
        let rows = share(&communicator);
        loss(&parameters, &rows).f_backward().expect("the loss has a graph");
        loss(&parameters, &rows).f_backward().expect("the loss has a graph");
        let error = buckets.finish().expect_err("backward ran twice in one step");
        assert!(
            error.to_string().contains("second gradient in one step; run every backward pass except the last"),
            "wrong error text: {error}"
        );

        // After an error, the next step works again.
        buckets.zero().expect("the gradients can be written");
        loss(&parameters, &rows).f_backward().expect("the loss has a graph");
        buckets.finish().expect("all ranks take part");
        assert_gradients(&parameters, "after an error");

        let elsewhere = Tensor::zeros([6], (Kind::Double, Device::Cpu));
        locdiff::native::autograd::set_gradient(&parameters[5], &elsewhere).expect("shape and type match");
        let error = buckets.finish().expect_err("a gradient was replaced");
        assert!(
            error.to_string().contains("the gradient of parameter 5 is no longer in its bucket"),
            "wrong error text: {error}"
        );
    });
}

#[test]
fn ranks_with_different_parameters_are_refused() {
    run_ranks(ranks_with_different_parameters_are_refused, 2, |me| {
        let communicator = me.connect(1);
        let mut parameters = parameters();
        if me.rank == 1 {
            parameters.swap(0, 5);
        }
        let error =
            Buckets::new(communicator.data(), &parameters, usize::MAX).expect_err("the parameter orders differ");
        assert!(
            error.to_string().contains("the list of parameters on this rank differs from"),
            "wrong error text: {error}"
        );
        let constant = [Tensor::zeros([6], (Kind::Double, Device::Cpu))];
        let error =
            Buckets::new(communicator.data(), &constant, usize::MAX).expect_err("the tensor requires no gradient");
        assert!(
            error.to_string().contains("parameter 0 is not a leaf that requires a gradient"),
            "wrong error text: {error}"
        );
    });
}

#[test]
fn dropped_buckets_do_not_affect_backward() {
    run_ranks(dropped_buckets_do_not_affect_backward, 1, |me| {
        let communicator = me.connect(1);
        let parameters = parameters();
        let buckets = Buckets::new(communicator.data(), &parameters, usize::MAX).expect("the parameters are valid");
        drop(buckets);
        loss(&parameters, &batch()).f_backward().expect("the loss has a graph");
        assert_gradients(&parameters, "dropped");
    });
}
