//! The rows of a data set in blocks with a fixed number of images.
//!
//! The rounding of a matrix product depends on the number of rows, so every block has the same number of rows: the last
//! block is padded with zeros. With a fixed number of rows, the rounding of a row does not depend on its position or on
//! the other rows (tested on the CPU). So the answer for an image is bit-identical alone, among other
//! images, and with any number of workers.

use std::collections::VecDeque;
use std::ops::Range;

use locdiff_core::config::{OnBadRows, RunConfig};
use locdiff_core::geo::{Place, places};
use tch::{Device, Kind, Tensor};
use twox_hash::XxHash3_64;

use super::error::InferError;
use crate::native::host::pinned_bytes;
use crate::shards::{BlockRows, Blocks, Coordinates, Dataset, ELEMENT_BYTES, Mask, ShardsError};

/// Images per block on the CPU, and in the quick evaluation of a training run.
pub const BLOCK_IMAGES: usize = 64;
/// The bytes of -0 in float16.
const NEGATIVE_ZERO: [u8; 2] = [0, 0x80];
/// Denoising chains per block on a GPU: enough to keep a GPU busy.
const GPU_BLOCK_CHAINS: u32 = 4096;
/// Maximum number of images per block on a GPU.
const GPU_BLOCK_IMAGES_MAX: u32 = 256;

/// Images per block on `device`, with `samples` denoising chains per image.
pub fn block_images(device: Device, samples: u32) -> usize {
    if device.is_cuda() {
        (GPU_BLOCK_CHAINS / samples.max(1)).clamp(1, GPU_BLOCK_IMAGES_MAX) as usize
    } else {
        BLOCK_IMAGES
    }
}

/// A photo to locate, with the identifier and the true place from its row.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    /// Index of the row among all rows of the data, from 0.
    pub row: u64,
    /// Identifier of the row. If the data has no identifiers, or if they were not read, this is the index of the row.
    pub id: String,
    /// True place of the photo; `None` if the coordinates of the data are ignored.
    pub truth: Option<Place>,
    /// Embeddings of all views in float16, one view after the other.
    pub views: Vec<u8>,
}

impl Image {
    /// The true place of the photo. It is an error if the coordinates of the data are ignored.
    pub fn true_place(&self) -> Result<Place, InferError> {
        let missing = || InferError::BadData(format!("row {} ({}) has no coordinates", self.row, self.id));
        self.truth.ok_or_else(missing)
    }
}

/// Consecutive images.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageBlock {
    /// Index of the block's first image among all usable rows.
    pub first: u64,
    /// The images, at most `size`.
    pub images: Vec<Image>,
    /// Images per block. A block with fewer images is padded to this size.
    pub size: usize,
    /// Views per image.
    pub views: usize,
    /// Width of an embedding.
    pub width: usize,
}

impl ImageBlock {
    /// The seed of the random numbers of each image, from the first view of the image and the seed of the engine.
    /// Images that only fill up the block have the seed of the engine.
    pub(super) fn seeds(&self, seed: u64) -> Vec<u64> {
        let hash = |image: &Image| {
            let first_view = &image.views[..self.width * ELEMENT_BYTES];
            let halves = first_view.as_chunks::<ELEMENT_BYTES>().0;
            // A zero may have a sign, which JSON of JavaScript loses.
            if !halves.contains(&NEGATIVE_ZERO) {
                return XxHash3_64::oneshot(first_view);
            }
            let unsigned = |half: &[u8; ELEMENT_BYTES]| if *half == NEGATIVE_ZERO { [0, 0] } else { *half };
            XxHash3_64::oneshot(&halves.iter().flat_map(unsigned).collect::<Vec<u8>>())
        };
        let mut seeds: Vec<u64> = self.images.iter().map(|image| seed ^ hash(image)).collect();
        seeds.resize(self.size, seed);
        seeds
    }

