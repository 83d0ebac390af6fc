//! Tests of the coordinator on a simulated clock.

use std::sync::LazyLock;

use locdiff_core::config::SuperviseConfig;
use locdiff_core::exit_code::FailureKind;
use locdiff_core::protocol::{SelfCheck, StoreAnswer, StoreOperation, StoreRequest, StoreValue};
use locdiff_core::pulse::{Beat, PhaseTimes, WorkPhase};
use proptest::prelude::*;

use super::*;

/// Short limits for starting and stopping. The limits of the phases are the defaults, which are minutes long.
static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits {
    start: Duration::from_secs(10),
    stop: Duration::from_secs(2),
    preempt: Duration::from_secs(25),
    kill: Duration::from_secs(30),
    phases: PhaseLimits::new(&SuperviseConfig::default()),
});

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn hello(rank: u32) -> GangEvent {
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        rank,
        pid: 100 + rank,
        version: VERSION.into(),
        revision: REVISION.into(),
        libtorch_built: "2.11.0".into(),
        libtorch_loaded: "2.11.0".into(),
        cuda: None,
        nccl: None,
    };
    GangEvent::Message { rank, message: ToLauncher::Hello(hello) }
}

fn answer(rank: u32) -> JobResult {
    SelfCheck { device: "Cpu".into(), size: rank, error_max: 0.0 }.into()
}

fn result(rank: u32) -> GangEvent {
    GangEvent::Message { rank, message: ToLauncher::Result(Box::new(answer(rank))) }
}

fn failed(rank: u32, of_peer: bool) -> GangEvent {
    let failure = Failure { message: "broken".into(), of_peer, exit_code: 14, kind: FailureKind::Crash };
    GangEvent::Message { rank, message: ToLauncher::Failed(failure) }
}

fn exited(rank: u32, exit: Exit) -> GangEvent {
    GangEvent::Exited { rank, exit }
}

/// Tells the coordinator that a process has exited, and then that the socket of this process has closed.
fn end_process(gang: &mut Coordinator, rank: u32, exit: Exit, now: Duration) -> Vec<Action> {
    let mut actions = gang.step(exited(rank, exit), now);
    actions.extend(gang.step(GangEvent::Closed(rank), now));
    actions
}

fn parts(rank: u32, step: u64, attempt: u32) -> GangEvent {
    let written = PartsWritten { step, attempt, files: Vec::new(), score: None };
    GangEvent::Message { rank, message: ToLauncher::Parts(written) }
}

#[test]
fn checkpoint_is_committed_when_the_last_rank_of_this_attempt_has_written() {
    let mut gang = running(2);
    assert_eq!(gang.step(parts(1, 10, 7), at(2)), []);
    assert_eq!(gang.step(parts(1, 20, 7), at(2)), [], "parts of different steps were committed together");
    let actions = gang.step(parts(0, 10, 7), at(3));
    assert!(matches!(&actions[..], [Action::Commit(parts)] if parts.len() == 2 && parts[0].step == 10), "{actions:?}");
    assert_eq!(gang.step(parts(0, 20, 6), at(4)), [Action::Kill], "parts from an older attempt were accepted");
    assert_eq!(gang.step(parts(0, 20, 6), at(4)), []);
}

#[test]
fn messages_sent_before_the_exit_are_still_handled() {
    let mut gang = running(1);
    assert_eq!(gang.step(exited(0, Exit::Code(0)), at(2)), []);
    assert!(gang.outcome().is_none(), "the gang ended before its last message was read");
    gang.step(result(0), at(2));
    gang.step(GangEvent::Closed(0), at(2));
    assert!(matches!(gang.outcome(), Some(Outcome::Done(results)) if results.len() == 1));
}

#[test]
fn failed_commit_stops_the_gang() {
    let mut gang = running(1);
    let failure = Failure { message: "no space".into(), of_peer: false, exit_code: 16, kind: FailureKind::Final };
    assert_eq!(gang.step(GangEvent::ObserverFailed(failure.clone()), at(2)), [Action::Kill]);
    end_process(&mut gang, 0, Exit::Signal(SIGKILL), at(3));
    assert_eq!(causes(&gang), [Cause::ObserverFailed(failure)]);
}

