//! Computes the embeddings of the photos of a simulated [`World`]. It draws the photos, embeds the places that each
//! photo looks like, mixes these embeddings into a look, and maps the look to the stored embedding ([`LookMap`]).
//!
//! The output depends on the seed, the places, GeoCLIP's weights and the kind of device. It does not depend on the
//! chunk size or the number of threads.

use std::ops::Range;
use std::time::{Duration, Instant};

use half::f16;
use locdiff_core::geo::Place;
use locdiff_core::random::RangeError;
use tch::{Device, Kind, Tensor};

use super::look_map::LookMap;
use super::options::Simulation;
use super::photo::{Photo, SHARE_PHOTOS, Source, World};
use crate::geoclip::{EMBEDDING_WIDTH, Embedder, FEATURE_WIDTH, GalleryEmbeddings, Geoclip, for_each_tile, tile_rows};
use crate::shards::{ShardsError, WriterRows};

/// For up to this many photos, only the gallery points that the photos need are embedded. A larger number of photos
/// needs most of the gallery, so all gallery points are embedded and saved on disk for the next run.
const FEW_PHOTOS: u64 = 20_000;
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Computes the embeddings of photos on a device, with GeoCLIP's location encoder and the gallery.
pub(super) struct PhotoEncoder<'a> {
    world: &'a dyn World,
    look_map: LookMap,
    embedder: Embedder,
    gallery: GalleryEmbeddings,
    device: Device,
    threads: usize,
    views: u32,
    seed: u64,
}

impl<'a> PhotoEncoder<'a> {
    pub(super) fn new(
        simulation: &Simulation,
        geoclip: &Geoclip,
        world: &'a dyn World,
        rows: u64,
    ) -> Result<Self, ShardsError> {
        let embedder = Embedder::new(geoclip.location_encoder(simulation.device)?, simulation.threads);
        let mut gallery = GalleryEmbeddings::open(geoclip, &embedder);
        if rows > FEW_PHOTOS {
            let mut progress = ProgressLog::new("gallery points", gallery.places().len() as u64);
            gallery.complete(&embedder, |done| progress.report(done as u64))?;
        }
        let look_map = world.look_map(simulation.device)?;
        let (device, threads) = (simulation.device, simulation.threads.max(1));
        let (views, seed) = (simulation.views, simulation.seed);
        Ok(Self { world, look_map, embedder, gallery, device, threads, views, seed })
    }

    /// Computes the rows of the photos with indices `range`.
    pub(super) fn encode(&mut self, range: Range<u64>) -> Result<WriterRows, ShardsError> {
        let photos = self.world.photos(range.clone(), self.threads).map_err(out_of_range)?;
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
            let looks = self.looks(&range, &photos, view, &fresh, &firsts)?;
            views.push(self.embeddings(&looks)?);
        }
        Ok(WriterRows {
            ids: range.map(|index| format!("sim-{}-{index}", self.seed)).collect(),
            latitudes: photos.iter().map(|photo| photo.place.latitude().0).collect(),
            longitudes: photos.iter().map(|photo| photo.place.longitude().0).collect(),
            views,
        })
    }

    /// Mixes the embeddings of each photo's sources into the look of a view.
    fn looks(
        &self,
        range: &Range<u64>,
        photos: &[Photo],
        view: u32,
        fresh: &[f32],
        firsts: &[usize],
    ) -> Result<Vec<f32>, ShardsError> {
        let (world, gallery, width) = (self.world, &self.gallery, self.look_map.look_width());
        let mut looks = vec![0.0; photos.len() * width];
        let shares: Vec<_> = looks.chunks_mut(SHARE_PHOTOS * width).enumerate().collect();
        for_each_tile(
            self.threads,
            shares,
            || (),
            |(), (share, looks): (usize, &mut [f32])| {
                for (offset, look) in looks.chunks_exact_mut(width).enumerate() {
                    let row = share * SHARE_PHOTOS + offset;
                    let embeddings = sources(gallery, &photos[row], firsts[row], fresh);
                    world.look(range.start + row as u64, &photos[row], view, &embeddings, look)?;
                }
                Ok(())
            },
        )
        .map_err(out_of_range)?;
        Ok(looks)
    }

    /// Maps each look to the stored embedding, rounded to float16.
    fn embeddings(&self, looks: &[f32]) -> Result<Vec<f16>, ShardsError> {
        let (device, width) = (self.device, self.look_map.look_width());
        let tile = tile_rows(device);
        let mut out = vec![f16::ZERO; looks.len() / width * FEATURE_WIDTH];
        let tiles = looks.chunks(tile * width).zip(out.chunks_mut(tile * FEATURE_WIDTH)).collect();
        let threads = if device.is_cuda() { 1 } else { self.threads };
        let work = |look_map: &LookMap, (looks, out): (&[f32], &mut [f16])| -> Result<(), ShardsError> {
            let mut padded = vec![0.0_f32; tile * width];
            padded[..looks.len()].copy_from_slice(looks);
            let looks = Tensor::f_from_slice(&padded)?.f_view([tile as i64, width as i64])?;
            let embeddings = look_map.apply(&looks.f_to_device(device)?)?.f_to_kind(Kind::Half)?;
            Ok(embeddings.f_to_device(Device::Cpu)?.f_copy_data(out, out.len())?)
        };
        for_each_tile(threads, tiles, || self.look_map.share(), work)?;
        Ok(out)
    }
}

/// Embeddings of a photo's sources (the places that the photo looks like). The embeddings of sources that are not in
/// the gallery are in `fresh`, starting at row `first`.
fn sources<'a>(gallery: &'a GalleryEmbeddings, photo: &Photo, first: usize, fresh: &'a [f32]) -> Vec<&'a [f32]> {
    let mut next = first;
    let embedding = |source: &Source| match source {
        Source::Gallery(index) => gallery.embedding(*index),
        Source::Place(_) => {
            next += 1;
            &fresh[(next - 1) * EMBEDDING_WIDTH..next * EMBEDDING_WIDTH]
        }
    };
    photo.sources.iter().map(embedding).collect()
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