    /// The embeddings of the block in float16, `[size * views, width]`, one image after the other. If the block has
    /// fewer than `size` images, the remaining rows are zeros.
    pub fn embeddings(&self, device: Device) -> Result<Tensor, InferError> {
        let row_bytes = self.views * self.width * ELEMENT_BYTES;
        let mut bytes = vec![0; self.size * row_bytes];
        for (row, image) in bytes.chunks_exact_mut(row_bytes).zip(&self.images) {
            row.copy_from_slice(&image.views);
        }
        let shape = [(self.size * self.views) as i64, self.width as i64];
        let embeddings = Tensor::f_from_data_size(&bytes, &shape, Kind::Half)?;
        if !device.is_cuda() {
            return Ok(embeddings);
        }
        // The host does not wait for a copy from pinned memory.
        let mut pinned = pinned_bytes(bytes.len())?.f_view_dtype(Kind::Half)?.f_view(shape)?;
        pinned.f_copy_(&embeddings)?;
        Ok(pinned.f_to_device_(device, Kind::Half, true, false)?)
    }
}

/// An open data set, and the rows and views to read from it.
pub struct ImageRows {
    /// The data set.
    pub dataset: Dataset,
    /// The rows that are left out.
    pub mask: Mask,
    /// For each block (row group) of the data set, the index of its first usable row among all usable rows. The last
    /// entry is the number of all usable rows.
    firsts: Vec<u64>,
    /// Number of rows to read: the first `count` usable rows.
    pub count: u64,
    /// Number of views to read per row.
    views: u32,
    has_ids: bool,
    /// Images per block.
    block_images: usize,
}

impl ImageRows {
    /// Opens a data set to read all views of all rows, with identifiers. If `shards.on_bad_rows` is "skip", unusable
    /// rows and rows without an identifier are left out. Fails if no row is left.
    pub fn open(location: &str, config: &RunConfig) -> Result<Self, InferError> {
        Self::open_with(Coordinates::Needed, location, config)
    }

    /// Like [`Self::open`]. With [`Coordinates::Ignored`], rows need no coordinates, and images have no true place.
    pub fn open_with(coordinates: Coordinates, location: &str, config: &RunConfig) -> Result<Self, InferError> {
        let mut dataset = Dataset::open_with(coordinates, location, &config.shards)?;
        if let Some(message) = dataset.forget_ambiguous_ids() {
            tracing::warn!("{message}");
        }
        let mask = Mask::for_config(&dataset, &config.shards)?;
        if let Some(summary) = mask.describe(&dataset) {
            tracing::warn!("{summary}");
        }
        let mask = match config.shards.on_bad_rows {
            OnBadRows::Error => mask,
            OnBadRows::Skip => skip_rows_without_id(&dataset, mask)?,
        };
        let views = dataset.views();
        let rows = Self { views, has_ids: true, ..Self::first(u64::MAX, dataset, mask) };
        if rows.count == 0 {
            return Err(InferError::Empty(format!(
                "{location}: none of the {} rows is usable, so there is nothing to evaluate \
                 (shards.on_bad_rows is \"skip\")",
                rows.mask.count()
            )));
        }
        Ok(rows)
    }

    /// Selects view 0 of the first `count` usable rows, or of all usable rows if there are fewer. Row indices serve as
    /// identifiers.
    pub fn first(count: u64, dataset: Dataset, mask: Mask) -> Self {
        let mut firsts = vec![0];
        for (block, rows) in (0_u32..).zip(dataset.block_rows()) {
            firsts.push(firsts[block as usize] + u64::from(*rows) - mask.skipped(block).len() as u64);
        }
        let usable = firsts.last().copied().unwrap_or_default();
        Self { dataset, mask, firsts, count: usable.min(count), views: 1, has_ids: false, block_images: BLOCK_IMAGES }
    }

    /// Divides the rows into blocks of the size that suits `device`, with `samples` denoising chains per image.
    pub fn in_blocks_for(self, device: Device, samples: u32) -> Self {
        Self { block_images: block_images(device, samples), ..self }
    }

