//! Tests that the C++ shim leaks no memory. The test takes long, so `setup/run_tests.py` runs it only if a file of the
//! project has changed since the test last passed.

use locdiff::comm::{ReduceOp, differentiable};
use tch::{Device, Kind, Tensor};

use super::harness::run_ranks;
use crate::resident_bytes;

const CALLS: usize = 10_000;
const WARM_UP_CALLS: usize = 1_000;
/// Memory may grow by this much, because allocators keep some memory. A leak of one handle per call would take about
/// 2 MB, and a leak of one tensor per call would take 8 MB.
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
            group.all_reduce(&mut tensor, ReduceOp::Mean).expect("all ranks take part");
            // `copy` runs its collective in backward, `reduce` runs it in forward.
            let function = [differentiable::copy, differentiable::reduce][round % 2];
            function(group, &input).expect("all ranks take part").sum(Kind::Double).backward();
            differentiable::split(group, &odd, 0).expect_err("3 is not divisible by 2");
        };
        (0..WARM_UP_CALLS).for_each(call);
        let before = resident_bytes();
        (0..CALLS).for_each(call);
        let growth = resident_bytes().saturating_sub(before);
        me.report(&format!("grew by {growth} bytes"));
        assert!(growth < GROWTH_BYTES_MAX, "memory grew by {growth} bytes, wanted less than {GROWTH_BYTES_MAX}");
    });
}
