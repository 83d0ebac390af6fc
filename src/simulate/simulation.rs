//! `shards simulate`: writes embeddings of simulated photos at real places. The photos are about as hard to locate as
//! real photos.
//!
//! A [`World`] decides which places a photo looks like. [`PhotoEncoder`] embeds these places, mixes their embeddings
//! and maps the mix to the stored embedding. This module writes the shards: one worker writes all files in order, and
//! several workers write a folder for each file, which are joined at the end.
//!
//! The output depends on the seed, the places, GeoCLIP's weights and the kind of device. It does not depend on the
//! chunk size or the number of threads, because embeddings and matrix products are computed in tiles of a fixed size
//! ([`crate::geoclip::for_each_tile`]), and everything else is computed separately for each photo.

use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::sync_channel;

use locdiff_core::geo::Place;
use locdiff_core::protocol::{CellPart, CellSplit, PieceFolders, SimulatedWorld};
use locdiff_core::tables;

use super::cells::places_of_part;
use super::encoder::{PhotoEncoder, ProgressLog};
use super::options::Simulation;
use super::photo::World;
use super::world1::World1;
use super::world2::{MAP_SEED, World2};
use crate::geoclip::{FEATURE_WIDTH, Geoclip};
use crate::shards::{
    Manifest, PROJECTION_SEED, ShardWriter, ShardsError, WriterOptions, WriterRows, check_target, join,
};

/// Default size of a chunk of photos, counted in views (one embedding each). The embeddings of a chunk take 25 MB.
/// Intermediate results take up to 200 MB, depending on how many of the places that the photos look like are not in the
/// gallery.
const CHUNK_VIEWS: usize = 16_384;

/// Writes a folder of simulated shards and returns its manifest.
pub fn simulate(simulation: &Simulation, out: &Path) -> Result<Manifest, ShardsError> {
    check_target(out, simulation.overwrite)?;
    let inputs = SimulationInputs::read(simulation)?;
    let opened = Opened::new(simulation, &inputs)?;
    opened.write(&mut opened.encoder()?, 0..opened.rows, out, opened.options())
}

/// Simulates the pieces of worker `rank` of `world` workers that earlier attempts have not completed. They will be joined
/// to the folder `out`. Returns the number of simulated photos.
pub fn simulate_pieces(
    simulation: &Simulation,
    folders: &PieceFolders,
    out: &Path,
    (rank, world): (u32, u32),
) -> Result<u64, ShardsError> {
    check_target(out, simulation.overwrite)?;
    let inputs = SimulationInputs::read(simulation)?;
    let opened = Opened::new(simulation, &inputs)?;
    // A worker without pieces needs no embeddings of the gallery.
    let (mut encoder, mut rows) = (None, 0);
    let open = (0..).zip(opened.pieces()).filter(|(number, _)| !folders.earlier.contains_key(number));
    for (number, piece) in open.skip(rank as usize).step_by(world as usize) {
        let encoder = match &mut encoder {
            Some(encoder) => encoder,
            None => encoder.insert(opened.encoder()?),
        };
        let options = WriterOptions { overwrite: true, ..opened.options() };
        rows += opened.write(encoder, piece, &folders.piece(number), options)?.rows;
    }
    Ok(rows)
}

/// Joins all pieces to a folder of simulated shards. Its bytes are the same as those of [`simulate`].
pub fn join_pieces(simulation: &Simulation, folders: &PieceFolders, out: &Path) -> Result<Manifest, ShardsError> {
    let inputs = SimulationInputs::read(simulation)?;
    let opened = Opened::new(simulation, &inputs)?;
    let pieces = (0..).zip(opened.pieces()).map(|(number, rows)| (folders.piece(number), rows.end - rows.start));
    join(&pieces.collect::<Vec<_>>(), opened.options(), out)
}

/// The files that a simulation reads.
struct SimulationInputs {
    geoclip: Geoclip,
    /// The places of photos; `None` means the places of GeoCLIP's gallery.
    places: Option<Vec<Place>>,
}

impl SimulationInputs {
    fn read(simulation: &Simulation) -> Result<Self, ShardsError> {
        let mut places = simulation.coordinates.as_deref().map(tables::read_places).transpose()?;
        let geoclip = Geoclip::open(&simulation.geoclip)?;
        if let Some(split) = &simulation.cells {
            let part = places_of_part(places.as_deref().unwrap_or(geoclip.places()), split);
            if part.is_empty() {
                return Err(ShardsError::Argument(no_places(split)));
            }
            places = Some(part);
        }
        Ok(Self { geoclip, places })
    }
}

/// A simulation that is ready to run.
struct Opened<'a> {
    simulation: &'a Simulation,
    geoclip: &'a Geoclip,
    world: Box<dyn World + 'a>,
    rows: u64,
}

