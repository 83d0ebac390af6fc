//! Jobs of one worker on shards: each calls its part of [`crate::shards`] and hands the result to the launcher as JSON.

use std::path::Path;
use std::time::Instant;

use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::protocol::{Place, ShardsJob};
use serde_json::{Value, json};
use tch::Device;

use super::bench_shards;
use crate::geoclip;
use crate::shards::{self, Blocks, Build, Dataset, Manifest, Mask, Replay, ShardsError};
use crate::simulate::{Simulation, simulate};

/// Does the job; the value is what the launcher gets.
pub(super) fn run(job: &ShardsJob, place: &Place) -> anyhow::Result<Value> {
    let start = Instant::now();
    match job {
        ShardsJob::Verify { location, epochs, world_sizes, global_batch, seed, config } => {
            let replay =
                Replay { epochs: *epochs, world_sizes: world_sizes.clone(), global_batch: *global_batch, seed: *seed };
            verify(location, config, &replay)
        }
        ShardsJob::Inspect { location, config } => {
            Ok(serde_json::to_value(shards::inspect(&Dataset::open(location, config)?, config)?)?)
        }
        ShardsJob::Bench { python } => Ok(serde_json::to_value(bench_shards::run(python.as_deref())?)?),
        ShardsJob::Simulate { rows, seed, out, views, coordinates, geoclip, overwrite } => {
            let simulation = Simulation {
                rows: *rows,
                seed: *seed,
                views: *views,
                coordinates: coordinates.clone(),
                geoclip: geoclip.clone(),
                overwrite: *overwrite,
                device: place.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize)),
                threads: place.threads as usize,
                chunk_rows: None,
            };
            Ok(made(&simulate(&simulation, out)?, out, 0, start))
        }
        ShardsJob::Build { table, embeddings, out, overwrite, config } => {
            let inputs = Build { table, embeddings, config, overwrite: *overwrite };
            let built = shards::build(&inputs, out)?;
            Ok(made(&built.manifest, out, built.skipped, start))
        }
        ShardsJob::GeoclipImport { wheel, out, overwrite } => {
            let manifest = geoclip::import(wheel, out, *overwrite).map_err(ShardsError::from)?;
            let seconds = start.elapsed().as_secs_f64();
            Ok(
                json!({ "ok": true, "out": out, "source": manifest.source, "files": manifest.files, "seconds": seconds }),
            )
        }
    }
}

/// Every byte, every value; `problems` is empty where all is well. Then the plan, for as many epochs as are asked for.
fn verify(location: &str, config: &ShardsConfig, replay: &Replay) -> anyhow::Result<Value> {
    replay.check()?;
    let dataset = Dataset::open(location, config)?;
    let (problems, mask) = match config.on_bad_rows {
        OnBadRows::Error => (shards::verify(&dataset), Mask::none()),
        OnBadRows::Skip => shards::verify_skipping(&dataset)?,
    };
    let (skipped_rows, skipped) = (mask.count(), mask.describe(&dataset));
    let replayed = match replay.epochs {
        0 => None,
        _ if !problems.is_empty() => None,
        _ => Some(replay.run(&dataset, mask, config)?),
    };
    let rows: Vec<Value> = problems
        .iter()
        .map(|problem| json!({ "message": problem.message, "exit_code": problem.code.code() }))
        .collect();
    Ok(json!({
        "ok": problems.is_empty(),
        "rows": dataset.rows(),
        "skipped_rows": skipped_rows,
        "skipped": skipped,
        "files": dataset.file_count(),
        "row_groups": dataset.block_rows().len(),
        "width": dataset.width(),
        "views": dataset.views(),
        "manifest": dataset.manifest().is_some(),
        "fingerprint": format!("{:016x}", dataset.fingerprint()),
        "problems": rows,
        "plan": replayed,
    }))
}

/// What is said of a new folder of shards.
fn made(manifest: &Manifest, out: &Path, skipped: u64, start: Instant) -> Value {
    let seconds = start.elapsed().as_secs_f64();
    json!({
        "ok": true, "out": out, "rows": manifest.rows, "views": manifest.views, "width": manifest.width,
        "source": manifest.source, "skipped": skipped, "seconds": seconds, "rows_per_s": manifest.rows as f64 / seconds,
    })
}
