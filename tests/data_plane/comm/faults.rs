//! When one rank dies, stops, never connects or aborts, the other ranks get an error.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use locdiff::comm::{Buckets, CollectiveFailure, CommError, Communicator, ReduceOp};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tch::{Device, Kind, Tensor};

use super::harness::{PATIENCE, run_ranks, run_ranks_with_losses};

/// An error may come this much later than the timeout.
const GRACE: Duration = Duration::from_secs(1);

/// How long ranks wait for a rank that never connects. Even a busy machine can start the other ranks within this time.
const ABSENCE: Duration = Duration::from_secs(5);

fn signal_self(signal: Signal) {
    kill(Pid::this(), signal).expect("a process may signal itself");
    // A process may run for a moment before SIGSTOP stops it.
    std::thread::sleep(Duration::from_millis(500));
}

fn floats(elements: i64) -> Tensor {
    Tensor::ones([elements], (Kind::Float, Device::Cpu))
}

#[test]
fn peer_killed_during_a_collective_is_an_error_on_all_other_ranks() {
    let outcomes =
        run_ranks_with_losses(peer_killed_during_a_collective_is_an_error_on_all_other_ranks, 4, &[2], |me| {
            let communicator = me.connect(1);
            let timeout = Duration::from_secs(5);
            let group = communicator.world().with_timeout(timeout);
            // Exchanging 64 MB takes far longer than killing a process, so rank 2 dies during the collective.
            let mut tensor = floats(16 << 20);
            group.barrier().expect("all ranks take part");
            let started = Instant::now();
            let pending = group.start_all_reduce(&mut tensor, ReduceOp::Sum).expect("the tensor is valid");
            if me.rank == 2 {
                signal_self(Signal::SIGKILL);
            }
            let error = pending.wait().expect_err("rank 2 is dead").to_string();
            let elapsed = started.elapsed();
            assert!(
                error.starts_with(&format!("all_reduce of group world, rank {} of 4: ", me.rank)),
                "wrong error text: {error}"
            );
            assert!(elapsed < timeout + GRACE, "the error came only after {elapsed:?}: {error}");
        });
    assert_eq!(outcomes[2].signal(), Some(Signal::SIGKILL as i32));
    for rank in [0, 1, 3] {
        outcomes[rank].assert_success(rank);
    }
}

#[test]
fn stopped_peer_is_a_timeout() {
    let outcomes = run_ranks_with_losses(stopped_peer_is_a_timeout, 2, &[1], |me| {
        let communicator = me.connect(1);
        let timeout = Duration::from_secs(2);
        communicator.world().barrier().expect("all ranks take part");
        if me.rank == 1 {
            signal_self(Signal::SIGSTOP);
        }
        for (operation, group) in [("all_reduce", communicator.world()), ("barrier", communicator.data())] {
            let group = group.with_timeout(timeout);
            let started = Instant::now();
            let result = match operation {
                "barrier" => group.barrier(),
                _ => group.all_reduce(&mut floats(4), ReduceOp::Sum),
            };
            let elapsed = started.elapsed();
            let error = result.expect_err("rank 1 is stopped").to_string();
            let name = group.name();
            let wanted = format!("{operation} of group {name}, rank 0 of 2: timed out after 2.0 s: ");
            assert!(error.starts_with(&wanted), "wrong error text: {error}");
            assert!(
                elapsed >= timeout - Duration::from_millis(100) && elapsed < timeout + GRACE,
                "the timeout came after {elapsed:?}, wanted 2 s"
            );
        }
    });
    outcomes[0].assert_success(0);
}

#[test]
fn failed_group_fails_every_later_call_at_once() {
    let outcomes = run_ranks_with_losses(failed_group_fails_every_later_call_at_once, 3, &[2], |me| {
        let communicator = me.connect(1);
        let group = communicator.world().with_timeout(Duration::from_secs(1));
        communicator.data().barrier().expect("all ranks take part");
        if me.rank == 2 {
            signal_self(Signal::SIGSTOP);
        }
        group.all_reduce(&mut floats(4), ReduceOp::Sum).expect_err("rank 2 is stopped");
        let started = Instant::now();
        group.with_timeout(PATIENCE).all_reduce(&mut floats(4), ReduceOp::Sum).expect_err("the group has failed");
        assert!(started.elapsed() < PATIENCE / 4, "the call failed only at its timeout, after {:?}", started.elapsed());
    });
    outcomes[0].assert_success(0);
    outcomes[1].assert_success(1);
}

