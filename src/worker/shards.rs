//! Jobs of one worker on shards: each calls its part of [`crate::shards`] and hands the result to the launcher as JSON.

use anyhow::bail;
use locdiff_launch::protocol::{Place, ShardsJob};
use serde_json::Value;

/// Does the job; the value is what the launcher gets.
pub(super) fn run(job: &ShardsJob, _place: &Place) -> anyhow::Result<Value> {
    match job {
        ShardsJob::Simulate { .. }
        | ShardsJob::Build { .. }
        | ShardsJob::Verify { .. }
        | ShardsJob::Inspect { .. }
        | ShardsJob::Bench { .. }
        | ShardsJob::GeoclipImport { .. } => bail!("`{}` has no work behind it", job.name()),
    }
}
