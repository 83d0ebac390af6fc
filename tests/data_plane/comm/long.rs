//! The C++ shim leaks no memory. A long test: see `setup/run_tests.py`.

use locdiff::comm::{ReduceOp, differentiable};
use tch::{Device, Kind, Tensor};

use super::harness::run_ranks;
use crate::resident_bytes;

const CALLS: usize = 10_000;
const WARM_UP_CALLS: usize = 1_000;
/// Leaking one handle per call would take about 2 MB, one tensor per call 8 MB. Allocators keep some memory.
const GROWTH_BYTES_MAX: u64 = 1 << 20;

#[test]
fn ten_thousand_calls_do_not_grow_memory() {
    run_ranks(ten_thousand_calls_do_not_grow_memory, 2, |me| {
        let communicator = me.connect(2);
        let group = communicator.tensor();
        let input = Tensor::ones([64], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let odd = Tensor::ones([3], (Kind::Double, Device::Cpu));
        let call = |round: usize| {
            let mut tensor = input.detach().copy();
            group.all_reduce(&mut tensor, ReduceOp::Mean).expect("reduced");
            // `copy` has a collective in backward, `reduce` in forward.
            let function = [differentiable::copy, differentiable::reduce][round % 2];
            function(group, &input).expect("a collective").sum(Kind::Double).backward();
            differentiable::split(group, &odd, 0).expect_err("3 does not divide by 2");
        };
        (0..WARM_UP_CALLS).for_each(call);
        let before = resident_bytes();
        (0..CALLS).for_each(call);
        let growth = resident_bytes().saturating_sub(before);
        me.report(&format!("grew by {growth} bytes"));
        assert!(growth < GROWTH_BYTES_MAX, "grew by {growth} bytes");
    });
}
