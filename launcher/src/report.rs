//! The error report of a failed gang (the workers of one attempt): the root cause, the other causes, and the last
//! output of the workers that the root cause names.

use std::fmt::Write as _;
use std::time::Duration;

use locdiff_core::exit_code::ExitCode;

use crate::coordinator::{Cause, Exit};
use crate::error::{LaunchError, reported};
use crate::pulses::StuckWorker;

/// The last lines of output of each worker, in rank order.
pub type LastLines = Vec<Vec<String>>;

/// Builds the error of a failed gang. The first of `causes` is the root cause.
pub fn failure(job: &str, causes: &[Cause], pids: &[u32], last_lines: &LastLines) -> LaunchError {
    let Some((first, rest)) = causes.split_first() else {
        return reported!(WorkerFailed, "`{job}` failed, but no cause was recorded: this is a bug");
    };
    if let Some(error) = reported(first).filter(|_| !causes.contains(&Cause::Interrupted)) {
        return error;
    }
    let mut text = describe(first, job, pids);
    for cause in rest {
        let _ = write!(text, "\n  then: {}", describe(cause, job, pids));
    }
    for rank in involved(first) {
        let lines = last_lines.get(rank as usize).map(Vec::as_slice).unwrap_or_default();
        if !lines.is_empty() {
            let _ = write!(text, "\n  last lines of rank {rank}:");
            for line in lines {
                let _ = write!(text, "\n    {line}");
            }
        }
    }
    if causes.contains(&Cause::Interrupted) {
        // An interrupt takes precedence over all other causes, because the user does not want the workers to be
        // restarted.
        if causes.len() > 1 {
            tracing::warn!("{text}");
        }
        return LaunchError::interrupted();
    }
    let code = match first {
        Cause::Incompatible { .. } => ExitCode::WorkerIncompatible,
        Cause::Late { .. } => ExitCode::Timeout,
        _ => ExitCode::WorkerFailed,
    };
    LaunchError::new(code, text)
}

/// The error for a root cause that is an expected failure, such as bad data. It contains only the message of the
/// failure, because the rank and its output would not help the user. `None` for any other root cause.
fn reported(first: &Cause) -> Option<LaunchError> {
    let (Cause::Failed { failure, .. } | Cause::CommitFailed(failure)) = first else { return None };
    let code = ExitCode::from_code(failure.exit_code.into()).filter(|code| *code != ExitCode::WorkerFailed)?;
    Some(LaunchError::new(code, failure.message.clone()))
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
        Cause::CommitFailed(_) | Cause::Interrupted => Vec::new(),
    }
}

fn describe(cause: &Cause, job: &str, pids: &[u32]) -> String {
    let worker = |rank: u32| match pids.get(rank as usize) {
        Some(pid) => format!("worker rank {rank} (pid {pid})"),
        None => format!("worker rank {rank}"),
    };
    match cause {
        Cause::Incompatible { rank, reason } => {
            format!("{} is incompatible with this launcher: {reason}; build both with `make build`", worker(*rank))
        }
        Cause::Late { ranks, limit } => {
            let (workers, output) = match ranks[..] {
                [rank] => (format!("worker rank {rank}"), "its output"),
                _ => {
                    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
                    (format!("workers with ranks {}", ranks.join(", ")), "their output")
                }
            };
            format!(
                "{workers} did not report within {}; look at {output}, or raise supervise.start_timeout_s",
                seconds(*limit)
            )
        }
        Cause::Failed { rank, failure } => format!("{} failed in `{job}`: {}", worker(*rank), failure.message),
        Cause::Died { rank, exit: Exit::Signal(signal) } => {
            format!("{} was killed by {} during `{job}`", worker(*rank), signal_name(*signal))
        }
        Cause::Died { rank, exit: Exit::Code(code) } => {
            let meaning = match ExitCode::from_code(*code) {
                Some(name) => format!(", {name:?}"),
                None => String::new(),
            };
            format!("{} ended without a result during `{job}` (exit code {code}{meaning})", worker(*rank))
        }
        Cause::Deserted(rank) => {
            format!("{} closed its control socket during `{job}` but kept running", worker(*rank))
        }
        Cause::Unkillable(rank) => {
            let wchan = pids.get(*rank as usize).map(|pid| std::fs::read_to_string(format!("/proc/{pid}/wchan")));
            let place =
                wchan.and_then(Result::ok).filter(|name| name.len() > 1).unwrap_or_else(|| "unknown".to_owned());
            format!(
                "{} did not end even after SIGKILL, because it waits inside the kernel ({place}); check its disk and \
                 its GPU",
                worker(*rank)
            )
        }
        Cause::Stuck { worker: stuck, limit } => {
            let reason = match limit {
                Some(limit) => format!("{} allows {}", stuck.phase().limit_name(), seconds(*limit)),
                None => "its peers gave up waiting".to_owned(),
            };
            format!("{} is stuck in `{job}`: {}; {reason}", worker(stuck.rank), describe_pulse(stuck))
        }
        Cause::CommitFailed(failure) => format!("cannot commit a checkpoint: {}", failure.message),
        Cause::Interrupted => "interrupted".to_owned(),
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
    match nix::sys::signal::Signal::try_from(signal) {
        Ok(name) => name.as_str().to_owned(),
        Err(_) => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::HasExitCode;
    use locdiff_core::protocol::Failure;

    use super::*;

    #[test]
    fn report_starts_with_the_root_cause_and_quotes_its_last_lines() {
        let causes = [
            Cause::Died { rank: 1, exit: Exit::Signal(9) },
            Cause::Failed {
                rank: 0,
                failure: Failure { message: "all_reduce failed".into(), of_peer: true, exit_code: 14 },
            },
        ];
        let last_lines = vec![vec!["zero".into()], vec!["loading".into(), "step 7".into()]];
        let error = failure("train", &causes, &[50, 51], &last_lines);
        assert_eq!(
            error.to_string(),
            "worker rank 1 (pid 51) was killed by SIGKILL during `train`\n  \
             then: worker rank 0 (pid 50) failed in `train`: all_reduce failed\n  \
             last lines of rank 1:\n    loading\n    step 7"
        );
        assert_eq!(error.exit_code(), ExitCode::WorkerFailed);
    }

    #[test]
    fn interrupt_takes_precedence_over_other_causes() {
        let failed = |exit_code| Cause::Failed {
            rank: 0,
            failure: Failure { message: "no space".into(), of_peer: false, exit_code },
        };
        for first in [Cause::Died { rank: 1, exit: Exit::Signal(9) }, failed(16), failed(14)] {
            let error = failure("train", &[first, Cause::Interrupted], &[50, 51], &vec![Vec::new(); 2]);
            assert_eq!(error.exit_code(), ExitCode::Interrupted, "{error}");
        }
    }

    #[test]
    fn expected_error_is_reported_by_its_message_alone() {
        let message = "shards/mp16/part-0.parquet: row group 3: column `lat`: row 7: latitude is 91, wanted -90 to 90";
        let failure_of = |exit_code| Failure { message: message.into(), of_peer: false, exit_code };
        let last_lines = vec![vec!["reading".into()]];
        let error = failure("train", &[Cause::Failed { rank: 0, failure: failure_of(20) }], &[50], &last_lines);
        assert_eq!((error.to_string().as_str(), error.exit_code()), (message, ExitCode::BadData));
        let unknown = failure("train", &[Cause::Failed { rank: 0, failure: failure_of(99) }], &[50], &last_lines);
        assert_eq!(unknown.exit_code(), ExitCode::WorkerFailed);
    }
}
