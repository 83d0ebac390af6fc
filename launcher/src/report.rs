//! The error report of a failed gang (the workers of one attempt): the root cause, the other causes, how each worker
//! ended, and the last output of the workers that the root cause names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, FailureKind};
use locdiff_core::protocol::Failure;
use locdiff_core::pulse::{Beat, WorkPhase};
use nix::sys::signal::Signal;

use crate::coordinator::{Cause, Exit};
use crate::error::{GangFailure, LaunchError, RankEnd, reported};
use crate::pulses::StuckWorker;
use crate::terminal::not_repeated;

/// Signals that end a program because of an error in the program itself.
const CRASH_SIGNALS: [Signal; 5] = [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGABRT, Signal::SIGFPE, Signal::SIGILL];

/// Exit code of a Rust program that panicked.
const EXIT_PANIC: i32 = 101;

/// What is known about one worker of a failed gang.
#[derive(Debug, Clone, Default)]
pub struct EndedWorker {
    /// Name of the worker's machine.
    pub host: String,
    /// Number of the worker's node.
    pub node: u32,
    /// Process id of the worker.
    pub pid: u32,
    /// GPU of the worker; `None` if it runs on the CPU.
    pub gpu: Option<u32>,
    /// Last heartbeat of the worker.
    pub last_beat: Option<Beat>,
    /// How the process ended.
    pub exit: Option<Exit>,
    /// The last lines that the worker printed.
    pub last_lines: Vec<String>,
}

/// Builds the error of a failed gang. The first of `causes` is the root cause. `workers` has all workers in rank order.
/// `oom_killed` says whether the kernel's OOM killer has killed a process since the gang began.
pub fn failure(job: &str, causes: &[Cause], workers: &[EndedWorker], oom_killed: bool) -> LaunchError {
    let Some(first) = causes.first() else {
        return reported!(WorkerFailed, "`{job}` failed, but no cause was recorded: this is a bug");
    };
    let told = FailureReport { job, workers, oom_killed };
    let ranks: Vec<RankEnd> =
        workers.iter().enumerate().map(|(rank, worker)| told.rank(rank, worker, causes)).collect();
    let lines = told.folded(causes);
    if causes.contains(&Cause::Interrupted) {
        // An interrupt takes precedence over all other causes, because the user does not want the workers to be
        // restarted.
        if causes.len() > 1 {
            tracing::warn!("{}", told.text(first, &lines, &ranks));
        }
        return LaunchError::interrupted();
    }
    let error = match expected(first) {
        Some(error) => error,
        None => LaunchError::new(exit_code(first), told.text(first, &lines, &ranks)),
    };
    let step = involved(first).first().and_then(|rank| ranks.get(*rank as usize)).map_or(0, |rank| rank.step);
    let node = match first {
        // The node is there, but could not start its workers.
        Cause::NodeLost { node, failure } if failure.kind != FailureKind::Lost => Some(*node),
        _ => involved(first).first().and_then(|rank| workers.get(*rank as usize)).map(|worker| worker.node),
    };
    let is_held = causes.iter().any(|cause| matches!(cause, Cause::Unkillable(_)));
    let first_cause = lines[0].clone();
    let gang = GangFailure { what: what(first), step, node, is_held, first_cause, causes: lines, ranks };
    error.with_kind(if is_held { FailureKind::Final } else { kind(first) }).with_gang(gang)
}

/// The short error for an expected failure, such as bad data. It contains only the message of the failure, because the
/// rank and its output would not help the user. `None` if the root cause is not an expected failure. Also `None` if the
/// workers may be restarted after the failure, because the user then needs the host and the device of the rank.
fn expected(first: &Cause) -> Option<LaunchError> {
    let (Cause::Failed { failure, .. } | Cause::ObserverFailed(failure)) = first else { return None };
    let code = exit_code(first);
    let is_brief = code != ExitCode::WorkerFailed && failure.kind == FailureKind::Final;
    is_brief.then(|| LaunchError::new(code, failure.message.clone()))
}

