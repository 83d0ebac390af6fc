//! Computes the embeddings of the photos of a simulated world. It draws the photos, embeds the places that each photo
//! looks like, mixes these embeddings, and multiplies the mix by the projection matrix Q ([`projection`]).
//!
//! The output depends on the seed, the places, GeoCLIP's weights and the kind of device. It does not depend on the
//! chunk size or the number of threads.

use std::time::{Duration, Instant};

use half::f16;
use locdiff_core::geo::Place;
use locdiff_core::random::RangeError;
use tch::{Device, Kind, Tensor};

use super::options::Simulation;
use super::world::{BLOCK_PHOTOS, Candidates, Photo, SOURCES, Source, World};
use crate::geoclip::{EMBEDDING_WIDTH, Embedder, FEATURE_WIDTH, GalleryEmbeddings, Geoclip, for_each_tile, tile_rows};
use crate::shards::{PROJECTION_SEED, ShardsError, WriterRows, projection};

/// For up to this many photos, only the gallery points that the photos need are embedded. A larger number of photos
/// needs most of the gallery, so all gallery points are embedded and saved on disk for the next run.
const FEW_PHOTOS: u64 = 20_000;
/// Number of photos that one thread draws or mixes at a time.
const SHARE_PHOTOS: usize = 64;
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Computes the embeddings of photos on a device, with GeoCLIP's location encoder, the gallery and the matrix Q.
pub(super) struct PhotoEncoder {
    embedder: Embedder,
    gallery: GalleryEmbeddings,
    projection_we: Tensor,
    device: Device,
    threads: usize,
    views: u32,
    seed: u64,
}

impl PhotoEncoder {
    pub(super) fn new(simulation: &Simulation, geoclip: &Geoclip, rows: u64) -> Result<Self, ShardsError> {
        let embedder = Embedder::new(geoclip.location_encoder(simulation.device)?, simulation.threads);
        let mut gallery = GalleryEmbeddings::open(geoclip, &embedder);
        if rows > FEW_PHOTOS {
            let mut progress = ProgressLog::new("gallery points", gallery.places().len() as u64);
            gallery.complete(&embedder, |done| progress.report(done as u64))?;
        }
        let projection_we = projection(PROJECTION_SEED)?.f_tr()?.f_contiguous()?.f_to_device(simulation.device)?;
        let (device, threads) = (simulation.device, simulation.threads.max(1));
        let (views, seed) = (simulation.views, simulation.seed);
        Ok(Self { embedder, gallery, projection_we, device, threads, views, seed })
    }

    /// Computes the rows of the photos with indices `range`.
    pub(super) fn encode(&mut self, world: &World<'_>, range: std::ops::Range<u64>) -> Result<WriterRows, ShardsError> {
        let photos = self.draw(world, range.clone())?;
        let of_gallery = photos.iter().flat_map(|photo| &photo.sources).filter_map(|source| match source {
            Source::Gallery(index) => Some(*index),
            Source::Place(_) => None,
        });
        self.gallery.ensure(of_gallery, &self.embedder)?;
        // `fresh` lists all sources that are not in the gallery, photo by photo. For each photo, `firsts` holds the
        // index in `fresh` at which the sources of the photo begin.
        let (mut fresh, mut firsts): (Vec<Place>, Vec<usize>) = (Vec::new(), Vec::new());
        for photo in &photos {
            firsts.push(fresh.len());
            fresh.extend(photo.sources.iter().filter_map(|source| match source {
                Source::Gallery(_) => None,
                Source::Place(place) => Some(*place),
            }));
        }
        let fresh = self.embedder.embed(&fresh)?;
        let mut views = Vec::new();
        for view in 0..self.views {
            let looks = self.mix(world, &range, &photos, view, &fresh, &firsts)?;
            views.push(self.project(&looks)?);
        }
        Ok(WriterRows {
            ids: range.map(|index| format!("sim-{}-{index}", self.seed)).collect(),
            latitudes: photos.iter().map(|photo| photo.place.latitude().0).collect(),
            longitudes: photos.iter().map(|photo| photo.place.longitude().0).collect(),
            views,
        })
    }

