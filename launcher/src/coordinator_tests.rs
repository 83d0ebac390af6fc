//! Laws of the coordinator, on a clock of their own.

use locdiff_core::protocol::SelfCheck;
use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { start: Duration::from_secs(10), stop: Duration::from_secs(2) };

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn hello(rank: u32) -> Event {
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
    Event::Message { rank, message: ToLauncher::Hello(hello) }
}

fn answer(rank: u32) -> JobResult {
    SelfCheck { device: "Cpu".into(), size: rank, error_max: 0.0 }.into()
}

fn result(rank: u32) -> Event {
    Event::Message { rank, message: ToLauncher::Result(Box::new(answer(rank))) }
}

fn failed(rank: u32, of_peer: bool) -> Event {
    let failure = Failure { message: "broken".into(), of_peer, exit_code: 14 };
    Event::Message { rank, message: ToLauncher::Failed(failure) }
}

fn exited(rank: u32, exit: Exit) -> Event {
    Event::Exited { rank, exit }
}

/// A process that ends; what it said before is heard after.
fn ends(gang: &mut Coordinator, rank: u32, exit: Exit, now: Duration) -> Vec<Action> {
    let mut actions = gang.step(exited(rank, exit), now);
    actions.extend(gang.step(Event::Closed(rank), now));
    actions
}

fn parts(rank: u32, step: u64, attempt: u32) -> Event {
    let written = PartsWritten { step, attempt, files: Vec::new(), score: None };
    Event::Message { rank, message: ToLauncher::Parts(written) }
}

#[test]
fn checkpoint_is_committed_when_the_last_rank_of_this_attempt_has_written() {
    let mut gang = running(2);
    assert_eq!(gang.step(parts(1, 10, 7), at(2)), []);
    assert_eq!(gang.step(parts(1, 20, 7), at(2)), [], "another step is another checkpoint");
    let actions = gang.step(parts(0, 10, 7), at(3));
    assert!(matches!(&actions[..], [Action::Commit(parts)] if parts.len() == 2 && parts[0].step == 10), "{actions:?}");
    assert_eq!(gang.step(parts(0, 20, 6), at(4)), [Action::Terminate], "a worker of an older attempt");
    assert_eq!(gang.step(parts(0, 20, 6), at(4)), []);
}

#[test]
fn what_a_worker_said_before_it_ended_is_heard() {
    let mut gang = running(1);
    assert_eq!(gang.step(exited(0, Exit::Code(0)), at(2)), []);
    assert!(gang.outcome().is_none(), "its socket may hold more");
    gang.step(result(0), at(2));
    gang.step(Event::Closed(0), at(2));
    assert!(matches!(gang.outcome(), Some(Outcome::Done(results)) if results.len() == 1));
}

#[test]
fn a_commit_that_fails_ends_the_gang() {
    let mut gang = running(1);
    let failure = Failure { message: "no space".into(), of_peer: false, exit_code: 16 };
    assert_eq!(gang.step(Event::CommitFailed(failure.clone()), at(2)), [Action::Terminate]);
    ends(&mut gang, 0, Exit::Signal(SIGTERM), at(3));
    assert_eq!(causes(&gang), [Cause::CommitFailed(failure)]);
}

