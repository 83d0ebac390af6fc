//! Evaluation jobs and `serve`. In an evaluation, a worker sends each block of located rows to the launcher as soon as the block is ready, and sends
//! a summary at the end.

use std::convert::Infallible;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use anyhow::Context as _;
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use locdiff_core::config::RunConfig;
use locdiff_core::protocol::{EvalJob, EvalSummary, GalleryEmbedded, ToLauncher, ToWorker, TruthWritten, WorkerSlot};
use parquet::arrow::ArrowWriter;

use super::control::Control;
use super::error::JobError;
use crate::eval::{locate, serve};
use crate::infer::{ImageRows, InferError};

/// Locates this worker's rows.
pub(super) fn run(job: &EvalJob, control: &mut Control, slot: &WorkerSlot) -> Result<EvalSummary, JobError> {
    let mut send = |message| control.send(&message).map_err(|error| InferError::Launcher(error.to_string()));
    Ok(locate::run(job, slot, &mut send)?)
}

/// Locates the photos that the launcher sends, until the launcher ends this process.
pub(super) fn serve(
    job: &EvalJob,
    control: &mut Control,
    messages: &Receiver<ToWorker>,
    slot: &WorkerSlot,
) -> Result<Infallible, JobError> {
    let mut send = |message| control.send(&message).map_err(|error| InferError::Launcher(error.to_string()));
    Ok(serve::run(job, slot, messages, &mut send)?)
}

/// Embeds the gallery, once for all workers.
pub(super) fn embed_gallery(
    job: &EvalJob,
    control: &mut Control,
    slot: &WorkerSlot,
) -> Result<GalleryEmbedded, JobError> {
    let progress = |points: usize, of_points: usize| {
        // Ignore a failed send: if the launcher is gone, sending the result fails too.
        let _ = control.send(&ToLauncher::Embedded { points: points as u64, of_points: of_points as u64 });
    };
    Ok(GalleryEmbedded { points: locate::embed_gallery(job, slot, progress)? })
}

/// Writes the columns id, lat and lon of the usable test rows to the Parquet file `out`, in row order.
pub(super) fn write_truth(config: &RunConfig, out: &Path) -> anyhow::Result<TruthWritten> {
    let rows = ImageRows::open(&config.shards.test, config).map_err(JobError::from)?;
    let (mut ids, mut latitudes, mut longitudes) = (Vec::new(), Vec::new(), Vec::new());
    for (id, place) in rows.ids_and_places().map_err(JobError::from)? {
        ids.push(id);
        latitudes.push(place.latitude().0);
        longitudes.push(place.longitude().0);
    }
    let places = [latitudes, longitudes].map(|degrees| Arc::new(Float64Array::from(degrees)) as ArrayRef);
    let [latitudes, longitudes] = places;
    let columns = [("id", Arc::new(StringArray::from(ids)) as ArrayRef), ("lat", latitudes), ("lon", longitudes)];
    let batch = RecordBatch::try_from_iter(columns)?;
    let file = File::create(out).with_context(|| out.display().to_string())?;
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None)?;
    writer.write(&batch)?;
    writer.close()?;
    Ok(TruthWritten { is_simulated: rows.is_simulated() })
}