impl<'a> Opened<'a> {
    fn new(
        simulation: &'a Simulation,
        SimulationInputs { geoclip, places }: &'a SimulationInputs,
    ) -> Result<Self, ShardsError> {
        if simulation.rows == Some(0) {
            return Err(ShardsError::Argument("--rows is 0, wanted at least 1".to_owned()));
        }
        let world: Box<dyn World> = match simulation.world {
            SimulatedWorld::One => Box::new(World1::new(simulation.seed, geoclip.places(), places.as_deref())),
            SimulatedWorld::Two => Box::new(World2::new(simulation.seed, geoclip.places(), places.as_deref())),
        };
        if !(1..=world.views_max()).contains(&simulation.views) {
            let (views, max, world) = (simulation.views, world.views_max(), simulation.world);
            return Err(ShardsError::Argument(format!("--views is {views}, wanted 1 to {max} in world {world}")));
        }
        let spots = places.as_ref().map_or(geoclip.places().len(), Vec::len) as u64;
        Ok(Self { simulation, rows: simulation.rows.unwrap_or(spots), geoclip, world })
    }

    fn options(&self) -> WriterOptions {
        let Simulation { views, overwrite, rows_per_file, .. } = *self.simulation;
        let options = WriterOptions::new(FEATURE_WIDTH as u32, views, source(self.simulation), self.world.image_head());
        WriterOptions { overwrite, rows_per_file: rows_per_file.unwrap_or(options.rows_per_file), ..options }
    }

    /// The photos of each file.
    fn pieces(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (rows, size) = (self.rows, self.options().whole_file_rows());
        (0..rows.div_ceil(size)).map(move |piece| piece * size..rows.min((piece + 1) * size))
    }

    fn encoder(&self) -> Result<PhotoEncoder<'_>, ShardsError> {
        PhotoEncoder::new(self.simulation, self.geoclip, self.world.as_ref(), self.rows)
    }

    /// Writes a folder with the photos whose indices are in `range`.
    fn write(
        &self,
        encoder: &mut PhotoEncoder<'_>,
        range: Range<u64>,
        out: &Path,
        options: WriterOptions,
    ) -> Result<Manifest, ShardsError> {
        let writer = ShardWriter::create(out, options)?;
        let chunk = CHUNK_VIEWS / self.simulation.views as usize;
        let chunk = self.simulation.chunk_rows.unwrap_or(chunk).max(1) as u64;
        let mut progress = ProgressLog::new("photos", range.end - range.start);
        let starts = range.clone().step_by(usize::try_from(chunk).unwrap_or(usize::MAX));
        let shots = starts.map(|first| {
            let end = range.end.min(first + chunk);
            let shot = encoder.encode(first..end);
            progress.report(end - range.start);
            shot
        });
        write_all(writer, shots)?.finish()
    }
}

/// Writes one chunk of photos while the next chunk is computed. If writing or computing fails, the unfinished folder is
/// deleted.
fn write_all(
    mut writer: ShardWriter,
    mut shots: impl Iterator<Item = Result<WriterRows, ShardsError>>,
) -> Result<ShardWriter, ShardsError> {
    std::thread::scope(|scope| {
        let (sender, arrivals) = sync_channel::<WriterRows>(1);
        let writing = scope.spawn(move || -> Result<ShardWriter, ShardsError> {
            arrivals.into_iter().try_for_each(|shot| writer.push(&shot))?;
            Ok(writer)
        });
        // If the writer has failed, sending fails too, and the loop ends. Joining the writer's thread then returns the
        // writer's error.
        let mut send_all = || -> Result<(), ShardsError> {
            while let Some(shot) = shots.next().transpose()?
                && sender.send(shot).is_ok()
            {}
            Ok(())
        };
        let sent = send_all();
        drop(sender);
        let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        sent.and(written)
    })
}

/// The error for a part without places.
fn no_places(split: &CellSplit) -> String {
    let advice = match split.part {
        CellPart::Train => "no cell that is used for training has a second place; give more places, or larger cells",
        CellPart::Thinned => "all cells are held out; give smaller cells, or a smaller --held-out",
        CellPart::HeldOut => "no cell is held out; set --held-out to a share such as 0.15, or give smaller cells",
    };
    format!("--part {} has no places with --cells {}: {advice}", split.part, split.degrees)
}

/// The `source` field of the manifest.
fn source(simulation: &Simulation) -> String {
    let places = simulation.coordinates.as_ref().and_then(|path| path.file_name());
    let places = places.map_or_else(|| "GeoCLIP's gallery".into(), |name| name.to_string_lossy());
    let part = simulation.cells.map(|CellSplit { degrees, held_out, part }| {
        format!(" ({part} of cells of {degrees} degrees, {held_out} of them held out)")
    });
    let places = format!("{places}{}", part.unwrap_or_default());
    let device = if simulation.device.is_cuda() { "cuda" } else { "cpu" };
    let seed = simulation.seed;
    match simulation.world {
        SimulatedWorld::One => {
            format!("simulated: seed {seed}, places of {places}, projection seed {PROJECTION_SEED}, on {device}")
        }
        SimulatedWorld::Two => {
            format!("simulated: world 2, seed {seed}, places of {places}, map seed {MAP_SEED}, on {device}")
        }
    }
}