fn running(workers: u32) -> Coordinator {
    let mut gang = Coordinator::new(workers as usize, 7, *LIMITS, at(0));
    for rank in 0..workers {
        let actions = gang.step(hello(rank), at(1));
        assert_eq!(actions, if rank + 1 == workers { vec![Action::StartAll] } else { vec![] });
    }
    gang
}

fn causes(gang: &Coordinator) -> Vec<Cause> {
    match gang.outcome() {
        Some(Outcome::Failed(causes)) => causes,
        other => panic!("wanted a failed gang, got {other:?}"),
    }
}

#[test]
fn jobs_start_after_all_hellos_and_results_are_in_rank_order() {
    let mut gang = running(3);
    for rank in [2, 0, 1] {
        assert!(gang.step(result(rank), at(2)).is_empty());
        assert_eq!(gang.outcome(), None);
        end_process(&mut gang, rank, Exit::Code(0), at(3));
    }
    assert_eq!(gang.outcome(), Some(Outcome::Done(vec![answer(0), answer(1), answer(2)])));
}

#[test]
fn value_of_a_key_goes_to_the_rank_that_waits_for_it() {
    let ask =
        |rank, id, operation| GangEvent::Message { rank, message: ToLauncher::Store(StoreRequest { id, operation }) };
    let mut gang = running(2);
    assert_eq!(gang.step(ask(1, 5, StoreOperation::Get("key".into())), at(2)), []);
    let value = StoreValue(vec![7]);
    let answer = |rank, id, answer| Action::Answer { rank, reply: StoreReply { id, answer } };
    assert_eq!(
        gang.step(ask(0, 1, StoreOperation::Set { key: "key".into(), value: value.clone() }), at(2)),
        [answer(1, 5, StoreAnswer::Value(value)), answer(0, 1, StoreAnswer::Done)]
    );
}

#[test]
fn workers_that_do_not_say_hello_in_time_are_named() {
    let mut gang = Coordinator::new(3, 7, *LIMITS, at(0));
    gang.step(hello(1), at(1));
    assert_eq!(gang.deadline(), Some(at(10)));
    for second in 2..10 {
        assert!(gang.step(GangEvent::Tick, at(second)).is_empty());
    }
    assert_eq!(gang.step(GangEvent::Tick, at(10)), [Action::Kill]);
    for rank in 0..3 {
        end_process(&mut gang, rank, Exit::Signal(SIGKILL), at(11));
    }
    assert_eq!(causes(&gang)[0], Cause::Late { ranks: vec![0, 2], limit: LIMITS.start });
}

#[test]
fn killed_worker_is_the_root_cause_even_if_its_peer_reports_first() {
    let mut gang = running(2);
    assert_eq!(gang.step(failed(0, true), at(5)), [], "the gang did not wait for the root cause");
    end_process(&mut gang, 0, Exit::Code(14), at(5));
    assert_eq!(end_process(&mut gang, 1, Exit::Signal(SIGKILL), at(5)), [Action::Kill]);
    let causes = causes(&gang);
    assert_eq!(causes[0], Cause::Died { rank: 1, exit: Exit::Signal(SIGKILL) });
    assert!(matches!(causes[1], Cause::Failed { rank: 0, .. }));
}

#[test]
fn workers_killed_by_the_launcher_are_not_causes() {
    let mut gang = running(3);
    assert_eq!(gang.step(failed(1, false), at(5)), [Action::Kill]);
    end_process(&mut gang, 1, Exit::Code(14), at(5));
    end_process(&mut gang, 0, Exit::Signal(SIGKILL), at(6));
    end_process(&mut gang, 2, Exit::Signal(SIGKILL), at(7));
    let causes = causes(&gang);
    assert!(matches!(causes[..], [Cause::Failed { rank: 1, .. }]), "{causes:?}");
}

#[test]
fn pause_of_the_launcher_moves_the_deadline_of_the_start() {
    let mut gang = Coordinator::new(2, 7, *LIMITS, at(0));
    gang.step(hello(1), at(1));
    assert!(gang.step(GangEvent::Tick, at(61)).is_empty(), "a launcher that was stopped blames its workers");
    assert_eq!(gang.deadline(), Some(at(70)));
}

