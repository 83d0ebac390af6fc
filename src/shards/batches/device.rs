//! All rows of all views on one device, batches gathered there by index.
//!
//! `[views * rows, width]` of float16: row r of view v lies at `v * rows + r`, where r counts over all blocks and rows
//! that are left out keep their places.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use tch::{Device, Kind, Tensor};

use super::readers::read;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::Plan;

/// The cache itself.
#[derive(Debug)]
pub(super) struct DeviceRows {
    embeddings: Tensor,
    device: Device,
    table: Arc<Table>,
}

/// What the host knows about it.
#[derive(Debug)]
struct Table {
    /// First row of each block, and the end.
    first_rows: Vec<u64>,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
}

/// Finds rows in the cache.
#[derive(Debug)]
pub(super) struct Places {
    table: Arc<Table>,
}

/// One view of one block on its way to the device.
type Arrival = (u32, u32, Result<BlockRows, ShardsError>);

impl DeviceRows {
    /// Reads everything that the plan may ask for; the first error that arrives ends it.
    pub(super) fn load(
        blocks: &Arc<dyn Blocks>,
        plan: &Plan,
        device: Device,
        threads: u32,
    ) -> Result<Self, ShardsError> {
        let layout = plan.layout();
        let mut first_rows = vec![0];
        for rows in &layout.block_rows {
            first_rows.push(first_rows[first_rows.len() - 1] + u64::from(*rows));
        }
        let rows = first_rows[layout.block_rows.len()];
        let size = [(rows * u64::from(layout.views)) as i64, layout.width as i64];
        let embeddings = Tensor::f_empty(size, (Kind::Half, device))?;
        let coordinates = vec![0.0; rows as usize];
        let mut table = Table { first_rows, latitudes: coordinates.clone(), longitudes: coordinates };
        let used = |block: u32| layout.block_rows[block as usize] as usize > plan.mask().skipped(block).len();
        let wanted: Vec<u32> = (0..layout.block_rows.len() as u32).filter(|block| used(*block)).collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            // The bound is what threads read ahead of the copies.
            let (sender, arrivals) = sync_channel::<Arrival>(2);
            for _ in 0..threads.max(1) {
                let (sender, next, wanted) = (sender.clone(), &next, &wanted);
                scope.spawn(move || {
                    loop {
                        let task = next.fetch_add(1, Ordering::Relaxed);
                        let view = (task % layout.views as usize) as u32;
                        let Some(block) = wanted.get(task / layout.views as usize).copied() else { break };
                        let mut rows = BlockRows::default();
                        let result = read(blocks.as_ref(), plan, block, view, &mut rows).map(|()| rows);
                        // Nobody listens any more after an error.
                        if sender.send((block, view, result)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            fill(&embeddings, &mut table, layout.width, arrivals)
        })?;
        Ok(Self { embeddings, device, table: Arc::new(table) })
    }

    /// What the gatherer needs to find rows.
    pub(super) fn places(&self) -> Places {
        Places { table: Arc::clone(&self.table) }
    }

    /// The rows at `places`, gathered on the device without waiting for it.
    pub(super) fn select(&self, places: &Tensor) -> Result<Tensor, ShardsError> {
        let places = places.f_to_device_(self.device, Kind::Int64, true, false)?;
        Ok(self.embeddings.f_index_select(0, &places)?)
    }
}

/// Copies blocks to their places as they arrive.
fn fill(embeddings: &Tensor, table: &mut Table, width: usize, arrivals: Receiver<Arrival>) -> Result<(), ShardsError> {
    for (block, view, result) in arrivals {
        let rows = result?;
        let (first, end) = (table.first_rows[block as usize], table.first_rows[block as usize + 1]);
        let all = table.latitudes.len() as u64;
        let count = (end - first) as i64;
        let bytes = Tensor::f_from_data_size(&rows.embeddings, &[count, width as i64], Kind::Half)?;
        let mut place = embeddings.f_narrow(0, (u64::from(view) * all + first) as i64, count)?;
        place.f_copy_(&bytes)?;
        if view == 0 {
            table.latitudes[first as usize..end as usize].copy_from_slice(&rows.latitudes);
            table.longitudes[first as usize..end as usize].copy_from_slice(&rows.longitudes);
        }
    }
    Ok(())
}

impl Places {
    /// Where a row of a view lies.
    pub(super) fn place(&self, block: u32, view: u32, row: u32) -> i64 {
        let all = self.table.latitudes.len() as u64;
        (u64::from(view) * all + self.table.first_rows[block as usize] + u64::from(row)) as i64
    }

    /// Latitude and longitude of a row, degrees.
    pub(super) fn coordinates(&self, block: u32, row: u32) -> (f64, f64) {
        let row = self.table.first_rows[block as usize] as usize + row as usize;
        (self.table.latitudes[row], self.table.longitudes[row])
    }

    /// Places as a tensor in main memory: a few bytes per row, which the driver takes over at once.
    pub(super) fn tensor(&self, places: &[i64]) -> Result<Tensor, ShardsError> {
        Ok(Tensor::f_from_slice(places)?)
    }
}
