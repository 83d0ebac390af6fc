//! The job of `serve`: loads the model once, and locates the photos that the launcher sends.
//!
//! Photos that wait at the same time are located together, in blocks of the same size as in an evaluation. So the answer
//! for a photo has the same bits as in `predict`, alone or in any company.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use locdiff_core::config::TrainMethod;
use locdiff_core::protocol::{
    EvalJob, EvalTask, LocatedRow, PhotoToLocate, PredictedRow, PredictedRows, Prediction, RefusedPhoto, ServedModel,
    ToLauncher, ToWorker, WorkerSlot,
};
use locdiff_core::pulse;
use tch::Device;

use super::density::RowDensities;
use super::locate::{Methods, PREDICTED_ROWS, device, measure_surroundings, open_engine};
use super::rows::predicted;
use crate::infer::retrieval_data::training_facts;
use crate::infer::retrieve::{Retrieval, with_chosen_head};
use crate::infer::{Engine, Image, ImageBlock, InferError, Located, SavedModel, block_images};
use crate::native::cuda;
use crate::retrieval::ImageSamples;

/// How long a worker without photos waits before it reports that it is alive.
const IDLE_PULSE: Duration = Duration::from_millis(200);
/// How long the first photo of a block waits for other photos. A block takes longer than this, even on a GPU.
const GATHER: Duration = Duration::from_millis(5);

type Send<'a> = &'a mut dyn FnMut(ToLauncher) -> Result<(), InferError>;

/// Loads the model, and locates photos until the launcher ends this process.
pub fn run(
    job: &EvalJob,
    worker: &WorkerSlot,
    messages: &Receiver<ToWorker>,
    send: Send<'_>,
) -> Result<Infallible, InferError> {
    if let Device::Cuda(index) = device(worker) {
        cuda::set_device(index)?;
    }
    let saved = SavedModel::open_exactly(&job.checkpoint, &job.checkpoint_xxh3)?;
    let width = saved.state.embedding_width as usize;
    let job = &with_chosen_head(job, None, width, true)?;
    let retrieval = open_retrieval(job, worker, width, send)?;
    let engine = match job.config.train.method {
        TrainMethod::Locdiff => Some(open_engine(job, &saved, device(worker), width, (retrieval.as_ref(), None))?),
        TrainMethod::Geoclip => None,
    };
    let retriever = retrieval.as_ref().map(Retrieval::retriever).transpose()?;
    let methods = Methods { retrieval: retrieval.as_ref().zip(retriever.as_ref()), trials: None };
    let mut model = LoadedModel::new(job, worker, width, (engine.as_ref(), methods))?;
    send(ToLauncher::Serving(ServedModel {
        step: saved.step,
        width: saved.state.embedding_width,
        head: retrieval.as_ref().map(|_| job.config.retrieval.head),
        gallery_points: retrieval.as_ref().map(|retrieval| retrieval.gallery().points().len() as u64),
    }))?;
    loop {
        answer_all(next_photos(messages, model.empty.size)?, &mut model, send)?;
    }
}

/// Opens the gallery and the head, if the job asks for retrieval.
fn open_retrieval(
    job: &EvalJob,
    worker: &WorkerSlot,
    width: usize,
    send: Send<'_>,
) -> Result<Option<Retrieval>, InferError> {
    let config = &job.config;
    let facts = || training_facts(&config.shards, width, config.retrieval.head);
    let progress = |points: usize, of_points: usize| {
        // Ignore a failed send: if the launcher is gone, the next send fails too.
        let _ = send(ToLauncher::Embedded { points: points as u64, of_points: of_points as u64 });
    };
    let mut retrieval = Retrieval::open(job, facts, (device(worker), worker.threads as usize), true, progress)?;
    drop(measure_surroundings(config, retrieval.as_mut(), false));
    Ok(retrieval)
}

/// Locates blocks of photos with a model that stays loaded.
struct LoadedModel<'a> {
    job: &'a EvalJob,
    wanted: &'a Prediction,
    device: Device,
    engine: Option<&'a Engine>,
    methods: Methods<'a>,
    /// A block without images.
    empty: ImageBlock,
    /// The block that `located` takes next.
    next: Rc<Cell<Option<ImageBlock>>>,
    /// The engine at work. It keeps its memory, and on a GPU its graph, from block to block. `None` without an engine.
    located: Option<Box<dyn Iterator<Item = Result<Located, InferError>> + 'a>>,
    /// Computes densities; `None` if the model has no temperature.
    densities: Option<RowDensities>,
}

impl<'a> LoadedModel<'a> {
    fn new(
        job: &'a EvalJob,
        worker: &WorkerSlot,
        width: usize,
        (engine, methods): (Option<&'a Engine>, Methods<'a>),
    ) -> Result<Self, InferError> {
        let EvalTask::Predict(wanted) = &job.task else {
            return Err(InferError::Config("the task of a service is not a prediction: this is a bug".to_owned()));
        };
        let (device, next) = (device(worker), Rc::new(Cell::new(None)));
        let densities = RowDensities::wanted(&job.task);
        let size = block_images(device, job.config.eval.samples);
        let empty = ImageBlock { first: 0, images: Vec::new(), size, views: 1, width };
        let located = engine.map(|engine| {
            let next: Rc<Cell<Option<ImageBlock>>> = Rc::clone(&next);
            let blocks = std::iter::from_fn(move || next.take().map(Ok));
            Box::new(engine.locate_all(blocks)) as Box<dyn Iterator<Item = _> + 'a>
        });
        Ok(Self { job, wanted, device, engine, methods, empty, next, located, densities })
    }