#[test]
fn launcher_gives_up_on_a_worker_that_sigkill_does_not_end() {
    let mut gang = running(2);
    gang.step(failed(1, false), at(4));
    end_process(&mut gang, 1, Exit::Code(14), at(4));
    assert_eq!((gang.deadline(), gang.outcome()), (Some(at(34)), None));
    for second in 5..34 {
        gang.step(GangEvent::Tick, at(second));
        assert_eq!(gang.outcome(), None);
    }
    gang.step(GangEvent::Tick, at(34));
    assert_eq!(gang.deadline(), None);
    assert!(matches!(causes(&gang)[..], [Cause::Failed { rank: 1, .. }, Cause::Unkillable(0)]));
}

#[test]
fn stopped_worker_is_the_root_cause_of_its_peers_failure() {
    let mut gang = running(2);
    let beat = Beat { phase: WorkPhase::Step, step: 7, counter: 9, waits_in: None, spent: PhaseTimes::default() };
    gang.step(GangEvent::Message { rank: 1, message: ToLauncher::Beat(beat) }, at(2));
    assert_eq!(gang.step(failed(0, true), at(5)), [Action::AskForBacktrace(1)]);
    end_process(&mut gang, 0, Exit::Code(14), at(5));
    assert_eq!(gang.step(GangEvent::Tick, at(6)), [Action::Kill], "the gang still waits for a root cause");
    end_process(&mut gang, 1, Exit::Signal(SIGKILL), at(8));
    assert!(matches!(&causes(&gang)[0], Cause::Stuck { worker, limit: None } if worker.rank == 1));
}

#[test]
fn worker_that_does_not_exit_after_its_result_is_killed() {
    let mut gang = running(2);
    gang.step(result(0), at(5));
    gang.step(result(1), at(5));
    end_process(&mut gang, 1, Exit::Code(0), at(5));
    assert_eq!(gang.deadline(), Some(at(7)));
    assert_eq!(gang.step(GangEvent::Tick, at(7)), [Action::KillOne(0)]);
    assert_eq!(gang.deadline(), None);
    end_process(&mut gang, 0, Exit::Signal(SIGKILL), at(7));
    assert!(matches!(gang.outcome(), Some(Outcome::Done(results)) if results.len() == 2));
}

#[test]
fn worker_that_closes_its_socket_and_keeps_running_has_failed() {
    let mut gang = running(2);
    gang.step(GangEvent::Closed(1), at(5));
    assert_eq!(gang.step(GangEvent::Tick, at(7)), [Action::Kill]);
    end_process(&mut gang, 1, Exit::Signal(SIGKILL), at(7));
    end_process(&mut gang, 0, Exit::Signal(SIGKILL), at(7));
    assert_eq!(causes(&gang), [Cause::Deserted(1)]);
}

#[test]
fn exit_without_a_result_is_a_failure_even_with_code_0() {
    let mut gang = running(1);
    assert_eq!(end_process(&mut gang, 0, Exit::Code(0), at(5)), [Action::Kill]);
    assert_eq!(causes(&gang), [Cause::Died { rank: 0, exit: Exit::Code(0) }]);
}

#[test]
fn worker_that_cannot_be_loaded_is_incompatible() {
    let mut gang = Coordinator::new(1, 7, *LIMITS, at(0));
    end_process(&mut gang, 0, Exit::Code(EXIT_NOT_LOADED), at(0));
    assert!(matches!(causes(&gang)[0], Cause::Incompatible { rank: 0, .. }));
}

#[test]
fn ranks_with_other_libraries_than_rank_0_are_incompatible() {
    let mut gang = Coordinator::new(2, 7, *LIMITS, at(0));
    gang.step(hello(0), at(0));
    let GangEvent::Message { message: ToLauncher::Hello(mut other), .. } = hello(1) else { unreachable!() };
    other.nccl = Some("2.28.9".into());
    let actions = gang.step(GangEvent::Message { rank: 1, message: ToLauncher::Hello(other) }, at(0));
    assert_eq!(actions, [Action::Kill]);
    (0..2).for_each(|rank| drop(end_process(&mut gang, rank, Exit::Signal(SIGKILL), at(0))));
    let reason = "it has libtorch 2.11.0, CUDA none, NCCL 2.28.9, but rank 0 has libtorch 2.11.0, CUDA none, NCCL none";
    assert_eq!(causes(&gang), [Cause::Incompatible { rank: 1, reason: reason.into() }]);
}

