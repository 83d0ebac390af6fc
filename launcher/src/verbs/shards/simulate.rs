//! `shards simulate`: with several nodes or GPUs, every worker simulates some of the files, and one worker joins them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use locdiff_core::config::RunConfig;
use locdiff_core::files::{Files, parent};
use locdiff_core::protocol::{Job, PieceFolders, PiecesSimulated, ShardsJob, ShardsMade, SimulationStep};
use tempfile::TempDir;

use super::resolved_workers;
use crate::cli::Global;
use crate::error::LaunchError;
use crate::rendezvous::{NodeWorkers, cores};
use crate::supervisor::{Echo, Supervisor};
use crate::verbs::restarts::try_again;
use crate::verbs::run_repeatable;

/// Simulates photos to the folder `out`. `job` makes the job of each step.
pub(super) fn run(
    global: &Global,
    out: &Path,
    job: impl Fn(&RunConfig, SimulationStep) -> ShardsJob,
) -> anyhow::Result<ShardsMade> {
    let (began, (resolved, world)) = (Instant::now(), resolved_workers(global)?);
    let config = &resolved.config;
    let job = |step| Job::Shards(Box::new(job(config, step)));
    let one_worker = world.clone().first_worker_only(cores());
    if !has_other_devices(&world) {
        return run_repeatable(&resolved, &one_worker, &job(SimulationStep::All))?.first();
    }
    // The folders are deleted when the command ends. Each attempt has its own, so that a worker of an earlier attempt
    // that still runs on a lost node cannot disturb this one.
    let mut attempts: Vec<TempDir> = Vec::new();
    let mut supervisor = Supervisor::new()?;
    let folders = try_again(&mut supervisor, &config.supervise, |supervisor| {
        let world = supervisor.gather(&world)?.with_all_cores();
        let earlier = complete_pieces(out, &attempts)?;
        if !earlier.is_empty() {
            tracing::info!("{} files are simulated already", earlier.len());
        }
        let attempt = new_folder(out)?;
        let folders = PieceFolders { earlier, others: place(out, &attempt) };
        attempts.push(attempt);
        let job = job(SimulationStep::Pieces(folders.clone()));
        supervisor.run::<PiecesSimulated>(config, &world, job, 0, &mut Echo)?;
        Ok(folders)
    })?;
    let made = try_again(&mut supervisor, &config.supervise, |supervisor| {
        let job = job(SimulationStep::Join(folders.clone()));
        supervisor.run::<ShardsMade>(config, &one_worker, job, 0, &mut Echo)?.first()
    })?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(ShardsMade { seconds, rows_per_s: made.rows as f64 / seconds, ..made })
}

/// Whether the first worker does not have all cores and GPUs that may be used.
fn has_other_devices(world: &NodeWorkers) -> bool {
    world.slots.iter().any(|slot| slot.node > 0 || slot.gpu != world.slots[0].gpu)
}

/// A new folder next to `out`.
fn new_folder(out: &Path) -> Result<TempDir, LaunchError> {
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    Files::real().create_folders(parent(out))?;
    let made = tempfile::Builder::new().prefix(&format!(".{name}.pieces-")).tempdir_in(parent(out));
    made.map_err(LaunchError::at(parent(out)))
}

/// The folder of an attempt as other nodes can find it: relative to the working folder if `out` is.
fn place(out: &Path, attempt: &TempDir) -> PathBuf {
    parent(out).join(attempt.path().file_name().unwrap_or_default())
}

/// The pieces that earlier attempts have completed. A piece gets its name when it is complete.
fn complete_pieces(out: &Path, attempts: &[TempDir]) -> Result<BTreeMap<u64, PathBuf>, LaunchError> {
    let mut found = BTreeMap::new();
    for attempt in attempts {
        let entries = Files::real().entries(&place(out, attempt))?.into_iter();
        found.extend(entries.filter_map(|entry| Some((PieceFolders::number(entry.file_name()?.to_str()?)?, entry))));
    }
    Ok(found)
}