    fn draw(&self, world: &World<'_>, range: std::ops::Range<u64>) -> Result<Vec<Photo>, ShardsError> {
        let first_block = range.start / BLOCK_PHOTOS;
        let blocks = (first_block..=(range.end - 1) / BLOCK_PHOTOS).map(|block| world.candidates(block));
        let candidates: Vec<Candidates> = blocks.collect::<Result<_, _>>().map_err(out_of_range)?;
        let mut photos: Vec<Option<Photo>> = vec![None; (range.end - range.start) as usize];
        let shares: Vec<_> = photos.chunks_mut(SHARE_PHOTOS).enumerate().collect();
        for_each_tile(
            self.threads,
            shares,
            || (),
            |(), (share, photos): (usize, &mut [Option<Photo>])| {
                for (photo, index) in photos.iter_mut().zip(range.start + (share * SHARE_PHOTOS) as u64..) {
                    *photo = Some(world.photo(index, &candidates[(index / BLOCK_PHOTOS - first_block) as usize])?);
                }
                Ok(())
            },
        )
        .map_err(out_of_range)?;
        Ok(photos.into_iter().flatten().collect())
    }

    /// Mixes the embeddings of each photo's sources into one unit vector in GeoCLIP's space.
    fn mix(
        &self,
        world: &World<'_>,
        range: &std::ops::Range<u64>,
        photos: &[Photo],
        view: u32,
        fresh: &[f32],
        firsts: &[usize],
    ) -> Result<Vec<f32>, ShardsError> {
        let gallery = &self.gallery;
        let mut looks = vec![0.0; photos.len() * EMBEDDING_WIDTH];
        let shares: Vec<_> = looks.chunks_mut(SHARE_PHOTOS * EMBEDDING_WIDTH).enumerate().collect();
        for_each_tile(
            self.threads,
            shares,
            || (),
            |(), (share, looks): (usize, &mut [f32])| {
                for (offset, look) in looks.chunks_exact_mut(EMBEDDING_WIDTH).enumerate() {
                    let row = share * SHARE_PHOTOS + offset;
                    let embeddings = sources(gallery, &photos[row], firsts[row], fresh);
                    world.embed_view(
                        range.start + row as u64,
                        &photos[row],
                        view,
                        |source| embeddings[source],
                        look,
                    )?;
                }
                Ok(())
            },
        )
        .map_err(out_of_range)?;
        Ok(looks)
    }

    /// Multiplies each vector of `looks` by Q and rounds the result to float16.
    fn project(&self, looks: &[f32]) -> Result<Vec<f16>, ShardsError> {
        let device = self.device;
        let tile = tile_rows(device);
        let mut out = vec![f16::ZERO; looks.len() / EMBEDDING_WIDTH * FEATURE_WIDTH];
        let tiles = looks.chunks(tile * EMBEDDING_WIDTH).zip(out.chunks_mut(tile * FEATURE_WIDTH)).collect();
        let threads = if device.is_cuda() { 1 } else { self.threads };
        let work = |projection_we: &Tensor, (looks, out): (&[f32], &mut [f16])| -> Result<(), ShardsError> {
            let mut padded = vec![0.0_f32; tile * EMBEDDING_WIDTH];
            padded[..looks.len()].copy_from_slice(looks);
            let looks = Tensor::f_from_slice(&padded)?.f_view([tile as i64, EMBEDDING_WIDTH as i64])?;
            let projected = looks.f_to_device(device)?.f_matmul(projection_we)?.f_to_kind(Kind::Half)?;
            Ok(projected.f_to_device(Device::Cpu)?.f_copy_data(out, out.len())?)
        };
        for_each_tile(threads, tiles, || self.projection_we.shallow_clone(), work)?;
        Ok(out)
    }
}

/// Embeddings of a photo's sources (the places that the photo looks like). The embeddings of sources that are not in
/// the gallery are in `fresh`, starting at row `first`.
fn sources<'a>(gallery: &'a GalleryEmbeddings, photo: &Photo, first: usize, fresh: &'a [f32]) -> [&'a [f32]; SOURCES] {
    let mut next = first;
    photo.sources.map(|source| match source {
        Source::Gallery(index) => gallery.embedding(index),
        Source::Place(_) => {
            next += 1;
            &fresh[(next - 1) * EMBEDDING_WIDTH..next * EMBEDDING_WIDTH]
        }
    })
}

fn out_of_range(error: RangeError) -> ShardsError {
    ShardsError::Argument(error.to_string())
}

/// Logs progress, at most once per [`REPORT_INTERVAL`].
pub(super) struct ProgressLog {
    what: &'static str,
    total: u64,
    start: Instant,
    last_report: Instant,
}

impl ProgressLog {
    pub(super) fn new(what: &'static str, total: u64) -> Self {
        Self { what, total, start: Instant::now(), last_report: Instant::now() }
    }

    pub(super) fn report(&mut self, done: u64) {
        if self.last_report.elapsed() >= REPORT_INTERVAL {
            self.last_report = Instant::now();
            let per_second = done as f64 / self.start.elapsed().as_secs_f64();
            tracing::info!("computed {done} of {} {}, {per_second:.0} per second", self.total, self.what);
        }
    }
}
