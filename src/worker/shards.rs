//! Jobs on shards. Each job runs on one worker, calls [`crate::shards`] or a related module, and returns the result for
//! the launcher.

use std::path::Path;
use std::time::Instant;

use locdiff_core::config::ShardsConfig;
use locdiff_core::protocol::{
    GeoclipImported, JobResult, PiecesSimulated, ShardsJob, ShardsMade, SimulationStep, Verified, WorkerSlot,
};

use super::error::JobError;
use super::{bench_shards, eval};
use crate::eval::locate::device;
use crate::geoclip;
use crate::shards::{self, Blocks, Build, Coordinates, Dataset, Manifest, Replay};
use crate::simulate::{Simulation, join_pieces, simulate, simulate_pieces};

/// Runs the job.
pub(super) fn run(job: &ShardsJob, slot: &WorkerSlot) -> anyhow::Result<JobResult> {
    let start = Instant::now();
    Ok(match job {
        ShardsJob::Bench { python } => bench_shards::run(python.as_deref())?.into(),
        ShardsJob::Truth { out, config } => eval::write_truth(config, out)?.into(),
        ShardsJob::Verify { location, epochs, world_sizes, global_batch, seed, config } => {
            let replay =
                Replay { epochs: *epochs, world_sizes: world_sizes.clone(), global_batch: *global_batch, seed: *seed };
            verify(location, config, &replay)?.into()
        }
        ShardsJob::Inspect { location, config } => {
            let opened = Dataset::open_with(Coordinates::Stored, location, config);
            opened.and_then(|dataset| shards::inspect(&dataset, config)).map_err(JobError::from)?.into()
        }
        ShardsJob::Simulate {
            world,
            rows,
            seed,
            out,
            views,
            coordinates,
            cells,
            geoclip,
            overwrite,
            rows_per_file,
            step,
        } => {
            let simulation = Simulation {
                world: *world,
                rows: *rows,
                seed: *seed,
                views: *views,
                coordinates: coordinates.clone(),
                cells: *cells,
                geoclip: geoclip.clone(),
                overwrite: *overwrite,
                rows_per_file: *rows_per_file,
                device: device(slot),
                threads: slot.threads as usize,
                chunk_rows: None,
            };
            let made = match step {
                SimulationStep::All => simulate(&simulation, out),
                SimulationStep::Join(folders) => join_pieces(&simulation, folders, out),
                SimulationStep::Pieces(folders) => {
                    let own = simulate_pieces(&simulation, folders, out, (slot.rank, slot.world));
                    return Ok(PiecesSimulated { rows: own.map_err(JobError::from)? }.into());
                }
            };
            summary(made.map_err(JobError::from)?, out, 0, start).into()
        }
        ShardsJob::Build { table, places, embeddings, out, overwrite, config } => {
            let (table, places) = (table.as_deref(), *places);
            let inputs = Build { table, places, embeddings, config, overwrite: *overwrite };
            let (manifest, skipped) = shards::build(&inputs, out).map_err(JobError::from)?;
            summary(manifest, out, skipped, start).into()
        }
        ShardsJob::GeoclipImport { wheel, out, overwrite } => {
            let (manifest, written) = geoclip::import(wheel, out, *overwrite).map_err(JobError::from)?;
            let (source, files) = (manifest.source, manifest.files);
            GeoclipImported { out: out.clone(), source, files, written, seconds: start.elapsed().as_secs_f64() }.into()
        }
    })
}

/// Verifies every byte and every value, and lists what is wrong in `problems`. If nothing is wrong, also replays the
/// plan for the requested number of epochs.
fn verify(location: &str, config: &ShardsConfig, replay: &Replay) -> Result<Verified, JobError> {
    replay.check()?;
    // Only training, whose order is replayed, needs coordinates.
    let coordinates = if replay.epochs > 0 { Coordinates::Needed } else { Coordinates::Stored };
    let mut dataset = Dataset::open_with(coordinates, location, config)?;
    if let Some(message) = dataset.forget_ambiguous_ids() {
        tracing::warn!("{message}");
    }
    let (problems, mask) = shards::verify(&dataset, config.on_bad_rows)?;
    let (skipped_rows, skipped) = (mask.count(), mask.describe(&dataset));
    let plan = match replay.epochs {
        0 => None,
        _ if !problems.is_empty() => None,
        _ => Some(replay.run(&dataset, mask, config)?),
    };
    Ok(Verified {
        ok: problems.is_empty(),
        rows: dataset.rows(),
        rows_with_coordinates: dataset.rows_with_coordinates(),
        skipped_rows,
        skipped,
        files: dataset.file_count(),
        row_groups: dataset.block_rows().len(),
        width: dataset.width(),
        views: dataset.stored_views(),
        manifest: dataset.manifest().is_some(),
        fingerprint: format!("{:016x}", dataset.fingerprint()),
        problems,
        plan,
    })
}

/// The summary of a new folder of shards.
fn summary(manifest: Manifest, out: &Path, skipped: u64, start: Instant) -> ShardsMade {
    let seconds = start.elapsed().as_secs_f64();
    let Manifest { rows, views, width, source, .. } = manifest;
    ShardsMade { out: out.to_owned(), rows, views, width, source, skipped, seconds, rows_per_s: rows as f64 / seconds }
}
