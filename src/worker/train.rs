//! The job of training: meets the others and runs the loop, whose reports go to the launcher.

use std::sync::mpsc::Receiver;

use locdiff_core::protocol::{Meeting, Place, ToLauncher, ToWorker, TrainJob};
use serde_json::Value;

use super::control::Control;
use super::meet;
use crate::train::{self, TrainError};

/// Trains; the value is what the launcher gets from every rank.
pub(super) fn run(
    job: &TrainJob,
    control: &mut Control,
    messages: &Receiver<ToWorker>,
    place: &Place,
    meeting: &Meeting,
) -> anyhow::Result<Value> {
    let ranks = meet::meet(control, messages, place, meeting)?;
    let mut tell =
        |message: ToLauncher| control.send(&message).map_err(|error| TrainError::Launcher(error.to_string()));
    match train::run(job, meeting.attempt, &ranks, &mut tell) {
        Ok(summary) => Ok(serde_json::to_value(summary)?),
        Err(error) => {
            // Connections stay open until the process ends: peers must not complain of a broken one before the launcher has
            // heard why.
            std::mem::forget(ranks);
            Err(error.into())
        }
    }
}