#[test]
fn mismatch_names_got_and_wanted() {
    let GangEvent::Message { message: ToLauncher::Hello(good), .. } = hello(0) else { unreachable!() };
    assert_eq!(mismatch(&good), None);
    let reason = |change: fn(&mut Hello)| {
        let mut bad = good.clone();
        change(&mut bad);
        mismatch(&bad).expect("the worker is incompatible")
    };
    let want = format!("it uses protocol 99, but this launcher uses {PROTOCOL_VERSION}");
    assert_eq!(reason(|hello| hello.protocol = 99), want);
    let want = format!("version {VERSION} (old), but this launcher is version {VERSION} ({REVISION})");
    assert!(reason(|hello| hello.revision = "old".into()).contains(&want));
    assert!(reason(|hello| hello.version = "0.0.0".into()).contains("it is version 0.0.0 ("));
    assert!(reason(|hello| hello.libtorch_loaded = "2.10.0".into()).contains("libtorch 2.11.0, but 2.10.0 is loaded"));
}

#[test]
fn interrupt_without_progress_and_second_interrupt_kill_at_once() {
    let interrupt = |has_progress| GangEvent::Interrupted { has_progress };
    let mut gang = running(1);
    assert_eq!(gang.step(interrupt(false), at(5)), [Action::Kill]);
    let mut gang = running(1);
    assert_eq!(gang.step(interrupt(true), at(5)), [Action::AskToStop]);
    assert_eq!(gang.step(interrupt(true), at(5)), [Action::Kill]);
    end_process(&mut gang, 0, Exit::Signal(SIGKILL), at(5));
    assert_eq!(causes(&gang), [Cause::Interrupted]);
}

#[test]
fn workers_that_stop_on_request_end_with_a_result_and_slow_ones_are_killed() {
    let interrupt = GangEvent::Interrupted { has_progress: true };
    let mut gang = running(1);
    assert_eq!(gang.step(interrupt.clone(), at(5)), [Action::AskToStop]);
    gang.step(result(0), at(20));
    end_process(&mut gang, 0, Exit::Code(0), at(20));
    assert!(matches!(gang.outcome(), Some(Outcome::Done(_))));
    let mut gang = running(1);
    gang.step(interrupt.clone(), at(5));
    for second in 6..30 {
        assert_eq!(gang.step(GangEvent::Tick, at(second)), [], "killed at second {second}");
    }
    assert_eq!(gang.step(GangEvent::Tick, at(30)), [Action::Kill]);
    let mut gang = running(1);
    gang.step(interrupt, at(5));
    end_process(&mut gang, 0, Exit::Signal(11), at(6));
    let causes = causes(&gang);
    assert!(matches!(causes[..], [Cause::Died { .. }, Cause::Interrupted]), "{causes:?}");
}

fn any_event(workers: u32) -> impl Strategy<Value = GangEvent> {
    let exit = prop_oneof![(-1_i32..256).prop_map(Exit::Code), (1_i32..32).prop_map(Exit::Signal)];
    prop_oneof![
        (0..workers).prop_map(hello),
        (0..workers).prop_map(result),
        (0..workers, any::<bool>()).prop_map(|(rank, of_peer)| failed(rank, of_peer)),
        (0..workers, exit).prop_map(|(rank, exit)| exited(rank, exit)),
        (0..workers).prop_map(|rank| GangEvent::Garbled { rank, reason: "noise".into() }),
        (0..workers).prop_map(GangEvent::Closed),
        any::<bool>().prop_map(|has_progress| GangEvent::Interrupted { has_progress }),
        Just(GangEvent::Tick),
    ]
}