    /// Whether the photos are simulated.
    pub fn is_simulated(&self) -> bool {
        self.dataset.origin().is_some_and(|origin| origin.image_head.is_of_simulated())
    }

    /// The rows that worker `rank` of `world` workers locates in the quick evaluation of a training run. Workers get whole blocks, and the blocks are distributed
    /// as evenly as possible. Rank 0 always gets the first block, because rank 0 plots the answers of the first block
    /// in TensorBoard.
    pub fn share(&self, rank: u32, world: u32) -> Range<u64> {
        let size = self.block_images as u64;
        let blocks = self.count.div_ceil(size);
        let first = |rank: u32| (blocks * u64::from(rank)).div_ceil(u64::from(world));
        let bound = |rank: u32| (first(rank) * size).min(self.count);
        bound(rank)..bound(rank + 1)
    }

    /// A block of any images of these rows, at most [`Self::block_images`].
    pub fn block_of(&self, images: Vec<Image>) -> ImageBlock {
        let (size, views, width) = (self.block_images, self.views as usize, self.dataset.width());
        ImageBlock { first: 0, images, size, views, width }
    }

    /// Images per block.
    pub fn block_images(&self) -> usize {
        self.block_images
    }

    /// Reads the usable rows with indices in `share`, block by block.
    pub fn blocks(&self, share: Range<u64>) -> impl Iterator<Item = Result<ImageBlock, InferError>> + '_ {
        let (first, end) = (share.start, share.end);
        let holds_some = move |(_, own): &(u32, &[u64])| own[0] < end && own[1] > first;
        let mut unread = (0_u32..).zip(self.firsts.windows(2)).filter(holds_some).map(|(block, _)| block);
        let (mut waiting, mut next, size) = (VecDeque::new(), first, self.block_images);
        std::iter::from_fn(move || {
            while waiting.len() < size
                && let Some(block) = unread.next()
            {
                match self.read(block) {
                    Ok(images) => waiting.extend(images.filter(|(number, _)| share.contains(number))),
                    Err(error) => return Some(Err(error)),
                }
            }
            let images = waiting.drain(..waiting.len().min(size)).map(|(_, image)| image).collect::<Vec<_>>();
            let block = ImageBlock { first: next, ..self.block_of(images) };
            next += size as u64;
            (!block.images.is_empty()).then_some(Ok(block))
        })
    }

    /// Reads the usable rows of one block of the data set. Returns each row with its index among all usable rows.
    fn read(&self, block: u32) -> Result<impl Iterator<Item = (u64, Image)> + use<>, InferError> {
        let mut views = vec![BlockRows::default(); self.views as usize];
        for (view, rows) in (0_u32..).zip(&mut views) {
            self.dataset.read_usable(&self.mask, block, view, rows)?;
        }
        let mut ids = row_ids(&self.dataset, block, self.has_ids)?;
        let (first_row, row_bytes) = (first_row(&self.dataset, block), self.dataset.width() * ELEMENT_BYTES);
        let truths = places(&views[0].latitudes, &views[0].longitudes)?;
        let rows = self.mask.usable_rows(block, self.dataset.block_rows()[block as usize]);
        let mut images = Vec::with_capacity(views[0].embeddings.len() / row_bytes);
        for (index, row) in rows.enumerate() {
            let id = taken_id(&self.dataset, block, &mut ids, row)?;
            let own = index * row_bytes..(index + 1) * row_bytes;
            images.push(Image {
                row: first_row + u64::from(row),
                truth: truths.get(index).copied(),
                id,
                views: views.iter().map(|view| &view.embeddings[own.clone()]).collect::<Vec<_>>().concat(),
            });
        }
        Ok((self.firsts[block as usize]..).zip(images))
    }

    /// The identifier and the place of each row to read, in order. Reads no embeddings.
    pub fn ids_and_places(&self) -> Result<Vec<(String, Place)>, InferError> {
        let (mut found, mut read) = (Vec::new(), BlockRows::default());
        for block in 0..self.dataset.block_rows().len() as u32 {
            self.dataset.read_usable_coordinates(&self.mask, block, &mut read)?;
            let mut ids = row_ids(&self.dataset, block, self.has_ids)?;
            let rows = self.mask.usable_rows(block, self.dataset.block_rows()[block as usize]);
            for (row, place) in rows.zip(places(&read.latitudes, &read.longitudes)?) {
                found.push((taken_id(&self.dataset, block, &mut ids, row)?, place));
            }
        }
        found.truncate(self.count as usize);
        Ok(found)
    }

    /// The identifiers of all rows that have an identifier, including rows that `mask` leaves out.
    pub fn ids(&self) -> Result<Vec<String>, InferError> {
        let mut found = Vec::new();
        for block in 0..self.dataset.block_rows().len() as u32 {
            found.extend(row_ids(&self.dataset, block, self.has_ids)?.into_iter().flatten());
        }
        Ok(found)
    }
}

