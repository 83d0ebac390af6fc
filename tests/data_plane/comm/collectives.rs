//! Every collective computes its defined result.

use locdiff::comm::{CollectiveFailure, CommError, Group, ReduceOp, differentiable};
use tch::{Device, Kind, Tensor};

use super::harness::run_ranks;

/// Small integers: their sums and means over ranks are exact in bf16 and fit into 8 bits.
fn values(rank: u32, kind: Kind) -> Tensor {
    (Tensor::arange(24, (Kind::Double, Device::Cpu)).remainder(3.0) + 1.0).view([4, 6]).to_kind(kind)
        * i64::from(rank + 1)
}

fn assert_equals(got: &Tensor, factor: f64, what: &str) {
    let want = values(0, Kind::Double) * factor;
    assert_eq!(got.to_kind(Kind::Double).view([4, 6]), want, "wrong result for {what}");
}

fn check_every_collective(group: &Group, kind: Kind) {
    let (rank, size) = (group.rank(), group.size());
    let triangle = f64::from(size * (size + 1) / 2);
    let what = format!("{kind:?}, rank {rank} of {size}");
    let floating = matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);

    let mut tensor = values(rank, kind);
    group.all_reduce(&mut tensor, ReduceOp::Sum).expect("all ranks take part");
    assert_equals(&tensor, triangle, &what);
    let mut tensor = values(rank, kind);
    group.all_reduce(&mut tensor, ReduceOp::Max).expect("all ranks take part");
    assert_equals(&tensor, f64::from(size), &what);
    if floating {
        let mut tensor = values(rank, kind);
        group.all_reduce(&mut tensor, ReduceOp::Mean).expect("all ranks take part");
        assert_equals(&tensor, triangle / f64::from(size), &what);
    }
    for root in 0..size {
        let mut tensor = values(rank, kind);
        group.broadcast(&mut tensor, root).expect("all ranks take part");
        assert_equals(&tensor, f64::from(root + 1), &what);
    }
    let all = group.all_gather(&values(rank, kind)).expect("all ranks take part");
    assert_eq!(all.size(), [i64::from(size), 4, 6]);
    for peer in 0..size {
        assert_equals(&all.get(i64::from(peer)), f64::from(peer + 1), &what);
    }
    // On rank r, piece p is `values(0, kind)` times (r + 1)·(p + 1).
    let pieces: Vec<Tensor> = (0..size).map(|piece| values(rank, kind) * i64::from(piece + 1)).collect();
    let whole = Tensor::stack(&pieces, 0);
    let own = group.reduce_scatter(&whole, ReduceOp::Sum).expect("all ranks take part");
    assert_equals(&own, triangle * f64::from(rank + 1), &what);
    let own = group.reduce_scatter(&whole, ReduceOp::Max).expect("all ranks take part");
    assert_equals(&own, f64::from(size * (rank + 1)), &what);
    if floating {
        let own = group.reduce_scatter(&whole, ReduceOp::Mean).expect("all ranks take part");
        assert_equals(&own, triangle / f64::from(size) * f64::from(rank + 1), &what);
    }
    group.barrier().expect("all ranks take part");
}

#[test]
fn every_collective_is_correct_for_every_type() {
    for world in [2, 4] {
        run_ranks(every_collective_is_correct_for_every_type, world, |me| {
            let communicator = me.connect(1);
            for kind in
                [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int, Kind::Int8, Kind::Uint8]
            {
                check_every_collective(communicator.world(), kind);
            }
        });
    }
}

#[test]
fn data_and_tensor_groups_are_separate() {
    run_ranks(data_and_tensor_groups_are_separate, 4, |me| {
        let communicator = me.connect(2);
        let place = communicator.place();
        assert_eq!((communicator.data().rank(), communicator.tensor().rank()), (place.data_rank, place.tensor_rank));
        let sum_over = |group: &Group| {
            let mut tensor = Tensor::from_slice(&[i64::from(me.rank)]);
            group.all_reduce(&mut tensor, ReduceOp::Sum).expect("all ranks take part");
            tensor.int64_value(&[0])
        };
        // Ranks 0 and 1 form one tensor group, ranks 2 and 3 the other. Ranks 0 and 2 form one data group, ranks 1 and
        // 3 the other.
        assert_eq!(sum_over(communicator.tensor()), if me.rank < 2 { 1 } else { 5 });
        assert_eq!(sum_over(communicator.data()), if me.rank % 2 == 0 { 2 } else { 4 });
        assert_eq!(sum_over(communicator.world()), 6);
        check_every_collective(communicator.data(), Kind::Double);
        check_every_collective(communicator.tensor(), Kind::Double);
    });
}

#[test]
fn world_of_one_needs_no_peers() {
    run_ranks(world_of_one_needs_no_peers, 1, |me| {
        let communicator = me.connect(1);
        check_every_collective(communicator.world(), Kind::Float);
        check_every_collective(communicator.tensor(), Kind::Float);
    });
}