fn exit_code(first: &Cause) -> ExitCode {
    match first {
        Cause::Failed { failure, .. } | Cause::NodeLost { failure, .. } | Cause::ObserverFailed(failure) => {
            ExitCode::from_code(failure.exit_code.into()).unwrap_or(ExitCode::WorkerFailed)
        }
        Cause::Incompatible { .. } => ExitCode::WorkerIncompatible,
        Cause::Late { .. } => ExitCode::Timeout,
        _ => ExitCode::WorkerFailed,
    }
}

fn kind(first: &Cause) -> FailureKind {
    match first {
        Cause::Failed { failure, .. } | Cause::NodeLost { failure, .. } | Cause::ObserverFailed(failure) => {
            failure.kind
        }
        Cause::Died { exit: Exit::Code(_), .. } => FailureKind::Crash,
        Cause::Died { exit: Exit::Signal(signal), .. } => match Signal::try_from(*signal) {
            Ok(signal) if CRASH_SIGNALS.contains(&signal) => FailureKind::Crash,
            _ => FailureKind::Lost,
        },
        Cause::Died { exit: Exit::Lost, .. } => FailureKind::Lost,
        Cause::Incompatible { .. } | Cause::Interrupted | Cause::Unkillable(_) => FailureKind::Final,
        Cause::Late { .. } | Cause::Deserted(_) | Cause::Stuck { .. } => FailureKind::Lost,
    }
}

/// A short name for what happened. Two failures of the same sort have the same name, so the name contains no rank,
/// process id or time.
fn what(first: &Cause) -> String {
    match first {
        Cause::Failed { failure, .. } | Cause::ObserverFailed(failure) => match &failure.message {
            _ if failure.kind == FailureKind::Outage => "outage".to_owned(),
            text if is_out_of_memory(text) => "exhausted GPU memory".to_owned(),
            text if text.contains("panicked") => "panic".to_owned(),
            text if text.contains("CUDA") => "CUDA error".to_owned(),
            _ => "error".to_owned(),
        },
        Cause::Died { exit: Exit::Code(EXIT_PANIC), .. } => "panic".to_owned(),
        Cause::Died { exit: Exit::Code(code), .. } => format!("exit code {code}"),
        Cause::Died { exit: Exit::Signal(signal), .. } => signal_name(*signal),
        Cause::Died { exit: Exit::Lost, .. } => "lost node".to_owned(),
        Cause::Incompatible { .. } => "incompatible worker".to_owned(),
        Cause::Late { .. } => "late start".to_owned(),
        Cause::Deserted(_) | Cause::Unkillable(_) | Cause::Stuck { .. } => "stuck worker".to_owned(),
        Cause::NodeLost { .. } => "lost node".to_owned(),
        Cause::Interrupted => "interrupt".to_owned(),
    }
}

fn is_out_of_memory(text: &str) -> bool {
    text.to_lowercase().contains("out of memory")
}

fn involved(cause: &Cause) -> Vec<u32> {
    match cause {
        Cause::Incompatible { rank, .. }
        | Cause::Failed { rank, .. }
        | Cause::Died { rank, .. }
        | Cause::Deserted(rank)
        | Cause::Unkillable(rank)
        | Cause::Stuck { worker: StuckWorker { rank, .. }, .. } => vec![*rank],
        Cause::Late { ranks, .. } => ranks.clone(),
        Cause::NodeLost { .. } | Cause::ObserverFailed(_) | Cause::Interrupted => Vec::new(),
    }
}

/// The facts from which the report is written.
struct FailureReport<'a> {
    job: &'a str,
    workers: &'a [EndedWorker],
    oom_killed: bool,
}

