//! `shards ...`, `bench shards` and `geoclip import`: one worker does the work, this module says what came of it.

use serde_json::Value;

use crate::cli::{Global, ShardsVerb};
use crate::config::RunConfig;
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::protocol::{Job, ShardsJob};
use crate::rendezvous::World;

/// `shards VERB`.
pub(super) fn run(verb: &ShardsVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    let name = match verb {
        ShardsVerb::Simulate { .. } | ShardsVerb::Build { .. } => return make(verb, global, output),
        ShardsVerb::Embed { .. } => "shards embed",
        ShardsVerb::Verify { .. } => "shards verify",
        ShardsVerb::Inspect { .. } => "shards inspect",
    };
    Err(LaunchError::NotYet(name.to_owned()).into())
}

/// `shards simulate` and `shards build`: a new folder.
fn make(verb: &ShardsVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    let result = run_one_with(global, |config| match verb.clone() {
        ShardsVerb::Simulate { rows, seed, out, views, coordinates, overwrite } => {
            let geoclip = config.retrieval.geoclip.clone().into();
            ShardsJob::Simulate { rows, seed, out, views, coordinates, geoclip, overwrite }
        }
        ShardsVerb::Build { table, embeddings, out, overwrite } => {
            ShardsJob::Build { table, embeddings, out, overwrite, config: config.shards.clone() }
        }
        ShardsVerb::Embed { .. } | ShardsVerb::Verify { .. } | ShardsVerb::Inspect { .. } => {
            unreachable!("these make no folder from rows")
        }
    })?;
    let number = |name: &str| result[name].as_u64().unwrap_or_default();
    let seconds = result["seconds"].as_f64().unwrap_or_default();
    let left_out = match number("skipped") {
        0 => String::new(),
        skipped => format!("; {skipped} rows that cannot be used are left out"),
    };
    output.people(&format!(
        "{} rows of {} x {} numbers in {}, {seconds:.1} s{left_out}",
        number("rows"),
        number("views"),
        number("width"),
        result["out"].as_str().unwrap_or_default()
    ));
    Ok(result)
}

/// Gives the job to one worker, on the first GPU where there is one.
#[allow(dead_code, reason = "for jobs that need nothing of the configuration")]
pub(super) fn run_one(global: &Global, job: ShardsJob) -> anyhow::Result<Value> {
    run_one_with(global, |_| job)
}

/// The same for a job that takes something from the configuration.
pub(super) fn run_one_with(global: &Global, job: impl FnOnce(&RunConfig) -> ShardsJob) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = super::resolve(global, &inventory)?;
    let mut world = World::plan(&resolved.config, &inventory)?;
    // The one that works has the threads of all.
    let threads = world.places.iter().map(|place| place.threads).sum();
    world.places.truncate(1);
    world.places.iter_mut().for_each(|place| (place.world, place.threads) = (1, threads));
    let found = super::run_gang(&resolved, &world, Job::Shards(job(&resolved.config)), true)?;
    Ok(found.results.into_iter().next().unwrap_or_default())
}
