//! The jobs of evaluation: blocks of located rows go to the launcher as they are ready, what follows from all of them at the end.

use locdiff_core::protocol::{EvalJob, Place, ToLauncher};
use serde_json::{Value, json};
use tch::Device;

use super::control::Control;
use crate::eval::EvalError;
use crate::eval::locate::{self, Worker};

/// Locates this worker's rows.
pub(super) fn run(job: &EvalJob, control: &mut Control, place: &Place) -> anyhow::Result<Value> {
    let mut tell =
        |located| control.send(&ToLauncher::Located(located)).map_err(|error| EvalError::Launcher(error.to_string()));
    Ok(serde_json::to_value(locate::run(job, worker(place), &mut tell)?)?)
}

/// Embeds the gallery, once for all workers.
pub(super) fn embed_gallery(job: &EvalJob, place: &Place) -> anyhow::Result<Value> {
    Ok(json!({ "points": locate::embed_gallery(job, worker(place))? }))
}

fn worker(place: &Place) -> Worker {
    let device = place.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize));
    Worker { rank: place.rank, world: place.world, device, threads: place.threads as usize }
}
