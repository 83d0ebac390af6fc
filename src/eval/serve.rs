//! The job of `serve`: loads the model once, and locates the photos that the launcher sends.
//!
//! Photos that wait at the same time are located together, in blocks of the same size as in an evaluation. So the answer
//! for a photo has the same bits as in `predict`, alone or in any company.

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use locdiff_core::config::TrainMethod;
use locdiff_core::protocol::{
    EvalJob, LocatedRow, PhotoToLocate, PredictedRow, PredictedRows, Prediction, RefusedPhoto, ServedModel, ToLauncher,
    ToWorker, WorkerSlot,
};
use locdiff_core::pulse;
use tch::Device;

use super::locate::{Methods, device, measure_surroundings, open_engine, predicted};
use crate::infer::retrieval_data::training_facts;
use crate::infer::retrieve::{Retrieval, with_chosen_head};
use crate::infer::{Image, ImageBlock, InferError, Located, Saved, block_images};
use crate::native::cuda;
use crate::retrieval::ImageSamples;

/// How long a worker without photos waits before it reports that it is alive.
const IDLE_PULSE: Duration = Duration::from_millis(200);
/// How long the first photo of a block waits for other photos. A block takes longer than this, even on a GPU.
const GATHER: Duration = Duration::from_millis(5);

/// What the launcher gets for each photo. It leaves out the samples that a client does not want.
const WANTED: Prediction = Prediction {
    with_truth: false,
    with_samples: true,
    truth_temperatures: Vec::new(),
    cells_temperature: None,
    skips_bad_rows: false,
    done: Vec::new(),
};

/// Loads the model, and locates photos until the launcher ends this process.
pub fn run(
    job: &EvalJob,
    worker: &WorkerSlot,
    messages: &Receiver<ToWorker>,
    send: &mut dyn FnMut(ToLauncher) -> Result<(), InferError>,
) -> Result<Infallible, InferError> {
    if let Device::Cuda(index) = device(worker) {
        cuda::set_device(index)?;
    }
    let state = Saved::open(&job.checkpoint)?.state;
    let width = state.embedding_width as usize;
    let job = &with_chosen_head(job, None, width, true)?;
    let config = &job.config;
    let facts = || training_facts(&config.shards, width, config.retrieval.head);
    let progress = |points: usize, of_points: usize| {
        // Ignore a failed send: if the launcher is gone, the next send fails too.
        let _ = send(ToLauncher::Embedded { points: points as u64, of_points: of_points as u64 });
    };
    let mut retrieval = Retrieval::open(job, facts, (device(worker), worker.threads as usize), true, progress)?;
    drop(measure_surroundings(config, retrieval.as_mut(), false));
    let engine = match config.train.method {
        TrainMethod::Locdiff => Some(open_engine(job, worker, width, retrieval.as_ref())?),
        TrainMethod::Geoclip => None,
    };
    let retriever = retrieval.as_ref().map(Retrieval::retriever).transpose()?;
    let methods = Methods { retrieval: retrieval.as_ref().zip(retriever.as_ref()), is_tuning: false };
    let size = block_images(device(worker), config.eval.samples);
    let empty = ImageBlock { first: 0, images: Vec::new(), size, views: 1, width };
    // The engine takes its next block from here. It keeps its memory, and on a GPU its graph, from block to block.
    let next = Cell::new(None);
    let mut located = engine.as_ref().map(|engine| engine.locate_all(std::iter::from_fn(|| next.take().map(Ok))));
    let mut answer = |images: Vec<Image>| -> Result<Vec<PredictedRow>, InferError> {
        let block = ImageBlock { images, ..empty.clone() };
        match &mut located {
            Some(located) => {
                // After an error, the end of the last block may be unread.
                located.by_ref().for_each(drop);
                next.set(Some(block));
                // After the block, the engine asks for another one and gets none, so the loop ends. It can go on later.
                located.by_ref().try_fold(Vec::new(), |mut rows, located| {
                    let located: Located = located?;
                    rows.extend(predictions(&located.block, methods.answers(&located)?, &located.samples)?);
                    Ok(rows)
                })
            }
            None => {
                let (found, samples) = methods.answers_of_retrieval(&block, device(worker))?;
                predictions(&block, found, &samples)
            }
        }
    };
    send(ToLauncher::Serving(ServedModel {
        step: state.step,
        width: state.embedding_width,
        head: retrieval.as_ref().map(|_| config.retrieval.head),
        gallery_points: retrieval.as_ref().map(|retrieval| retrieval.gallery().points().len() as u64),
    }))?;
    loop {
        answer_all(next_photos(messages, size)?, width, &mut answer, send)?;
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
fn answer_all(
    photos: Vec<PhotoToLocate>,
    width: usize,
    answer: &mut impl FnMut(Vec<Image>) -> Result<Vec<PredictedRow>, InferError>,
    send: &mut dyn FnMut(ToLauncher) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let (photos, others): (Vec<_>, Vec<_>) = photos.into_iter().partition(|photo| photo.embedding.len() == width);
    for PhotoToLocate { number, embedding } in others {
        let reason = format!("the embedding has {} numbers, wanted {width}", embedding.len());
        send(ToLauncher::Refused(RefusedPhoto { number, reason }))?;
    }
    let images: Vec<Image> = photos.into_iter().map(image).collect();
    if images.is_empty() {
        return Ok(());
    }
    match answer(images.clone()) {
        Ok(rows) => return send(ToLauncher::Predicted(PredictedRows { of_rows: 0, rows })),
        Err(error) if !is_about_photos(&error) => return Err(error),
        Err(_) => {}
    }
    for image in images {
        let number = image.row;
        send(match answer(vec![image]) {
            Ok(rows) => ToLauncher::Predicted(PredictedRows { of_rows: 0, rows }),
            Err(error) if is_about_photos(&error) => {
                ToLauncher::Refused(RefusedPhoto { number, reason: error.to_string() })
            }
            Err(error) => return Err(error),
        })?;
    }
    Ok(())
}

/// Whether the error may be the fault of a photo, such as an embedding of zeros.
fn is_about_photos(error: &InferError) -> bool {
    matches!(error, InferError::BadData(_) | InferError::Geo(_) | InferError::Retrieval(_) | InferError::Shdd(_))
}

fn image(PhotoToLocate { number, embedding }: PhotoToLocate) -> Image {
    let views = embedding.into_iter().flat_map(u16::to_le_bytes).collect();
    Image { row: number, id: number.to_string(), truth: None, views }
}

/// The predictions for the photos of a block, with the numbers of the photos.
fn predictions(
    block: &ImageBlock,
    found: Vec<LocatedRow>,
    samples: &[ImageSamples],
) -> Result<Vec<PredictedRow>, InferError> {
    let rows = block.images.iter().zip(found.into_iter().zip(samples));
    rows.map(|(image, (row, samples))| Ok(PredictedRow { index: image.row, ..predicted(row, samples, &WANTED)? }))
        .collect()
}
