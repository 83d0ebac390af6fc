//! The rows of a data set in blocks of a fixed number of images, whoever reads them.
//!
//! Matrix products round differently for different numbers of rows, and a row's place among them may matter too. So images
//! are computed in blocks that are a function of the data alone, the last one filled up with zeros: a worker takes whole
//! blocks, and no bit depends on how many workers there are.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use locdiff_core::config::{OnBadRows, RunConfig};
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::predictions::{PredictionsError, Truth};
use tch::{Device, Kind, Tensor};

use super::error::EvalError;
use crate::shards::{BlockRows, Blocks, Dataset, ELEMENT_BYTES, ImageHead, Mask, ShardsError};

/// Images of a block. Sixteen samples of each make 1024 chains: enough to keep a GPU busy.
pub const BLOCK_IMAGES: usize = 64;

/// A row to locate.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    /// Its number among all rows of the data, from 0.
    pub row: u64,
    /// Its identifier; its number where the data has none.
    pub id: String,
    /// Where it really is.
    pub truth: Place,
    /// Embeddings of all views, one after the other, float16.
    pub views: Vec<u8>,
}

/// Up to [`BLOCK_IMAGES`] images that follow each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageBlock {
    /// Number of the first image among those that can be used.
    pub first: u64,
    /// The images.
    pub images: Vec<Image>,
    /// Views of each.
    pub views: usize,
    /// Numbers of an embedding.
    pub width: usize,
}

impl ImageBlock {
    /// Embeddings `[BLOCK_IMAGES * views, width]` in float16, image after image; zeros where there is no image.
    pub fn embeddings(&self, device: Device) -> Result<Tensor, EvalError> {
        let row_bytes = self.views * self.width * ELEMENT_BYTES;
        let mut bytes = vec![0; BLOCK_IMAGES * row_bytes];
        for (row, image) in bytes.chunks_exact_mut(row_bytes).zip(&self.images) {
            row.copy_from_slice(&image.views);
        }
        let shape = [(BLOCK_IMAGES * self.views) as i64, self.width as i64];
        Ok(Tensor::f_from_data_size(&bytes, &shape, Kind::Half)?.f_to_device(device)?)
    }
}

/// An open data set and which of its rows count.
pub struct Rows {
    dataset: Dataset,
    mask: Mask,
    /// Number of the first usable row of each block, and of all rows at the end.
    firsts: Vec<u64>,
    location: String,
    /// `eval.truth`, where there is one: places by identifier.
    truth: Option<(String, HashMap<String, Place>)>,
}

impl Rows {
    /// Opens shards; where the configuration says so, rows that cannot be used are looked for and left out. `eval.truth` is that of
    /// `shards.test` and of no other data.
    pub fn open(location: &str, config: &RunConfig) -> Result<Self, EvalError> {
        let dataset = Dataset::open(location, &config.shards)?;
        let mask = Mask::for_config(&dataset, &config.shards)?;
        if let Some(words) = mask.describe(&dataset) {
            tracing::warn!("{words}");
        }
        let mask = match config.shards.on_bad_rows {
            OnBadRows::Error => mask,
            OnBadRows::Skip => without_nameless(&dataset, mask)?,
        };
        let mut firsts = vec![0];
        for (block, rows) in (0_u32..).zip(dataset.block_rows()) {
            firsts.push(firsts[block as usize] + u64::from(*rows) - mask.skipped(block).len() as u64);
        }
        let truth = match config.eval.truth.as_str() {
            "" => None,
            path if location == config.shards.test => Some((path.to_owned(), read_truth(path, location, &dataset)?)),
            _ => None,
        };
        let rows = Self { dataset, mask, firsts, location: location.to_owned(), truth };
        if rows.count() == 0 {
            return Err(EvalError::Empty { location: location.to_owned(), skipped: rows.skipped() });
        }
        Ok(rows)
    }

    /// The data set.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Which of its rows are left out.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// Rows that can be used.
    pub fn count(&self) -> u64 {
        self.firsts.last().copied().unwrap_or_default()
    }

    /// Rows that are left out.
    pub fn skipped(&self) -> u64 {
        self.mask.count()
    }

    /// Whether nobody took these photos.
    pub fn is_simulated(&self) -> bool {
        self.dataset.origin().is_some_and(|origin| origin.image_head == ImageHead::Linear)
    }

    /// The rows of one worker among several: whole blocks, as evenly as they come.
    pub fn share(&self, rank: u32, world: u32) -> Range<u64> {
        let blocks = self.count().div_ceil(BLOCK_IMAGES as u64);
        let bound = |rank: u32| (blocks * u64::from(rank) / u64::from(world) * BLOCK_IMAGES as u64).min(self.count());
        bound(rank)..bound(rank + 1)
    }