impl FailureReport<'_> {
    fn text(&self, first: &Cause, causes: &[String], ranks: &[RankEnd]) -> String {
        let mut text = causes[0].clone();
        for cause in &causes[1..] {
            let _ = write!(text, "\n  then: {cause}");
        }
        for RankEnd { rank, host, pid, device, phase, step, end, .. } in ranks {
            let step = if *step > 0 { format!(" of step {step}") } else { String::new() };
            let _ = write!(text, "\n  rank {rank}: {host}, pid {pid}, {device}, phase {phase}{step}: {end}");
        }
        for rank in involved(first) {
            let lines = ranks.get(rank as usize).map(|rank| rank.last_lines.as_slice()).unwrap_or_default();
            let lines = not_repeated(lines.iter().map(String::as_str), &causes.join("\n"));
            if !lines.is_empty() {
                let _ = write!(text, "\n  last lines of rank {rank}:\n    {}", lines.join("\n    "));
            }
        }
        text
    }

    fn rank(&self, rank: usize, worker: &EndedWorker, causes: &[Cause]) -> RankEnd {
        let number = rank as u32;
        let is_own = causes.iter().any(|cause| matches!(cause, Cause::Died { rank, .. } if *rank == number));
        let reported = causes.iter().any(|cause| matches!(cause, Cause::Failed { rank, .. } if *rank == number));
        let end = match worker.exit {
            _ if reported => "reported a failure".to_owned(),
            None => "still running".to_owned(),
            Some(Exit::Lost) => "connection lost".to_owned(),
            Some(Exit::Signal(_)) if !is_own => "stopped by the launcher".to_owned(),
            Some(Exit::Signal(signal)) => self.death_by(signal),
            Some(Exit::Code(code)) => format!("exit code {code}{}", code_meaning(code)),
        };
        let phase = match &worker.last_beat {
            // After its job, a worker returns to the phase `start` until it exits.
            Some(beat) if beat.phase == WorkPhase::Start && beat.step > 0 => "end".to_owned(),
            Some(beat) => beat.phase.to_string(),
            None => WorkPhase::Start.to_string(),
        };
        RankEnd {
            rank: number,
            host: worker.host.clone(),
            pid: worker.pid,
            device: worker.gpu.map_or_else(|| "cpu".to_owned(), |gpu| format!("GPU {gpu}")),
            phase,
            step: worker.last_beat.as_ref().map_or(0, |beat| beat.step),
            end,
            last_lines: worker.last_lines.clone(),
        }
    }

    /// One line per cause. Failures of several ranks whose messages differ only in digits share one line, at the
    /// position of the first such failure.
    fn folded(&self, causes: &[Cause]) -> Vec<String> {
        let alike = |text: &str| text.chars().filter(|letter| !letter.is_ascii_digit()).collect::<String>();
        let mut groups: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for cause in causes {
            if let Cause::Failed { rank, failure } = cause {
                groups.entry(alike(&failure.message)).or_default().push(*rank);
            }
        }
        let mut lines = Vec::new();
        for cause in causes {
            match cause {
                Cause::Failed { failure, .. } => {
                    let ranks = groups.remove(&alike(&failure.message));
                    lines.extend(ranks.map(|ranks| self.failed(&ranks, failure)));
                }
                other => lines.push(self.describe(other)),
            }
        }
        lines
    }

    fn failed(&self, ranks: &[u32], failure: &Failure) -> String {
        let workers = match ranks {
            [rank] => self.worker(*rank),
            _ => format!("workers with ranks {}", rank_list(ranks)),
        };
        let advice = if is_out_of_memory(&failure.message) {
            "; the GPU's memory is exhausted: lower train.micro_batch, or set shards.cache to host or none"
        } else {
            ""
        };
        format!("{workers} failed in `{}`: {}{advice}", self.job, failure.message)
    }

    fn worker(&self, rank: u32) -> String {
        match self.workers.get(rank as usize) {
            Some(worker) => format!("worker rank {rank} (pid {})", worker.pid),
            None => format!("worker rank {rank}"),
        }
    }

    fn death_by(&self, signal: i32) -> String {
        if self.oom_killed && signal == Signal::SIGKILL as i32 {
            return "killed by the kernel because memory ran out (OOM killer, SIGKILL)".to_owned();
        }
        let meaning = match Signal::try_from(signal) {
            Ok(Signal::SIGSEGV | Signal::SIGBUS) => ", an invalid memory access",
            Ok(Signal::SIGABRT) => ", an abort by the program or one of its libraries",
            Ok(Signal::SIGFPE) => ", an invalid arithmetic operation",
            Ok(Signal::SIGILL) => ", an instruction that this CPU does not have",
            _ => "",
        };
        format!("killed by {}{meaning}", signal_name(signal))
    }

    fn describe(&self, cause: &Cause) -> String {
        let job = self.job;
        match cause {
            Cause::Incompatible { rank, reason } => {
                let worker = self.worker(*rank);
                format!("{worker} is incompatible: {reason}; build all programs with `make build`")
            }
            Cause::Late { ranks, limit } => {
                let (workers, output) = match ranks[..] {
                    [rank] => (format!("worker rank {rank}"), "its output"),
                    _ => (format!("workers with ranks {}", rank_list(ranks)), "their output"),
                };
                let limit = seconds(*limit);
                format!("{workers} did not report within {limit}; look at {output}, or raise supervise.start_timeout_s")
            }
            Cause::Failed { rank, failure } => self.failed(&[*rank], failure),
            Cause::Died { rank, exit: Exit::Signal(signal) } => {
                let advice = if self.oom_killed && *signal == Signal::SIGKILL as i32 {
                    "; give the job more memory, or set shards.cache = \"none\" and lower shards.prefetch_batches"
                } else {
                    ""
                };
                format!("{} was {} during `{job}`{advice}", self.worker(*rank), self.death_by(*signal))
            }
            Cause::Died { rank, exit: Exit::Code(code) } => {
                let (worker, meaning) = (self.worker(*rank), code_meaning(*code));
                format!("{worker} ended without a result during `{job}` (exit code {code}{meaning})")
            }
            Cause::Died { rank, exit: Exit::Lost } => format!("{} was lost during `{job}`", self.worker(*rank)),
            Cause::Deserted(rank) => {
                format!("{} closed its control socket during `{job}` but kept running", self.worker(*rank))
            }
            Cause::Unkillable(rank) => {
                // The process ids of other machines mean nothing here.
                let here = self.workers.get(*rank as usize).filter(|worker| worker.node == 0);
                let place = here.and_then(|worker| wait_channel(worker.pid)).unwrap_or_else(|| "unknown".to_owned());
                format!(
                    "{} did not end even after SIGKILL, because it waits inside the kernel ({place}); check its disk \
                     and its GPU",
                    self.worker(*rank)
                )
            }
            Cause::Stuck { worker: stuck, limit } => {
                let reason = match limit {
                    Some(limit) => format!("{} allows {}", stuck.phase().limit_name(), seconds(*limit)),
                    None => "its peers gave up waiting".to_owned(),
                };
                let awaited = self.awaited(stuck.rank);
                format!("{} is stuck in `{job}`: {}{awaited}; {reason}", self.worker(stuck.rank), describe_pulse(stuck))
            }
            Cause::NodeLost { failure, .. } | Cause::ObserverFailed(failure) => failure.message.clone(),
            Cause::Interrupted => "stopped by a signal".to_owned(),
        }
    }
}

