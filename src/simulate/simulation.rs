//! `shards simulate`: embeddings of photos that nobody took, at real places, as hard to locate as real ones.
//!
//! What a photo shows is [`World`]'s; here its places are embedded, mixed, turned by Q and written. The bytes depend on seed,
//! places, weights and the kind of device, not on chunks or threads: embeddings and products are computed in tiles
//! ([`crate::geoclip::for_each_tile`]), everything else per photo.

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use half::f16;
use locdiff_core::geo::Place;
use locdiff_core::random::RangeError;
use tch::{Device, Kind, Tensor};

use super::ShardsError;
use super::coordinates::read_coordinates;
use super::linear_head::{PROJECTION_SEED, projection};
use super::manifest::{ImageHead, Manifest};
use super::world::{BLOCK_PHOTOS, Candidates, Photo, SOURCES, Source, Spots, World};
use super::writer::{ShardWriter, WriterOptions, WriterRows};
use crate::geoclip::{EMBEDDING_WIDTH, Embedder, FEATURE_WIDTH, Gallery, Geoclip, for_each_tile, tile_rows};

/// Most photos worth computing without the whole gallery: more need most of it anyway, and the next run finds it on disk.
const FEW_PHOTOS: u64 = 20_000;
/// Views of all photos of a chunk: 25 MB of embeddings, and twice that on the way.
const CHUNK_VIEWS: usize = 16_384;
/// Photos that one thread draws or mixes at a time.
const SHARE_PHOTOS: usize = 64;
const SAY_EVERY: Duration = Duration::from_secs(5);
/// Views per photo: more would be a mistake.
const VIEWS_MAX: u32 = 256;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Simulation {
    /// Photos; none: one per place.
    pub rows: Option<u64>,
    /// Seed of everything random but Q.
    pub seed: u64,
    /// Views per photo.
    pub views: u32,
    /// Places instead of GeoCLIP's gallery.
    pub coordinates: Option<PathBuf>,
    /// Folder with GeoCLIP's weights and gallery.
    pub geoclip: PathBuf,
    /// Replace the folder if it exists.
    pub overwrite: bool,
    /// Where embeddings are computed.
    pub device: Device,
    /// Threads.
    pub threads: usize,
    /// Photos computed at once; none: as memory suggests. Changes no byte.
    pub chunk_rows: Option<usize>,
}

/// Simulates a folder of shards.
pub fn simulate(simulation: &Simulation, out: &Path) -> Result<Manifest, ShardsError> {
    if !(1..=VIEWS_MAX).contains(&simulation.views) {
        return Err(ShardsError::Argument(format!("--views is {}, wanted 1 to {VIEWS_MAX}", simulation.views)));
    }
    if simulation.rows == Some(0) {
        return Err(ShardsError::Argument("--rows is 0, wanted at least 1".to_owned()));
    }
    let places = simulation.coordinates.as_deref().map(read_coordinates).transpose()?;
    let geoclip = Geoclip::open(&simulation.geoclip)?;
    let spots = places.as_ref().map_or(geoclip.places().len(), Vec::len) as u64;
    let rows = simulation.rows.unwrap_or(spots);
    let options = WriterOptions {
        overwrite: simulation.overwrite,
        ..WriterOptions::new(FEATURE_WIDTH as u32, simulation.views, source(simulation), ImageHead::Linear)
    };
    let writer = ShardWriter::create(out, options)?;
    let mut studio = Studio::new(simulation, &geoclip, rows)?;
    let world = World::new(simulation.seed, geoclip.places(), places.as_deref().map_or(Spots::Gallery, Spots::Places));
    let chunk = simulation.chunk_rows.unwrap_or(CHUNK_VIEWS / simulation.views as usize).max(1) as u64;
    let starts = (0..rows).step_by(usize::try_from(chunk).unwrap_or(usize::MAX));
    let mut progress = Progress::new("photos", rows);
    let shots = starts.map(|first| {
        let end = rows.min(first + chunk);
        let shot = studio.shoot(&world, first..end);
        progress.say(end);
        shot
    });
    let (writer, writing) = write_all(writer, shots)?;
    let manifest = writer.finish()?;
    let Times { drawing, embedding, mixing, turning } = studio.times;
    tracing::info!(
        "drawing took {drawing:.1?}, embedding {embedding:.1?}, mixing {mixing:.1?}, turning {turning:.1?}; beside that, writing {writing:.1?}"
    );
    Ok(manifest)
}