    /// The predictions for the photos of a block, with the numbers of the photos.
    fn locate(&mut self, photos: &[PhotoToLocate]) -> Result<Vec<PredictedRow>, InferError> {
        let block = ImageBlock { images: photos.iter().map(image).collect(), ..self.empty.clone() };
        let Some(engine_at_work) = &mut self.located else {
            let (found, samples) = self.methods.answers_of_retrieval(&block, self.device)?;
            return self.predictions(photos, found, &samples);
        };
        // After an error, the end of the last block may be unread.
        engine_at_work.by_ref().for_each(drop);
        self.next.set(Some(block));
        let Some(located) = engine_at_work.next().transpose()? else { return Ok(Vec::new()) };
        let mut found = self.methods.answers(&located)?;
        self.add_densities(photos, &located, &mut found)?;
        self.predictions(photos, found, &located.samples)
    }

    /// Sets the density of each photo that wants one.
    fn add_densities(
        &mut self,
        photos: &[PhotoToLocate],
        located: &Located,
        found: &mut [LocatedRow],
    ) -> Result<(), InferError> {
        let is_wanted = |at: usize| photos[at].with_density;
        let Some(engine) = self.engine.filter(|_| photos.iter().any(|photo| photo.with_density)) else {
            return Ok(());
        };
        self.densities.as_ref().map_or(Ok(()), |densities| densities.add(engine, located, found, is_wanted))
    }

    fn predictions(
        &self,
        photos: &[PhotoToLocate],
        found: Vec<LocatedRow>,
        samples: &[ImageSamples],
    ) -> Result<Vec<PredictedRow>, InferError> {
        let rows = photos.iter().zip(found.into_iter().zip(samples));
        rows.map(|(photo, (row, samples))| {
            Ok(PredictedRow { index: photo.number, ..predicted(row, samples, self.wanted)? })
        })
        .collect()
    }
}

/// Waits for photos, and takes at most `most`.
fn next_photos(messages: &Receiver<ToWorker>, most: usize) -> Result<Vec<PhotoToLocate>, InferError> {
    let (mut photos, mut until) = (Vec::new(), None);
    while photos.len() < most {
        let wait = until.map_or(IDLE_PULSE, |until: Instant| until.saturating_duration_since(Instant::now()));
        match messages.recv_timeout(wait) {
            Ok(ToWorker::Locate(photo)) => {
                photos.push(photo);
                until.get_or_insert_with(|| Instant::now() + GATHER);
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) if photos.is_empty() => pulse::advance(),
            Err(RecvTimeoutError::Timeout) => break,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(InferError::Launcher("the control socket is closed".to_owned()));
            }
        }
    }
    Ok(photos)
}

/// Locates `photos` and sends the answers. If they cannot be located together, locates each one alone and refuses those
/// that cannot be located: no client may end the service of the others.
fn answer_all(photos: Vec<PhotoToLocate>, model: &mut LoadedModel<'_>, send: Send<'_>) -> Result<(), InferError> {
    let width = model.empty.width;
    let (photos, others): (Vec<_>, Vec<_>) = photos.into_iter().partition(|photo| photo.embedding.len() == width);
    for PhotoToLocate { number, embedding, .. } in others {
        let reason = format!("the embedding has {} numbers, wanted {width}", embedding.len());
        send(ToLauncher::Refused(RefusedPhoto { number, reason }))?;
    }
    if photos.is_empty() {
        return Ok(());
    }
    match model.locate(&photos) {
        Ok(rows) => return send_rows(&rows, send),
        Err(error) if !is_about_photos(&error) => return Err(error),
        Err(_) => {}
    }
    for photo in &photos {
        match model.locate(std::slice::from_ref(photo)) {
            Ok(rows) => send_rows(&rows, send)?,
            Err(error) if is_about_photos(&error) => {
                let reason = reason(&error, &model.job.data, photo.number);
                send(ToLauncher::Refused(RefusedPhoto { number: photo.number, reason }))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send_rows(rows: &[PredictedRow], send: Send<'_>) -> Result<(), InferError> {
    let mut parts = rows.chunks(PREDICTED_ROWS);
    parts.try_for_each(|rows| {
        send(ToLauncher::Predicted(PredictedRows { of_rows: 0, data_version: String::new(), rows: rows.to_vec() }))
    })
}

/// Whether the error may be the fault of a photo, such as an embedding of zeros.
fn is_about_photos(error: &InferError) -> bool {
    matches!(error, InferError::BadData(_) | InferError::Geo(_) | InferError::Retrieval(_) | InferError::Shdd(_))
}

/// The text of an error without the number of the photo, which clients do not know.
fn reason(error: &InferError, data: &str, number: u64) -> String {
    let text = error.to_string();
    let place = format!("{data}: row {number} ({number}): ");
    text.strip_prefix(&place).map_or(text.clone(), str::to_owned)
}

fn image(PhotoToLocate { number, embedding, .. }: &PhotoToLocate) -> Image {
    let views = embedding.iter().flat_map(|half| half.to_le_bytes()).collect();
    Image { row: *number, id: number.to_string(), truth: None, views }
}
