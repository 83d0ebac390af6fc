//! Jobs of one worker on shards: each calls its part of [`crate::shards`] and hands the result to the launcher as JSON.

use anyhow::bail;
use locdiff_launch::config::ShardsConfig;
use locdiff_launch::protocol::{Place, ShardsJob};
use serde_json::{Value, json};

use super::bench_shards;
use crate::shards::{self, Blocks, Dataset};

/// Does the job; the value is what the launcher gets.
pub(super) fn run(job: &ShardsJob, _place: &Place) -> anyhow::Result<Value> {
    match job {
        ShardsJob::Verify { location, config, .. } => verify(location, config),
        ShardsJob::Inspect { location, config } => {
            Ok(serde_json::to_value(shards::inspect(&Dataset::open(location, config)?)?)?)
        }
        ShardsJob::Bench { python } => Ok(serde_json::to_value(bench_shards::run(python.as_deref())?)?),
        ShardsJob::Simulate { .. } | ShardsJob::Build { .. } | ShardsJob::GeoclipImport { .. } => {
            bail!("`{}` has no work behind it", job.name())
        }
    }
}

/// Every byte, every value; `problems` is empty where all is well.
fn verify(location: &str, config: &ShardsConfig) -> anyhow::Result<Value> {
    let dataset = Dataset::open(location, config)?;
    let problems = shards::verify(&dataset);
    let rows: Vec<Value> = problems
        .iter()
        .map(|problem| json!({ "message": problem.message, "exit_code": problem.code.code() }))
        .collect();
    Ok(json!({
        "ok": problems.is_empty(),
        "rows": dataset.rows(),
        "files": dataset.file_count(),
        "row_groups": dataset.block_rows().len(),
        "width": dataset.width(),
        "views": dataset.views(),
        "manifest": dataset.manifest().is_some(),
        "fingerprint": format!("{:016x}", dataset.fingerprint()),
        "problems": rows,
    }))
}
