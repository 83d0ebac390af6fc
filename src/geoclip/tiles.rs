//! Embeds many places. On one kind of device, the bits of an embedding depend only on the weights and the place.
//!
//! The rounding of a matrix product depends on the number of rows and threads. Places are therefore encoded in tiles
//! with a fixed number of rows. Each tile is computed by one thread, and the last tile is padded. An embedding then
//! depends neither on the batch nor on the number of threads.

use locdiff_core::pulse;
use std::sync::{Mutex, MutexGuard, PoisonError};

use locdiff_core::geo::Place;
use tch::{Device, Tensor};

use super::EMBEDDING_WIDTH;
use super::error::GeoclipError;
use super::location::LocationEncoder;

/// Number of rows of a tile on the CPU. With this number, the activations of a layer take half a MiB and fit in the L2
/// cache.
const CPU_TILE_ROWS: usize = 128;
/// Number of rows of a tile on a GPU. This number is large enough to keep the GPU busy.
const CUDA_TILE_ROWS: usize = 4096;

/// Number of rows of a tile on `device`.
pub fn tile_rows(device: Device) -> usize {
    if device.is_cuda() { CUDA_TILE_ROWS } else { CPU_TILE_ROWS }
}

/// Calls `work` for every tile, on up to `threads` threads. If `threads` is 1 or there is only one tile, `work` runs on
/// the caller's thread. `share` creates the context that a thread passes to `work`. libtorch's intra-op threads are
/// switched off during the call. After the first failure no further tiles are started.
pub fn for_each_tile<Tile: Send, Context: Send, Error: Send>(
    threads: usize,
    tiles: Vec<Tile>,
    share: impl Fn() -> Context,
    work: impl Fn(&Context, Tile) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let threads = threads.min(tiles.len());
    let threads_before = tch::get_num_threads();
    tch::set_num_threads(1);
    let (queue, failure) = (Mutex::new(tiles.into_iter()), Mutex::new(None));
    let run = |context: &Context| {
        loop {
            let Some(tile) = lock(&queue).next() else { break };
            pulse::advance();
            if let Err(error) = work(context, tile) {
                lock(&queue).by_ref().for_each(drop);
                lock(&failure).get_or_insert(error);
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
    tch::set_num_threads(threads_before);
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Locks the mutex even if it is poisoned: the data stays valid, and the panic is propagated when the threads are
/// joined.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A location encoder that runs on several threads.
#[derive(Debug)]
pub struct Embedder {
    encoder: LocationEncoder,
    threads: usize,
}

impl Embedder {
    /// Creates an embedder. On the CPU, it computes up to `threads` tiles at once. On a GPU, `threads` is ignored.
    pub fn new(encoder: LocationEncoder, threads: usize) -> Self {
        let threads = if encoder.device().is_cuda() { 1 } else { threads.max(1) };
        Self { encoder, threads }
    }

    /// The device of the encoder.
    pub fn device(&self) -> Device {
        self.encoder.device()
    }

    /// Computes the L2-normalised embeddings of `places`: one row of 512 numbers per place.
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