#[test]
fn stuck_worker_is_named_before_the_peers_that_waited_for_it() {
    let beat = |rank, phase, counter| GangEvent::Message {
        rank,
        message: ToLauncher::Beat(Beat { phase, step: 7, counter, waits_in: None, spent: PhaseTimes::default() }),
    };
    let mut gang = running(3);
    for second in 2..10 {
        gang.step(beat(0, WorkPhase::Collective, 5), at(second));
        gang.step(beat(1, WorkPhase::Step, 5), at(second));
        gang.step(beat(2, WorkPhase::Collective, 5), at(second));
    }
    assert_eq!(gang.step(failed(0, true), at(10)), [Action::AskForBacktrace(1)]);
    assert_eq!(gang.step(failed(2, true), at(10)), []);
    assert_eq!(gang.step(GangEvent::Tick, at(11)), [Action::Kill]);
    for rank in 0..3 {
        end_process(&mut gang, rank, Exit::Signal(SIGKILL), at(11));
    }
    let Some(Outcome::Failed(causes)) = gang.outcome() else { panic!("the gang did not fail") };
    assert!(matches!(&causes[0], Cause::Stuck { worker, limit: None } if worker.rank == 1), "{causes:?}");
    assert_eq!(causes.len(), 3);
}

#[test]
fn only_worker_that_makes_no_progress_is_stopped_at_its_limit() {
    let mut gang = running(1);
    let mut second = 1;
    let stopped = loop {
        second += 1;
        let beat = Beat { phase: WorkPhase::Data, step: 3, counter: 9, waits_in: None, spent: PhaseTimes::default() };
        gang.step(GangEvent::Message { rank: 0, message: ToLauncher::Beat(beat) }, at(second));
        if gang.step(GangEvent::Tick, at(second)) == [Action::AskForBacktrace(0)] {
            break second;
        }
    };
    assert_eq!(gang.step(GangEvent::Tick, at(stopped + 1)), [Action::Kill]);
    assert_eq!(stopped, 602, "wrong time, wanted supervise.data_timeout_s after the first beat");
}

#[test]
fn exit_code_is_a_cause_while_the_gang_is_being_stopped() {
    let mut gang = running(2);
    gang.step(failed(0, true), at(2));
    assert_eq!(gang.step(GangEvent::Tick, at(3)), [Action::Kill]);
    end_process(&mut gang, 1, Exit::Code(101), at(3));
    end_process(&mut gang, 0, Exit::Code(14), at(3));
    let Some(Outcome::Failed(causes)) = gang.outcome() else { panic!("the gang did not fail") };
    assert_eq!(causes[0], Cause::Died { rank: 1, exit: Exit::Code(101) });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// These rules hold for any sequence of events. A failure stops the gang. The coordinator kills a gang at most
    /// once, and gives up on workers that do not end. A gang whose processes have all ended has an outcome. A gang that
    /// succeeded has a result from every rank.
    #[test]
    fn every_gang_ends(is_running in any::<bool>(), events in proptest::collection::vec(any_event(3), 0..40)) {
        let mut gang = if is_running { running(3) } else { Coordinator::new(3, 7, *LIMITS, at(0)) };
        let mut actions = Vec::new();
        for (second, event) in events.into_iter().enumerate() {
            actions.extend(gang.step(event, at(second as u64)));
            let is_working = matches!(gang.phase, Phase::Starting | Phase::Running);
            prop_assert!(gang.causes.is_empty() || !is_working, "the gang was not stopped after {:?}", gang.causes);
        }
        // Tick every second, like the supervisor, and for longer than the longest limit of a phase (half an hour).
        for second in 40..2000 {
            if gang.deadline().is_some() {
                actions.extend(gang.step(GangEvent::Tick, at(second)));
            }
        }
        prop_assert!(gang.deadline().is_none());
        prop_assert!(actions.iter().filter(|action| **action == Action::Kill).count() <= 1);
        if !gang.causes.is_empty() {
            prop_assert!(actions.contains(&Action::Kill), "{:?}", gang.causes);
        }
        for rank in 0..3 {
            end_process(&mut gang, rank, Exit::Signal(SIGKILL), at(2000));
        }
        match gang.outcome() {
            Some(Outcome::Done(results)) => prop_assert_eq!(results.len(), 3),
            Some(Outcome::Failed(causes)) => prop_assert!(!causes.is_empty()),
            None => prop_assert!(false, "all processes ended, but the gang has no outcome"),
        }
    }
}
