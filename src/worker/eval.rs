//! The jobs of evaluation: blocks of located rows go to the launcher as they are ready, metrics at the end.

use locdiff_launch::protocol::{EvalJob, Place, ScoreJob, ToLauncher};
use serde_json::Value;
use tch::Device;

use super::control::Control;
use crate::eval::locate::{self, Worker};
use crate::eval::{EvalError, score};

/// Locates this worker's rows.
pub(super) fn run(job: &EvalJob, control: &mut Control, place: &Place) -> anyhow::Result<Value> {
    let device = place.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize));
    let worker = Worker { rank: place.rank, world: place.world, device };
    let mut tell =
        |located| control.send(&ToLauncher::Located(located)).map_err(|error| EvalError::Launcher(error.to_string()));
    Ok(serde_json::to_value(locate::run(job, worker, &mut tell)?)?)
}

/// Scores what was gathered.
pub(super) fn score(job: &ScoreJob) -> anyhow::Result<Value> {
    Ok(score::run(job)?)
}
