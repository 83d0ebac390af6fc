//! `shards ...`, `bench shards` and `geoclip import`: one worker does the work, this module says what came of it.

use serde_json::Value;

use crate::cli::{Global, ShardsVerb};
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::protocol::{Job, ShardsJob};
use crate::rendezvous::World;

/// `shards VERB`.
pub(super) fn run(verb: &ShardsVerb, _global: &Global, _output: Output) -> anyhow::Result<Value> {
    let name = match verb {
        ShardsVerb::Simulate { .. } => "shards simulate",
        ShardsVerb::Build { .. } => "shards build",
        ShardsVerb::Embed { .. } => "shards embed",
        ShardsVerb::Verify { .. } => "shards verify",
        ShardsVerb::Inspect { .. } => "shards inspect",
    };
    Err(LaunchError::NotYet(name.to_owned()).into())
}

/// Gives the job to one worker, on the first GPU where there is one.
pub(super) fn run_one(global: &Global, job: ShardsJob) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = super::resolve(global, &inventory)?;
    let mut world = World::plan(&resolved.config, &inventory)?;
    world.places.truncate(1);
    world.places.iter_mut().for_each(|place| place.world = 1);
    let found = super::run_gang(&resolved, &world, Job::Shards(job), true)?;
    Ok(found.results.into_iter().next().unwrap_or_default())
}
