//! The job of training: meets the others and runs the loop, whose reports go to the launcher.

use std::sync::mpsc::Receiver;

use locdiff_core::protocol::{Meeting, Place, ToLauncher, ToWorker, TrainJob, TrainSummary};

use super::control::Control;
use super::error::JobError;
use super::meet;
use crate::train::{self, TrainError};

/// Trains; every rank gives the launcher the same summary.
pub(super) fn run(
    job: &TrainJob,
    control: &mut Control,
    messages: &Receiver<ToWorker>,
    place: &Place,
    meeting: &Meeting,
) -> anyhow::Result<TrainSummary> {
    let ranks = meet::meet(control, messages, place, meeting)?;
    let mut tell =
        |message: ToLauncher| control.send(&message).map_err(|error| TrainError::Launcher(error.to_string()));
    let trained = train::run(job, meeting.attempt, &ranks, &mut tell);
    if trained.is_err() {
        // Connections stay open until the process ends: peers must not complain of a broken one before the launcher has
        // heard why.
        std::mem::forget(ranks);
    }
    Ok(trained.map_err(JobError::from)?)
}