/// Writes one chunk of photos while the next is made, and says how long it wrote. Nothing is finished where either fails.
fn write_all(
    mut writer: ShardWriter,
    mut shots: impl Iterator<Item = Result<Shot, ShardsError>>,
) -> Result<(ShardWriter, Duration), ShardsError> {
    std::thread::scope(|scope| {
        let (sender, arrivals) = sync_channel::<Shot>(1);
        let writing = scope.spawn(move || -> Result<(ShardWriter, Duration), ShardsError> {
            let mut took = Duration::ZERO;
            arrivals.into_iter().try_for_each(|shot| timed(&mut took, || shot.write(&mut writer)))?;
            Ok((writer, took))
        });
        // A writer that has failed listens no more, and says why below.
        let mut send_all = || -> Result<(), ShardsError> {
            while let Some(shot) = shots.next().transpose()?
                && sender.send(shot).is_ok()
            {}
            Ok(())
        };
        let made = send_all();
        drop(sender);
        let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        made.and(written)
    })
}

/// What the manifest says of them.
fn source(simulation: &Simulation) -> String {
    let places = simulation.coordinates.as_ref().and_then(|path| path.file_name());
    let places = places.map_or_else(|| "GeoCLIP's gallery".into(), |name| name.to_string_lossy());
    let device = if simulation.device.is_cuda() { "cuda" } else { "cpu" };
    format!("simulated: seed {}, places of {places}, projection seed {PROJECTION_SEED}, on {device}", simulation.seed)
}

/// Photos that are made and not yet written.
struct Shot {
    ids: Vec<String>,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
    views: Vec<Vec<f16>>,
}

impl Shot {
    fn write(&self, writer: &mut ShardWriter) -> Result<(), ShardsError> {
        let Self { ids, latitudes, longitudes, views } = self;
        let views: Vec<&[f16]> = views.iter().map(Vec::as_slice).collect();
        writer.push(&WriterRows { ids, latitudes, longitudes, views: &views })
    }
}

/// Where the time goes.
#[derive(Default)]
struct Times {
    drawing: Duration,
    embedding: Duration,
    mixing: Duration,
    turning: Duration,
}

fn timed<Done>(sum: &mut Duration, work: impl FnOnce() -> Done) -> Done {
    let start = Instant::now();
    let done = work();
    *sum += start.elapsed();
    done
}

/// Encoder, gallery and Q on a device.
struct Studio {
    times: Times,
    embedder: Embedder,
    gallery: Gallery,
    projection_we: Tensor,
    device: Device,
    threads: usize,
    views: u32,
    seed: u64,
}

impl Studio {
    fn new(simulation: &Simulation, geoclip: &Geoclip, rows: u64) -> Result<Self, ShardsError> {
        let embedder = Embedder::new(geoclip.location_encoder(simulation.device)?, simulation.threads);
        let mut gallery = Gallery::open(geoclip, &embedder);
        if rows > FEW_PHOTOS {
            let mut progress = Progress::new("gallery points", gallery.places().len() as u64);
            gallery.complete(&embedder, |done| progress.say(done as u64))?;
        }
        let projection_we = projection(PROJECTION_SEED)?.f_tr()?.f_contiguous()?.f_to_device(simulation.device)?;
        let (device, threads) = (simulation.device, simulation.threads.max(1));
        let (times, views, seed) = (Times::default(), simulation.views, simulation.seed);
        Ok(Self { times, embedder, gallery, projection_we, device, threads, views, seed })
    }