/// Index of the first row of a block among all rows of the data set.
fn first_row(dataset: &Dataset, block: u32) -> u64 {
    dataset.block_rows()[..block as usize].iter().map(|rows| u64::from(*rows)).sum()
}

/// For each row of a block, its identifier, or the reason why it has none. If the data has no identifiers or `wanted`
/// is false, row indices serve as identifiers.
fn row_ids(dataset: &Dataset, block: u32, wanted: bool) -> Result<Vec<Result<String, String>>, InferError> {
    let (first, rows) = (first_row(dataset, block), dataset.block_rows()[block as usize]);
    let numbers = || (first..first + u64::from(rows)).map(|number| Ok(number.to_string())).collect();
    let ids = if wanted { dataset.ids(block)? } else { None };
    let mut ids = ids.unwrap_or_else(numbers);
    ids.resize(rows as usize, Err("is missing".to_owned()));
    Ok(ids)
}

/// Takes the identifier of a row out of `ids`, the result of [`row_ids`].
fn taken_id(
    dataset: &Dataset,
    block: u32,
    ids: &mut [Result<String, String>],
    row: u32,
) -> Result<String, ShardsError> {
    let id = std::mem::replace(&mut ids[row as usize], Ok(String::new()));
    id.map_err(|reason| missing_id(dataset, block, row as usize, &reason))
}

fn missing_id(dataset: &Dataset, block: u32, row: usize, reason: &str) -> ShardsError {
    let column = dataset.id_name(block).unwrap_or_default();
    let reason = format!(
        "its id {reason}; set shards.on_bad_rows = \"skip\" to leave out rows without an id, or set shards.id_column \
         to a name that no column has, so that rows are identified by their index"
    );
    ShardsError::Bad { spot: Box::new(dataset.spot(block, Some(&column), Some(row))), reason }
}

/// Adds to `mask` the rows without a usable identifier.
fn skip_rows_without_id(dataset: &Dataset, mask: Mask) -> Result<Mask, InferError> {
    let (mut skipped, mut count, mut first) = (mask.into_skipped(), 0_u64, None);
    for block in 0..dataset.block_rows().len() as u32 {
        let of_block = skipped.entry(block).or_default();
        for (row, id) in row_ids(dataset, block, true)?.into_iter().enumerate() {
            let (Err(reason), Err(place)) = (id, of_block.binary_search(&(row as u32))) else { continue };
            of_block.insert(place, row as u32);
            count += 1;
            first.get_or_insert_with(|| format!("{}: its id {reason}", dataset.spot(block, None, Some(row))));
        }
    }
    if let Some(first) = first {
        tracing::warn!("{count} rows have no usable id and are left out; the first is {first}");
    }
    Ok(Mask::new(skipped, dataset.block_rows())?)
}