impl FailureReport<'_> {
    /// Text about the collective operation in which other workers wait for the worker `rank`; empty if no worker waits.
    fn awaited(&self, rank: u32) -> String {
        let others = (0..).zip(self.workers).filter(|(other, _)| *other != rank);
        let operations = others.filter_map(|(_, worker)| worker.last_beat.as_ref()?.waits_in.as_deref());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        operations.for_each(|operation| *counts.entry(operation).or_default() += 1);
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        most.map_or_else(String::new, |(operation, _)| format!(", while others wait in {operation}"))
    }
}

fn describe_pulse(stuck: &StuckWorker) -> String {
    let silent = seconds(stuck.silent);
    let Some(last) = &stuck.last else { return format!("it sent no heartbeat for {silent}") };
    let step = if last.step > 0 { format!(" of step {}", last.step) } else { String::new() };
    let waits = last.waits_in.as_ref().map_or_else(String::new, |operation| format!(", waiting in {operation}"));
    format!("no progress for {silent} in phase {}{step}{waits}", last.phase)
}

fn seconds(limit: Duration) -> String {
    format!("{:.1} s", limit.as_secs_f64())
}

fn signal_name(signal: i32) -> String {
    match Signal::try_from(signal) {
        Ok(name) => name.as_str().to_owned(),
        Err(_) => format!("signal {signal}"),
    }
}

