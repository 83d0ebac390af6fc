//! The device cache: one device holds all rows of all views. The rows of a batch are selected by index on the device.
//!
//! The cache is a float16 tensor `[views * rows, width]`. View v of row r is at index `v * rows + r`. Row numbers run
//! through all blocks and include skipped rows.

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::readers::read;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::Plan;
use crate::shards::parallel::in_order;

/// The embeddings on the device.
#[derive(Debug)]
pub(super) struct DeviceRows {
    embeddings: Tensor,
    device: Device,
    pub(super) places: Arc<Places>,
}

/// An index in main memory that finds rows in the cache. It also holds the coordinates of all rows.
#[derive(Debug)]
pub(super) struct Places {
    /// For each block, the number of rows in all blocks before it. The last entry is the number of all rows.
    first_rows: Vec<u64>,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
}

impl DeviceRows {
    /// Reads all views of all blocks that have usable rows, and copies them to the device. Stops at the first error.
    pub(super) fn load(
        blocks: &Arc<dyn Blocks>,
        plan: &Plan,
        device: Device,
        threads: u32,
    ) -> Result<Self, ShardsError> {
        let layout = plan.layout();
        let first_rows = layout.first_rows();
        let rows = first_rows[layout.block_rows.len()];
        let size = [(rows * u64::from(layout.views)) as i64, layout.width as i64];
        let embeddings = Tensor::f_empty(size, (Kind::Half, device))?;
        let used = |block: &u32| layout.block_rows[*block as usize] as usize > plan.mask().skipped(*block).len();
        let wanted: Vec<u32> = (0..layout.block_rows.len() as u32).filter(used).collect();
        let all = Mutex::new((embeddings, vec![0.0; rows as usize], vec![0.0; rows as usize]));
        // A thread holds the lock only while it copies rows, so the other threads can read blocks at the same time.
        in_order(threads as usize, wanted.len() * layout.views as usize, |task| {
            let (block, view) = (wanted[task / layout.views as usize], task % layout.views as usize);
            let mut read_rows = BlockRows::default();
            read(blocks.as_ref(), plan, block, view as u32, &mut read_rows)?;
            let (first, count) = (first_rows[block as usize] as usize, read_rows.latitudes.len());
            let halves = Tensor::f_from_data_size(&read_rows.embeddings, &[count as i64, size[1]], Kind::Half)?;
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.0.f_narrow(0, (view * rows as usize + first) as i64, count as i64)?.f_copy_(&halves)?;
            if view == 0 {
                all.1[first..first + count].copy_from_slice(&read_rows.latitudes);
                all.2[first..first + count].copy_from_slice(&read_rows.longitudes);
            }
            Ok(())
        })?;
        let (embeddings, latitudes, longitudes) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Self { embeddings, device, places: Arc::new(Places { first_rows, latitudes, longitudes }) })
    }

    /// Selects the rows at `places` on the device. Does not wait until the device has finished.
    pub(super) fn select(&self, places: &Tensor) -> Result<Tensor, ShardsError> {
        let places = places.f_to_device_(self.device, Kind::Int64, true, false)?;
        Ok(self.embeddings.f_index_select(0, &places)?)
    }
}

impl Places {
    /// The index at which the cache holds one view of a row.
    pub(super) fn place(&self, block: u32, view: u32, row: u32) -> i64 {
        let all = self.latitudes.len() as u64;
        (u64::from(view) * all + self.first_rows[block as usize] + u64::from(row)) as i64
    }

    /// Latitude and longitude of a row, degrees.
    pub(super) fn coordinates(&self, block: u32, row: u32) -> (f64, f64) {
        let row = self.first_rows[block as usize] as usize + row as usize;
        (self.latitudes[row], self.longitudes[row])
    }
}
