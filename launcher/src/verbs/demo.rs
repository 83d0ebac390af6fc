//! `demo`: the main job, small enough for two CPU cores: real places and GeoCLIP's weights, simulated photos, training, and the
//! evaluation that follows it (`eval.after_train`): LocDiff-H is tuned on the validation photos and tested on others.

use std::path::Path;

use locdiff_core::config;
use serde_json::{Value, json};

use super::{geoclip, shards, train};
use crate::cli::{GeoclipVerb, Global, ShardsVerb};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::World;

/// Photos to train on: enough that the model does not learn them by heart in its three minutes.
const TRAIN_ROWS: u64 = 60_000;
/// Photos for the evaluations while training, and for those after it.
const VALIDATION_ROWS: u64 = 1000;
const TEST_ROWS: u64 = 1000;
/// Views of each of these: as many as samples.
const VIEWS: u32 = 16;

/// Makes what is missing, then trains a new run; with `--run`, goes on with that one.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = config::load(&global.layers("demo")).map_err(crate::error::LaunchError::from)?;
    let world = World::plan(&resolved.config, &inventory)?;
    let config = &resolved.config;
    if !Path::new(&config.retrieval.geoclip).exists() {
        output.people("GeoCLIP's weights and gallery ...");
        geoclip::run(&GeoclipVerb::Import { wheel: None, out: None, overwrite: false }, global, output)?;
    }
    let sets = [
        (&config.shards.train, TRAIN_ROWS, 1, 1),
        (&config.shards.validation, VALIDATION_ROWS, 2, VIEWS),
        (&config.shards.test, TEST_ROWS, 3, VIEWS),
    ];
    for (out, rows, seed, views) in sets {
        if Path::new(out).exists() {
            output.people(&format!("{out} is there already"));
            continue;
        }
        output.people(&format!("simulating {rows} photos in {out} ..."));
        let verb = ShardsVerb::Simulate {
            rows: Some(rows),
            seed,
            out: out.into(),
            views,
            coordinates: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    output.people(&format!("training with {} workers ...", world.places.len()));
    let trained = train::run_resolved(&resolved, &world, Vec::new(), "demo", output)?;
    Ok(json!({ "ok": true, "train": trained }))
}