fn running(workers: u32) -> Coordinator {
    let mut gang = Coordinator::new(workers as usize, 7, LIMITS, at(0));
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
fn jobs_start_when_all_have_spoken_and_results_keep_their_order() {
    let mut gang = running(3);
    for rank in [2, 0, 1] {
        assert!(gang.step(result(rank), at(2)).is_empty());
        assert_eq!(gang.outcome(), None);
        ends(&mut gang, rank, Exit::Code(0), at(3));
    }
    assert_eq!(gang.outcome(), Some(Outcome::Done(vec![answer(0), answer(1), answer(2)])));
}

#[test]
fn the_store_is_announced_by_rank_0_alone() {
    let listening = |rank| {
        let message = ToLauncher::Listening { address: "127.0.0.1:7".into() };
        Event::Message { rank, message }
    };
    let mut gang = running(2);
    assert_eq!(gang.step(listening(0), at(2)), [Action::Announce("127.0.0.1:7".into())]);
    assert_eq!(gang.step(listening(1), at(2)), [Action::Terminate]);
}

#[test]
fn silence_at_the_start_ends_and_names_the_silent() {
    let mut gang = Coordinator::new(3, 7, LIMITS, at(0));
    gang.step(hello(1), at(1));
    assert_eq!(gang.deadline(), Some(at(10)));
    assert!(gang.step(Event::Tick, at(9)).is_empty());
    assert_eq!(gang.step(Event::Tick, at(10)), [Action::Terminate]);
    assert_eq!(gang.step(Event::Tick, at(12)), [Action::Kill]);
    for rank in 0..3 {
        ends(&mut gang, rank, Exit::Signal(SIGKILL), at(13));
    }
    assert_eq!(causes(&gang)[0], Cause::Late { ranks: vec![0, 2], limit: LIMITS.start });
}

#[test]
fn the_killed_worker_is_the_cause_even_when_its_peer_complains_first() {
    let mut gang = running(2);
    assert_eq!(gang.step(failed(0, true), at(5)), [Action::Terminate]);
    ends(&mut gang, 0, Exit::Code(14), at(5));
    ends(&mut gang, 1, Exit::Signal(SIGKILL), at(5));
    let causes = causes(&gang);
    assert_eq!(causes[0], Cause::Died { rank: 1, exit: Exit::Signal(SIGKILL) });
    assert!(matches!(causes[1], Cause::Failed { rank: 0, .. }));
}

#[test]
fn workers_that_we_end_are_not_causes() {
    let mut gang = running(3);
    assert_eq!(gang.step(failed(1, false), at(5)), [Action::Terminate]);
    ends(&mut gang, 1, Exit::Code(14), at(5));
    ends(&mut gang, 0, Exit::Signal(SIGTERM), at(6));
    assert_eq!(gang.step(Event::Tick, at(7)), [Action::Kill]);
    ends(&mut gang, 2, Exit::Signal(SIGKILL), at(7));
    let causes = causes(&gang);
    assert!(matches!(causes[0], Cause::Failed { rank: 1, .. }), "{causes:?}");
    assert_eq!(causes[1..], [Cause::Unresponsive { rank: 2, limit: LIMITS.stop }], "rank 0 ended as it was asked to");
}

#[test]
fn a_stopped_worker_is_the_cause_of_what_its_peer_complains_of() {
    let mut gang = running(2);
    gang.step(failed(0, true), at(5));
    ends(&mut gang, 0, Exit::Code(14), at(5));
    assert_eq!(gang.step(Event::Tick, at(7)), [Action::Kill]);
    ends(&mut gang, 1, Exit::Signal(SIGKILL), at(7));
    assert_eq!(causes(&gang)[0], Cause::Unresponsive { rank: 1, limit: LIMITS.stop });
}

#[test]
fn a_worker_that_has_given_its_result_must_leave() {
    let mut gang = running(2);
    gang.step(result(0), at(5));
    gang.step(result(1), at(5));
    ends(&mut gang, 1, Exit::Code(0), at(5));
    assert_eq!(gang.deadline(), Some(at(7)));
    assert_eq!(gang.step(Event::Tick, at(7)), [Action::KillOne(0)]);
    assert_eq!(gang.deadline(), None);
    ends(&mut gang, 0, Exit::Signal(SIGKILL), at(7));
    assert!(matches!(gang.outcome(), Some(Outcome::Done(results)) if results.len() == 2));
}

#[test]
fn a_worker_that_hangs_up_and_runs_on_has_failed() {
    let mut gang = running(2);
    gang.step(Event::Closed(1), at(5));
    assert_eq!(gang.step(Event::Tick, at(7)), [Action::Terminate]);
    ends(&mut gang, 1, Exit::Signal(SIGTERM), at(7));
    ends(&mut gang, 0, Exit::Signal(SIGTERM), at(7));
    assert_eq!(causes(&gang), [Cause::Deserted(1)]);
}

#[test]
fn an_end_without_a_result_is_a_failure_even_with_code_0() {
    let mut gang = running(1);
    assert_eq!(ends(&mut gang, 0, Exit::Code(0), at(5)), [Action::Terminate]);
    assert_eq!(causes(&gang), [Cause::Died { rank: 0, exit: Exit::Code(0) }]);
}

#[test]
fn a_worker_that_cannot_be_loaded_does_not_fit() {
    let mut gang = Coordinator::new(1, 7, LIMITS, at(0));
    ends(&mut gang, 0, Exit::Code(EXIT_NOT_LOADED), at(0));
    assert!(matches!(causes(&gang)[0], Cause::Incompatible { rank: 0, .. }));
}

#[test]
fn misfits_say_got_and_wanted() {
    let Event::Message { message: ToLauncher::Hello(good), .. } = hello(0) else { unreachable!() };
    assert_eq!(misfit(&good), None);
    let reason = |change: fn(&mut Hello)| {
        let mut bad = good.clone();
        change(&mut bad);
        misfit(&bad).expect("does not fit")
    };
    assert_eq!(reason(|hello| hello.protocol = 99), format!("it speaks protocol 99, this launcher {PROTOCOL_VERSION}"));
    let want = format!("version {VERSION} (old), this launcher {VERSION} ({REVISION})");
    assert!(reason(|hello| hello.revision = "old".into()).contains(&want));
    assert!(reason(|hello| hello.libtorch_loaded = "2.10.0".into()).contains("libtorch 2.11.0, loaded is 2.10.0"));
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let mut gang = running(1);
    assert_eq!(gang.step(Event::Interrupted, at(5)), [Action::Terminate]);
    assert_eq!(gang.step(Event::Interrupted, at(5)), [Action::Kill]);
    ends(&mut gang, 0, Exit::Signal(SIGKILL), at(5));
    assert_eq!(causes(&gang)[0], Cause::Interrupted);
}

fn any_event(workers: u32) -> impl Strategy<Value = Event> {
    let exit = prop_oneof![(-1_i32..256).prop_map(Exit::Code), (1_i32..32).prop_map(Exit::Signal)];
    prop_oneof![
        (0..workers).prop_map(hello),
        (0..workers).prop_map(result),
        (0..workers, any::<bool>()).prop_map(|(rank, of_peer)| failed(rank, of_peer)),
        (0..workers, exit).prop_map(|(rank, exit)| exited(rank, exit)),
        (0..workers).prop_map(|rank| Event::Garbled { rank, reason: "noise".into() }),
        (0..workers).prop_map(Event::Closed),
        Just(Event::Interrupted),
        Just(Event::Tick),
    ]
}

proptest! {
    /// Whatever happens: once stopping, Terminate comes once and Kill follows by its deadline; success means a result
    /// from everybody; a gang whose processes have all ended has an outcome.
    #[test]
    fn every_gang_ends(events in proptest::collection::vec(any_event(3), 0..40)) {
        let mut gang = Coordinator::new(3, 7, LIMITS, at(0));
        let mut actions = Vec::new();
        for (second, event) in events.into_iter().enumerate() {
            actions.extend(gang.step(event, at(second as u64)));
        }
        for _ in 0..6 {
            if let Some(deadline) = gang.deadline() {
                actions.extend(gang.step(Event::Tick, deadline));
            }
        }
        prop_assert!(gang.deadline().is_none());
        prop_assert!(actions.iter().filter(|action| **action == Action::Terminate).count() <= 1);
        if matches!(gang.phase, Phase::Stopping { .. }) {
            prop_assert!(actions.contains(&Action::Kill));
        }
        for rank in 0..3 {
            ends(&mut gang, rank, Exit::Signal(SIGKILL), at(100));
        }
        match gang.outcome() {
            Some(Outcome::Done(results)) => prop_assert_eq!(results.len(), 3),
            Some(Outcome::Failed(causes)) => prop_assert!(!causes.is_empty()),
            None => prop_assert!(false, "no outcome"),
        }
    }
}