fn code_meaning(code: i32) -> String {
    match ExitCode::from_code(code) {
        _ if code == EXIT_PANIC => ", a panic".to_owned(),
        Some(name) => format!(", {}", words(&format!("{name:?}"))),
        None => String::new(),
    }
}

/// The words of a name in camel case: `BadData` becomes `bad data`.
fn words(name: &str) -> String {
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}

/// Ranks as a list of ranges, such as `0, 2-5`.
fn rank_list(ranks: &[u32]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    let ranges = ranks.chunk_by(|one, next| *next == one + 1).map(|range| match range {
        [rank] => rank.to_string(),
        [first, second] => format!("{first}, {second}"),
        _ => format!("{}-{}", range[0], range[range.len() - 1]),
    });
    ranges.collect::<Vec<_>>().join(", ")
}

/// Returns the kernel function in which a thread of the process is in uninterruptible sleep (state D). If no thread is
/// in this state, returns the kernel function in which the main thread waits. `None` if the function is unknown.
fn wait_channel(pid: u32) -> Option<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().map(|task| task.path());
    let in_state_d = |task: &PathBuf| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('D'))
    };
    let task = tasks.into_iter().find(in_state_d).unwrap_or_else(|| PathBuf::from(format!("/proc/{pid}")));
    std::fs::read_to_string(task.join("wchan")).ok().filter(|name| name.len() > 1)
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::HasExitCode;
    use locdiff_core::pulse::PhaseTimes;

    use super::*;

    fn worker(pid: u32, lines: &[&str]) -> EndedWorker {
        let last_lines = lines.iter().map(|line| (*line).to_owned()).collect();
        let beat = Beat { phase: WorkPhase::Step, step: 7, counter: 1, waits_in: None, spent: PhaseTimes::default() };
        EndedWorker {
            host: "here".into(),
            pid,
            last_beat: Some(beat),
            exit: Some(Exit::Code(14)),
            last_lines,
            ..EndedWorker::default()
        }
    }

    fn failed(rank: u32, message: &str, exit_code: u8) -> Cause {
        let kind = FailureKind::of_code(ExitCode::from_code(exit_code.into()).unwrap_or(ExitCode::WorkerFailed));
        Cause::Failed { rank, failure: Failure { message: message.into(), of_peer: false, exit_code, kind } }
    }

    fn died(rank: u32, exit: Exit) -> Cause {
        Cause::Died { rank, exit }
    }

    #[test]
    fn report_names_the_root_cause_folds_victims_and_has_a_line_for_every_rank() {
        let broken = |rank: u32| failed(rank, &format!("all_reduce, rank {rank} of 4: closed by peer"), 14);
        let causes = [died(1, Exit::Signal(9)), broken(0), broken(2), broken(3)];
        let mut workers: Vec<EndedWorker> = (50..54).map(|pid| worker(pid, &["step 7"])).collect();
        workers[1].exit = Some(Exit::Signal(9));
        let error = failure("train", &causes, &workers, false);
        assert_eq!(
            error.to_string(),
            format!(
                "worker rank 1 (pid 51) was killed by SIGKILL during `train`\n  \
                 then: workers with ranks 0, 2, 3 failed in `train`: all_reduce, rank 0 of 4: closed by peer\n  \
                 rank 0: here, pid 50, cpu, phase step of step 7: reported a failure\n  \
                 rank 1: here, pid 51, cpu, phase step of step 7: killed by SIGKILL\n  \
                 rank 2: here, pid 52, cpu, phase step of step 7: reported a failure\n  \
                 rank 3: here, pid 53, cpu, phase step of step 7: reported a failure\n  \
                 last lines of rank 1:\n    step 7"
            )
        );
        assert_eq!((error.exit_code(), error.failure_kind()), (ExitCode::WorkerFailed, FailureKind::Lost));
        let gang = error.gang().expect("a gang failed");
        assert_eq!((gang.what.as_str(), gang.step, gang.causes.len(), gang.ranks.len()), ("SIGKILL", 7, 2, 4));
    }

    #[test]
    fn signals_panics_and_exhausted_memory_are_decoded() {
        let tell = |cause: Cause, oom_killed| failure("train", &[cause], &[worker(50, &[])], oom_killed);
        for (cause, oom_killed, part, what, kind) in [
            (died(0, Exit::Signal(11)), false, "SIGSEGV, an invalid memory access", "SIGSEGV", FailureKind::Crash),
            (died(0, Exit::Signal(6)), false, "SIGABRT, an abort", "SIGABRT", FailureKind::Crash),
            (died(0, Exit::Signal(9)), true, "memory ran out (OOM killer", "SIGKILL", FailureKind::Lost),
            (died(0, Exit::Signal(9)), false, "killed by SIGKILL during", "SIGKILL", FailureKind::Lost),
            (died(0, Exit::Code(101)), false, "exit code 101, a panic", "panic", FailureKind::Crash),
            (died(0, Exit::Code(3)), false, "(exit code 3)", "exit code 3", FailureKind::Crash),
            (died(0, Exit::Code(20)), false, "(exit code 20, bad data)", "exit code 20", FailureKind::Crash),
            (
                failed(0, "CUDA out of memory. Tried to allocate 2 GiB", 14),
                false,
                "lower train.micro_batch",
                "exhausted GPU memory",
                FailureKind::Crash,
            ),
            (failed(0, "copy: CUDA error: unknown", 14), false, "CUDA error", "CUDA error", FailureKind::Crash),
        ] {
            let error = tell(cause, oom_killed);
            assert!(error.to_string().contains(part), "missing {part:?} in {error}");
            let gang = error.gang().expect("a gang failed");
            assert_eq!((gang.what.as_str(), error.failure_kind()), (what, kind));
        }
    }

    #[test]
    fn last_lines_do_not_repeat_the_cause() {
        let lines = ["step 7", "2026-11-16T16:04:05.000001Z ERROR copy: CUDA error: unknown"];
        let error = failure("train", &[failed(0, "copy: CUDA error: unknown", 14)], &[worker(50, &lines)], false);
        assert_eq!(error.to_string().matches("CUDA error: unknown").count(), 1, "{error}");
        assert!(error.to_string().ends_with("last lines of rank 0:\n    step 7"), "{error}");
    }

    #[test]
    fn interrupt_takes_precedence_over_other_causes() {
        for first in [died(1, Exit::Signal(9)), failed(0, "no space", 16), failed(0, "no space", 14)] {
            let error = failure("train", &[first, Cause::Interrupted], &[worker(50, &[]), worker(51, &[])], false);
            assert_eq!(error.exit_code(), ExitCode::Interrupted, "{error}");
        }
    }

    #[test]
    fn expected_error_is_reported_by_its_message_alone() {
        let message = "shards/mp16/part-0.parquet: row group 3: column `lat`: row 7: latitude is 91, wanted -90 to 90";
        let error = failure("train", &[failed(0, message, 20)], &[worker(50, &["reading"])], false);
        assert_eq!((error.to_string().as_str(), error.exit_code()), (message, ExitCode::BadData));
        assert_eq!(error.failure_kind(), FailureKind::Final);
        let unknown = failure("train", &[failed(0, message, 99)], &[worker(50, &[])], false);
        assert_eq!(unknown.exit_code(), ExitCode::WorkerFailed);
    }

    #[test]
    fn ranks_are_listed_as_ranges() {
        assert_eq!(rank_list(&[3, 1, 2, 7, 0, 5]), "0-3, 5, 7");
        assert_eq!(rank_list(&[4]), "4");
    }
}
