//! `demo`: runs everything from data to evaluation, with a model that is small enough for two CPU cores.
//!
//! Imports GeoCLIP's weights, simulates photos at real places, trains, and evaluates (`eval.after_train`). LocDiff-H is
//! tuned on the validation photos and evaluated on the test photos.

use std::path::Path;

use locdiff_core::config;
use locdiff_core::protocol::SimulatedWorld;
use serde_json::{Value, json};

use super::{geoclip, shards, train};
use crate::cli::{GeoclipVerb, Global, ShardsVerb};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;

/// Number of training photos. With this many photos, the model does not overfit during the short training of the demo.
const TRAIN_ROWS: u64 = 60_000;
/// Number of validation photos, for the evaluations during training and for tuning LocDiff-H.
const VALIDATION_ROWS: u64 = 1000;
/// Number of test photos, for the evaluation after training.
const TEST_ROWS: u64 = 1000;
/// Number of views of each validation and test photo. It equals the default of `eval.samples`, so each sample uses a
/// different view.
const VIEWS: u32 = 16;

/// Imports GeoCLIP and simulates photos if their folders are missing, then trains a run and evaluates it. Resumes the
/// run that `--run` names, if it exists. Without `--run`, resumes an unfinished run with the same configuration, such
/// as an interrupted demo.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = config::load(&global.layers("demo")).map_err(crate::error::LaunchError::from)?;
    let world = NodeWorkers::plan(&resolved.config, &inventory)?;
    let config = &resolved.config;
    if !Path::new(&config.retrieval.geoclip).exists() {
        output.print("importing GeoCLIP's weights and gallery ...");
        geoclip::run(&GeoclipVerb::Import { wheel: None, out: None, overwrite: false }, global, output)?;
    }
    let sets = [
        (&config.shards.train, TRAIN_ROWS, 1, 1),
        (&config.shards.validation, VALIDATION_ROWS, 2, VIEWS),
        (&config.shards.test, TEST_ROWS, 3, VIEWS),
    ];
    for (out, rows, seed, views) in sets {
        if Path::new(out).exists() {
            output.print(&format!("{out} already exists"));
            continue;
        }
        output.print(&format!("simulating {rows} photos in {out} ..."));
        let verb = ShardsVerb::Simulate {
            world: SimulatedWorld::One,
            rows: Some(rows),
            seed,
            out: out.into(),
            views,
            coordinates: None,
            cells: None,
            held_out: 0.0,
            part: None,
            overwrite: false,
        };
        shards::run(&verb, global, output)?;
    }
    output.print(&format!("training with {} workers ...", world.slots.len()));
    let choice = train::RunChoice { prefix: "demo".to_owned(), is_new: false };
    let trained = train::run_resolved(&resolved, &world, Vec::new(), &choice, output)?;
    Ok(json!({ "ok": true, "train": trained }))
}