    /// Reads a share and hands it out block by block.
    pub fn for_each_block(
        &self,
        share: Range<u64>,
        mut work: impl FnMut(&ImageBlock) -> Result<(), EvalError>,
    ) -> Result<(), EvalError> {
        let (views, width) = (self.dataset.views() as usize, self.dataset.width());
        let mut waiting = ImageBlock { first: share.start, images: Vec::new(), views, width };
        for block in 0..self.dataset.block_rows().len() as u32 {
            let own = self.firsts[block as usize]..self.firsts[block as usize + 1];
            if own.start >= share.end || own.end <= share.start {
                continue;
            }
            for (index, image) in own.zip(self.read(block)?) {
                if share.contains(&index) {
                    waiting.images.push(image);
                }
                if waiting.images.len() == BLOCK_IMAGES {
                    work(&waiting)?;
                    waiting.first += BLOCK_IMAGES as u64;
                    waiting.images.clear();
                }
            }
        }
        if waiting.images.is_empty() { Ok(()) } else { work(&waiting) }
    }

    /// The usable rows of a block of the data, with all views.
    fn read(&self, block: u32) -> Result<Vec<Image>, EvalError> {
        let skipped = self.mask.skipped(block);
        let row_bytes = self.dataset.width() * ELEMENT_BYTES;
        let mut views = vec![BlockRows::default(); self.dataset.views() as usize];
        for (view, rows) in (0_u32..).zip(&mut views) {
            self.dataset.read_except(block, view, skipped, rows)?;
        }
        let mut names = names(&self.dataset, block)?;
        let first_row = first_row(&self.dataset, block);
        let mut images = Vec::new();
        for row in (0..views[0].latitudes.len()).filter(|row| skipped.binary_search(&(*row as u32)).is_err()) {
            let id = std::mem::replace(&mut names[row], Ok(String::new()));
            let id = id.map_err(|reason| nameless(&self.dataset, block, row, &reason))?;
            let own = Place::new(Degrees(views[0].latitudes[row]), Degrees(views[0].longitudes[row]))?;
            images.push(Image {
                row: first_row + row as u64,
                truth: self.truth_of(&id, own)?,
                id,
                views: views
                    .iter()
                    .flat_map(|view| &view.embeddings[row * row_bytes..(row + 1) * row_bytes])
                    .copied()
                    .collect(),
            });
        }
        Ok(images)
    }

    /// Where a row really is: as the shards say, or as `eval.truth` does.
    fn truth_of(&self, id: &str, own: Place) -> Result<Place, EvalError> {
        let Some((path, places)) = &self.truth else { return Ok(own) };
        let missing = || EvalError::NoTruth { truth: path.clone(), id: id.to_owned(), location: self.location.clone() };
        places.get(id).copied().ok_or_else(missing)
    }
}

/// Number of a block's first row among all rows of the data.
fn first_row(dataset: &Dataset, block: u32) -> u64 {
    dataset.block_rows()[..block as usize].iter().map(|rows| u64::from(*rows)).sum()
}

/// What a block's rows are called, or why a row cannot be: by their identifiers, by their numbers where the data has none.
fn names(dataset: &Dataset, block: u32) -> Result<Vec<Result<String, String>>, EvalError> {
    let (first, rows) = (first_row(dataset, block), dataset.block_rows()[block as usize]);
    let numbers = || (first..first + u64::from(rows)).map(|number| Ok(number.to_string())).collect();
    let mut names = dataset.ids(block)?.unwrap_or_else(numbers);
    names.resize(rows as usize, Err("is not there, expected an identifier".to_owned()));
    Ok(names)
}

fn nameless(dataset: &Dataset, block: u32, row: usize, reason: &str) -> ShardsError {
    let column = dataset.id_name(block).unwrap_or_default();
    let reason = format!(
        "its id {reason}; leave such rows out with shards.on_bad_rows = \"skip\", or name a column that is not there with \
         shards.id_column, and rows are called by their numbers"
    );
    ShardsError::Bad { spot: Box::new(dataset.spot(block, Some(&column), Some(row))), reason }
}

/// Leaves rows out too that have a column of identifiers and none in it.
fn without_nameless(dataset: &Dataset, mask: Mask) -> Result<Mask, EvalError> {
    let (mut skipped, mut count, mut first) = (mask.into_skipped(), 0_u64, None);
    for block in 0..dataset.block_rows().len() as u32 {
        let of_block = skipped.entry(block).or_default();
        for (row, name) in names(dataset, block)?.into_iter().enumerate() {
            let (Err(reason), Err(place)) = (name, of_block.binary_search(&(row as u32))) else { continue };
            of_block.insert(place, row as u32);
            count += 1;
            first.get_or_insert_with(|| format!("{}: its id {reason}", dataset.spot(block, None, Some(row))));
        }
    }
    if let Some(first) = first {
        tracing::warn!("{count} rows without an id are left out: {first}");
    }
    Ok(Mask::new(skipped, dataset.block_rows())?)
}

/// Places by identifier. Each is of a row of the data: a truth of other rows is not the one that was meant.
fn read_truth(path: &str, location: &str, dataset: &Dataset) -> Result<HashMap<String, Place>, EvalError> {
    let truth = Truth::read(Path::new(path))?;
    let mut known = HashSet::new();
    for block in 0..dataset.block_rows().len() as u32 {
        known.extend(names(dataset, block)?.into_iter().flatten());
    }
    let extra: Vec<&String> = truth.ids.iter().filter(|id| !known.contains(*id)).collect();
    if !extra.is_empty() {
        return Err(PredictionsError::extra(path, location, truth.ids.len(), &extra).into());
    }
    Ok(truth.ids.into_iter().zip(truth.places).collect())
}
