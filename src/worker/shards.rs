//! Jobs of one worker on shards: each calls its part of [`crate::shards`] and hands the result to the launcher as JSON.

use std::path::Path;
use std::time::Instant;

use anyhow::bail;
use locdiff_launch::protocol::{Place, ShardsJob};
use serde_json::{Value, json};
use tch::Device;

use crate::geoclip;
use crate::shards::{self, Build, Manifest, ShardsError, Simulation};

/// Does the job; the value is what the launcher gets.
pub(super) fn run(job: &ShardsJob, place: &Place) -> anyhow::Result<Value> {
    let start = Instant::now();
    match job {
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
            Ok(made(&shards::simulate(&simulation, out)?, out, 0, start))
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
        ShardsJob::Verify { .. } | ShardsJob::Inspect { .. } | ShardsJob::Bench { .. } => {
            bail!("`{}` has no work behind it", job.name())
        }
    }
}

/// What is said of a new folder of shards.
fn made(manifest: &Manifest, out: &Path, skipped: u64, start: Instant) -> Value {
    let seconds = start.elapsed().as_secs_f64();
    json!({
        "ok": true, "out": out, "rows": manifest.rows, "views": manifest.views, "width": manifest.width,
        "source": manifest.source, "skipped": skipped, "seconds": seconds, "rows_per_s": manifest.rows as f64 / seconds,
    })
}