    /// Makes photos `range`.
    fn shoot(&mut self, world: &World<'_>, range: std::ops::Range<u64>) -> Result<Shot, ShardsError> {
        let mut times = std::mem::take(&mut self.times);
        let photos = timed(&mut times.drawing, || self.draw(world, range.clone()))?;
        let sources = || photos.iter().flat_map(|photo| &photo.sources);
        let of_gallery = sources().filter_map(|source| match source {
            Source::Gallery(index) => Some(*index),
            Source::Place(_) => None,
        });
        timed(&mut times.embedding, || self.gallery.need(of_gallery, &self.embedder))?;
        // Where each photo's own places begin among those that are embedded for this chunk alone.
        let (mut fresh, mut firsts): (Vec<Place>, Vec<usize>) = (Vec::new(), Vec::new());
        for photo in &photos {
            firsts.push(fresh.len());
            fresh.extend(photo.sources.iter().filter_map(|source| match source {
                Source::Gallery(_) => None,
                Source::Place(place) => Some(*place),
            }));
        }
        let fresh = timed(&mut times.embedding, || self.embedder.embed(&fresh))?;
        let mut views = Vec::new();
        for view in 0..self.views {
            let looks = timed(&mut times.mixing, || self.mix(world, &range, &photos, view, &fresh, &firsts))?;
            views.push(timed(&mut times.turning, || self.turn(&looks))?);
        }
        self.times = times;
        Ok(Shot {
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

    /// Unit vectors of GeoCLIP's space, one per photo.
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
                    world.look(range.start + row as u64, &photos[row], view, |source| embeddings[source], look)?;
                }
                Ok(())
            },
        )
        .map_err(out_of_range)?;
        Ok(looks)
    }

    /// Q y for every row, rounded to float16.
    fn turn(&self, looks: &[f32]) -> Result<Vec<f16>, ShardsError> {
        let device = self.device;
        let tile = tile_rows(device);
        let mut out = vec![f16::ZERO; looks.len() / EMBEDDING_WIDTH * FEATURE_WIDTH];
        let tiles = looks.chunks(tile * EMBEDDING_WIDTH).zip(out.chunks_mut(tile * FEATURE_WIDTH)).collect();
        let threads = if device.is_cuda() { 1 } else { self.threads };
        let work = |projection_we: &Tensor, (looks, out): (&[f32], &mut [f16])| -> Result<(), ShardsError> {
            let mut padded = vec![0.0_f32; tile * EMBEDDING_WIDTH];
            padded[..looks.len()].copy_from_slice(looks);
            let looks = Tensor::f_from_slice(&padded)?.f_view([tile as i64, EMBEDDING_WIDTH as i64])?;
            let turned = looks.f_to_device(device)?.f_matmul(projection_we)?.f_to_kind(Kind::Half)?;
            Ok(turned.f_to_device(Device::Cpu)?.f_copy_data(out, out.len())?)
        };
        for_each_tile(threads, tiles, || self.projection_we.shallow_clone(), work)?;
        Ok(out)
    }
}

/// The embeddings of what a photo looks like; those of no gallery point begin at `first` of `fresh`.
fn sources<'a>(gallery: &'a Gallery, photo: &Photo, first: usize, fresh: &'a [f32]) -> [&'a [f32]; SOURCES] {
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

/// Says now and then how far it is.
struct Progress {
    what: &'static str,
    total: u64,
    start: Instant,
    said: Instant,
}

impl Progress {
    fn new(what: &'static str, total: u64) -> Self {
        Self { what, total, start: Instant::now(), said: Instant::now() }
    }

    fn say(&mut self, done: u64) {
        if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            let per_second = done as f64 / self.start.elapsed().as_secs_f64();
            tracing::info!("{done} of {} {}, {per_second:.0} per second", self.total, self.what);
        }
    }
}
