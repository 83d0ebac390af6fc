//! Embeddings of many places, whose bits depend on the place alone.
//!
//! Matrix products round differently for different numbers of rows and threads. So places are encoded in tiles of a fixed
//! number of rows, the last one filled up, each by one thread: neither the batch that a place comes in nor the number of
//! threads changes its embedding on one kind of device.

use std::sync::{Mutex, MutexGuard, PoisonError};

use locdiff_core::geo::Place;
use tch::{Device, Tensor};

use super::EMBEDDING_WIDTH;
use super::error::GeoclipError;
use super::location::LocationEncoder;

/// Rows of a tile on the CPU: the activations of a layer, half a MiB, stay in the second cache.
const CPU_TILE_ROWS: usize = 128;
/// Rows of a tile on a GPU: enough to keep it busy.
const CUDA_TILE_ROWS: usize = 4096;

/// Rows that are computed together.
pub fn tile_rows(device: Device) -> usize {
    if device.is_cuda() { CUDA_TILE_ROWS } else { CPU_TILE_ROWS }
}

/// Does `work` on every tile, `threads` at once; each thread gets a context of its own from `share`. libtorch's own threads
/// are off meanwhile. With one thread all runs on the caller's. The first failure ends it.
pub fn for_each_tile<Tile: Send, Context: Send, Error: Send>(
    threads: usize,
    tiles: Vec<Tile>,
    share: impl Fn() -> Context,
    work: impl Fn(&Context, Tile) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let threads = threads.min(tiles.len());
    let own_threads = tch::get_num_threads();
    tch::set_num_threads(1);
    let (queue, failure) = (Mutex::new(tiles.into_iter()), Mutex::new(None));
    let run = |context: &Context| {
        loop {
            let Some(tile) = held(&queue).next() else { break };
            if let Err(error) = work(context, tile) {
                held(&queue).by_ref().for_each(drop);
                held(&failure).get_or_insert(error);
            }
        }
    };
    if threads <= 1 {
        run(&share());
    } else {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let (context, run) = (share(), &run);
                scope.spawn(move || {
                    tch::set_num_threads(1);
                    run(&context);
                });
            }
        });
    }
    tch::set_num_threads(own_threads);
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// A panic of another thread ends all of them when they are joined; until then what it left behind is whole.
fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A location encoder with threads.
#[derive(Debug)]
pub struct Embedder {
    encoder: LocationEncoder,
    threads: usize,
}

impl Embedder {
    /// On the CPU, `threads` tiles at once.
    pub fn new(encoder: LocationEncoder, threads: usize) -> Self {
        let threads = if encoder.device().is_cuda() { 1 } else { threads.max(1) };
        Self { encoder, threads }
    }

    /// Where it computes.
    pub fn device(&self) -> Device {
        self.encoder.device()
    }

    /// L2-normalised embeddings, one row of 512 after the other.
    pub fn embed(&self, places: &[Place]) -> Result<Vec<f32>, GeoclipError> {
        let mut out = vec![0.0_f32; places.len() * EMBEDDING_WIDTH];
        let rows = tile_rows(self.encoder.device());
        let tiles = places.chunks(rows).zip(out.chunks_mut(rows * EMBEDDING_WIDTH)).collect();
        let work =
            |encoder: &LocationEncoder, (places, out): (&[Place], &mut [f32])| embed_tile(encoder, places, out, rows);
        for_each_tile(self.threads, tiles, || self.encoder.share(), work)?;
        Ok(out)
    }
}

fn embed_tile(encoder: &LocationEncoder, places: &[Place], out: &mut [f32], rows: usize) -> Result<(), GeoclipError> {
    let mut degrees = vec![0.0_f32; 2 * rows];
    for (pair, place) in degrees.chunks_exact_mut(2).zip(places) {
        pair.copy_from_slice(&[place.latitude().0 as f32, place.longitude().0 as f32]);
    }
    let degrees = Tensor::f_from_slice(&degrees)?.f_view([rows as i64, 2])?;
    let embedded = encoder.embed(&degrees)?.f_to_device(Device::Cpu)?;
    Ok(embedded.f_copy_data(out, places.len() * EMBEDDING_WIDTH)?)
}