#[test]
fn abort_from_another_thread_ends_pending_collectives_on_all_ranks() {
    run_ranks(abort_from_another_thread_ends_pending_collectives_on_all_ranks, 2, |me| {
        let communicator = me.connect(1);
        let group = communicator.world();
        let mut tensor = floats(4);
        let started = Instant::now();
        if me.rank == 0 {
            let pending = group.start_all_reduce(&mut tensor, ReduceOp::Sum).expect("the tensor is valid");
            let (waiting, is_waiting) = channel();
            let waiter = std::thread::spawn(move || {
                waiting.send(()).expect("the main thread waits");
                pending.wait()
            });
            is_waiting.recv().expect("the thread has started");
            communicator.data().barrier().expect("rank 1 waits too");
            group.abort().expect("a connected group can be aborted");
            let error = waiter.join().expect("the thread does not panic").expect_err("the group was aborted");
            assert!(
                matches!(&error, CommError::Collective { failure: CollectiveFailure::Aborted { .. }, .. }),
                "wrong kind of error: {error}"
            );
            assert!(
                error.to_string().starts_with("all_reduce of group world, rank 0 of 2: aborted: "),
                "wrong error text: {error}"
            );
            group.abort().expect("a second abort is harmless");
        } else {
            // Rank 0 never joins this broadcast, so only the abort can end it.
            let pending = group.start_broadcast(&mut tensor, 0).expect("the tensor is valid");
            communicator.data().barrier().expect("rank 0 may abort");
            let error = pending.wait().expect_err("rank 0 has aborted").to_string();
            assert!(error.starts_with("broadcast of group world, rank 1 of 2: "), "wrong error text: {error}");
        }
        assert!(started.elapsed() < PATIENCE / 4, "the call failed only at its timeout, after {:?}", started.elapsed());
        // The abort of the world group does not affect the data group, which has separate connections.
        communicator.data().barrier().expect("the data group still works");
    });
}

#[test]
fn failed_reduction_in_a_hook_is_an_error_in_finish() {
    run_ranks(failed_reduction_in_a_hook_is_an_error_in_finish, 2, |me| {
        let communicator = me.connect(1);
        let parameter = floats(4).set_requires_grad(true);
        let parameters = [parameter.shallow_clone()];
        let buckets = Buckets::new(communicator.data(), &parameters, usize::MAX).expect("the parameters are valid");
        communicator.data().abort().expect("a connected group can be aborted");
        (&parameter * 2.0).sum(Kind::Float).f_backward().expect("the backward pass ignores an error in a hook");
        let error = buckets.finish().expect_err("the group was aborted").to_string();
        assert!(
            error.starts_with(&format!("all_reduce of group data, rank {} of 2: aborted: ", me.rank)),
            "wrong error text: {error}"
        );
    });
}

#[test]
fn missing_rank_is_named() {
    run_ranks(missing_rank_is_named, 3, |me| {
        let mut rendezvous = me.rendezvous(1);
        rendezvous.connect_timeout = ABSENCE;
        if me.rank == 2 {
            return;
        }
        let error = Communicator::connect(rendezvous).expect_err("rank 2 does not connect");
        let rank = me.rank;
        assert_eq!(error.to_string(), format!("rendezvous of rank {rank}: rank(s) 2 did not join within 5.0 s"));
    });
}

#[test]
fn duplicate_rank_is_refused() {
    let reports = run_ranks(duplicate_rank_is_refused, 2, |me| {
        let mut rendezvous = me.rendezvous(1);
        rendezvous.connect_timeout = ABSENCE;
        if me.rank == 1 {
            rendezvous.rank = 0;
        }
        let error = Communicator::connect(rendezvous).expect_err("two processes have rank 0").to_string();
        me.report(&error);
    });
    // Only the second process to connect is refused. The first process waits for rank 1 until the wait times out.
    let refused = reports.iter().flatten().filter(|text| text.contains("another process has already joined as rank 0"));
    assert_eq!(refused.count(), 1, "wanted exactly one refused process: {reports:?}");
}

#[test]
fn ranks_that_disagree_on_the_layout_are_refused() {
    run_ranks(ranks_that_disagree_on_the_layout_are_refused, 2, |me| {
        let error =
            Communicator::connect(me.rendezvous(me.rank + 1)).expect_err("the ranks' layouts differ").to_string();
        let wanted = match me.rank {
            0 => "rank 1 joined with layout 1 data x 2 tensor, but this rank has layout 2 data x 1 tensor",
            _ => "rank 0 joined with layout 2 data x 1 tensor, but this rank has layout 1 data x 2 tensor",
        };
        assert!(error.ends_with(wanted), "wrong error text: {error}");
    });
}

/// The local addresses on which this process listens for TCP connections.
fn listening_addresses() -> Vec<Ipv4Addr> {
    let sockets: HashSet<String> = std::fs::read_dir("/proc/self/fd")
        .expect("Linux has /proc")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut found = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        for fields in text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()) {
            // Column 1 is the local address, column 3 the state (0A means listening), column 9 the inode of the socket.
            if fields[3] == "0A" && sockets.contains(fields[9]) {
                let address = fields[1].split(':').next().expect("split gives at least one part");
                // An IPv4-mapped IPv6 address ends with the IPv4 address, so only the last 8 digits are read.
                let address =
                    u32::from_str_radix(&address[address.len() - 8..], 16).expect("the address is hexadecimal");
                found.push(Ipv4Addr::from(address.to_le_bytes()));
            }
        }
    }
    found
}

#[test]
fn gloo_listens_only_on_the_given_address() {
    run_ranks(gloo_listens_only_on_the_given_address, 2, |me| {
        let communicator = me.connect(1);
        let addresses = listening_addresses();
        assert!(!addresses.is_empty());
        assert!(
            addresses.iter().all(|address| *address == Ipv4Addr::LOCALHOST),
            "the process listens on {addresses:?}, wanted only 127.0.0.1"
        );
        communicator.world().barrier().expect("both ranks have checked the addresses");
    });
}