#[test]
fn several_collectives_can_be_pending_at_once() {
    run_ranks(several_collectives_can_be_pending_at_once, 3, |me| {
        let communicator = me.connect(1);
        let group = communicator.world();
        let mut tensors: Vec<Tensor> =
            (0..16).map(|n| Tensor::full([1 << n], i64::from(me.rank) + n, (Kind::Int64, Device::Cpu))).collect();
        let pending: Vec<_> = tensors.iter_mut().map(|t| group.start_all_reduce(t, ReduceOp::Sum)).collect();
        for work in pending.into_iter().rev() {
            work.expect("the tensor is valid").wait().expect("all ranks take part");
        }
        for (n, tensor) in (0..).zip(&tensors) {
            assert_eq!((tensor.min().int64_value(&[]), tensor.max().int64_value(&[])), (3 + 3 * n, 3 + 3 * n));
        }
    });
}

#[test]
fn dropped_handle_does_not_disturb_the_collective() {
    run_ranks(dropped_handle_does_not_disturb_the_collective, 2, |me| {
        let communicator = me.connect(1);
        let group = communicator.world();
        for _ in 0..20 {
            // The handle and the tensor are dropped while the collective may still be running.
            let mut tensor = Tensor::ones([1 << 18], (Kind::Float, Device::Cpu));
            drop(group.start_all_reduce(&mut tensor, ReduceOp::Mean).expect("the tensor is valid"));
        }
        check_every_collective(group, Kind::Float);
    });
}

/// Computes several sums and means over ranks and reports a hash of the bits of each result to the parent process.
fn report_bits_of_sums(me: &super::harness::Rank) {
    let communicator = me.connect(1);
    let group = communicator.world();
    tch::manual_seed(i64::from(me.rank));
    for elements in [3, 1000, 70_001] {
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let mut tensor = Tensor::randn([elements], (Kind::Float, Device::Cpu));
            group.all_reduce(&mut tensor, op).expect("all ranks take part");
            let bits: Vec<f32> = Vec::try_from(&tensor).expect("the tensor is f32");
            let hash = bits.iter().fold(0_u64, |hash, x| hash.rotate_left(5) ^ u64::from(x.to_bits()).wrapping_mul(31));
            me.report(&format!("bits {hash:016x}"));
        }
    }
}

#[test]
fn sums_are_bit_equal_from_run_to_run() {
    for world in [3, 4] {
        let bits = || {
            let reports = run_ranks(sums_are_bit_equal_from_run_to_run, world, report_bits_of_sums);
            reports.into_iter().map(|lines| lines.into_iter().filter(|l| l.starts_with("bits")).collect::<Vec<_>>())
        };
        let first: Vec<_> = bits().collect();
        assert_eq!(first[0].len(), 6);
        assert!(first.iter().all(|lines| *lines == first[0]), "the ranks got different bits: {first:?}");
        assert_eq!(bits().collect::<Vec<_>>(), first, "two runs gave different bits");
    }
}

fn refusal(result: Result<(), CommError>) -> String {
    match result.expect_err("the arguments are invalid") {
        CommError::Collective { failure: CollectiveFailure::Refused { problem }, .. } => problem,
        other => panic!("wanted a refusal, got the error {other}"),
    }
}

#[test]
fn bad_arguments_are_refused_before_any_communication() {
    run_ranks(bad_arguments_are_refused_before_any_communication, 2, |me| {
        let communicator = me.connect(1);
        let group = communicator.world();
        if me.rank == 0 {
            let mut flags = Tensor::zeros([2], (Kind::Bool, Device::Cpu));
            assert_eq!(refusal(group.all_reduce(&mut flags, ReduceOp::Sum)), "cannot compute the Sum of Bool tensors");
            let mut whole = Tensor::zeros([2], (Kind::Int64, Device::Cpu));
            assert_eq!(
                refusal(group.all_reduce(&mut whole, ReduceOp::Mean)),
                "cannot compute the Mean of Int64 tensors"
            );
            let mut across = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).tr();
            assert_eq!(refusal(group.broadcast(&mut across, 0)), "the tensor is not dense and contiguous");
            assert_eq!(refusal(group.broadcast(&mut whole, 2)), "the root is rank 2, wanted 0 to 1");
            assert_eq!(refusal(group.all_gather(&Tensor::new()).map(drop)), "the tensor is undefined");
            let odd = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
            assert_eq!(
                refusal(group.reduce_scatter(&odd, ReduceOp::Sum).map(drop)),
                "the input has shape [3, 2], wanted one piece for each of 2 ranks"
            );
        }
        check_every_collective(group, Kind::Float);
    });
}

#[test]
fn cpp_exception_becomes_an_error_with_its_text() {
    run_ranks(cpp_exception_becomes_an_error_with_its_text, 2, |me| {
        let communicator = me.connect(2);
        let odd = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
        let error = differentiable::split(communicator.tensor(), &odd, -1).expect_err("5 is not divisible by 2");
        assert_eq!(
            error.to_string(),
            format!(
                "split of group tensor, rank {} of 2: dimension 1 of [3, 5] cannot be divided among 2 ranks",
                me.rank
            )
        );
        let error = differentiable::split(communicator.tensor(), &odd, 7).expect_err("the tensor has no dimension 7");
        assert!(error.to_string().contains("Dimension out of range"), "wrong error text: {error}");
    });
}
