//! Caches rows after they have been read, so that later epochs need not read them again. The cache mode does not affect
//! the contents of batches.
//!
//! | mode     | cached rows                                               | batches are in         |
//! |----------|-----------------------------------------------------------|------------------------|
//! | `none`   | only the rows in the batches of two windows               | main memory, pinned    |
//! | `host`   | rows of the blocks read so far, until the memory is full  | main memory, pinned    |
//! | `device` | all rows of all views, read before the first batch        | GPU memory             |
//!
//! Main memory is pinned only if the worker has a GPU.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use locdiff_core::cgroup::memory_available_bytes;
use locdiff_core::config::CacheMode;
use tch::Device;

use crate::native::cuda;
use crate::shards::blocks::BlockRows;
use crate::shards::error::ShardsError;
use crate::shards::order::DataLayout;

/// The mode `auto` uses at most this share of the free GPU memory for rows. The rest is for the model.
const DEVICE_SHARE: f64 = 0.5;
/// Cached rows use at most this share of the available main memory.
const HOST_SHARE: f64 = 0.6;

/// Memory available for rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Main memory available to this worker, in bytes.
    pub host_bytes: u64,
    /// Free memory of the worker's GPU, in bytes. `None` if the worker has no GPU.
    pub device_bytes: Option<u64>,
}

impl Room {
    /// Measures the free memory for one worker. The available main memory is divided by `workers`, the number of
    /// workers on this machine.
    pub fn measure(device: Device, workers: u32) -> Result<Self, ShardsError> {
        let device_bytes = match device {
            Device::Cuda(index) => Some(cuda::free_bytes(index)?),
            _ => None,
        };
        let host_bytes = memory_available_bytes(Path::new("/")) / u64::from(workers.max(1));
        Ok(Self { host_bytes, device_bytes })
    }
}

/// The chosen cache mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// No cache.
    None,
    /// A cache in main memory.
    Host {
        /// Maximum size of the cached rows, in bytes.
        bytes_max: u64,
    },
    /// All rows on the GPU.
    Device,
}

impl Cache {
    /// Chooses the cache for the configured mode, the data, the worker's device and the available memory. Also returns
    /// a text that explains the choice.
    pub fn choose(
        mode: CacheMode,
        layout: &DataLayout,
        device: Device,
        room: Room,
    ) -> Result<(Self, String), ShardsError> {
        let rows: u64 = layout.block_rows.iter().map(|rows| u64::from(*rows)).sum();
        let bytes = rows * u64::from(layout.views) * layout.row_bytes();
        let host_bytes = (room.host_bytes as f64 * HOST_SHARE) as u64;
        let device_bytes = room.device_bytes.map(|free| (free as f64 * DEVICE_SHARE) as u64);
        let (data, host) = (gibibytes(bytes), gibibytes(host_bytes));
        let in_host = (Self::Host { bytes_max: host_bytes }, format!("rows ({data}) are kept in main memory"));
        match mode {
            CacheMode::None => Ok((Self::None, format!("rows ({data}) are read again in every epoch"))),
            CacheMode::Host if bytes > host_bytes => {
                let summary = format!(
                    "up to {host} of the rows ({data}) are kept in main memory; \
                     all others are read again in every epoch"
                );
                Ok((Self::Host { bytes_max: host_bytes }, summary))
            }
            CacheMode::Host => Ok(in_host),
            CacheMode::Device => Self::on_device(bytes, device, room),
            CacheMode::Auto if device_bytes.is_some_and(|room| bytes <= room) => {
                Ok((Self::Device, format!("rows ({data}) are kept in GPU memory")))
            }
            CacheMode::Auto if bytes <= host_bytes => Ok(in_host),
            CacheMode::Auto => {
                let reason = device_bytes.map_or_else(
                    || format!("do not fit into {host} of main memory"),
                    |room| format!("fit neither into {host} of main memory nor into {} of GPU memory", gibibytes(room)),
                );
                Ok((Self::None, format!("rows ({data}) are read again in every epoch: they {reason}")))
            }
        }
    }

    /// Handles the mode `device`. The user asked for this mode, so it is an error if the worker has no GPU or the rows
    /// do not fit.
    fn on_device(bytes: u64, device: Device, room: Room) -> Result<(Self, String), ShardsError> {
        let Some(free) = room.device_bytes else {
            let place = if device.is_cuda() { "a GPU whose memory is unknown" } else { "the CPU" };
            return Err(ShardsError::Config(format!(
                "shards.cache = \"device\" needs a GPU with known free memory, but this worker runs on {place}; \
                 set shards.cache to \"auto\", \"host\" or \"none\""
            )));
        };
        let (data, free_text) = (gibibytes(bytes), gibibytes(free));
        if bytes > free {
            return Err(ShardsError::Config(format!(
                "shards.cache = \"device\": all views take {data}, but only {free_text} of GPU memory are free; \
                 set shards.cache to \"auto\", \"host\" or \"none\""
            )));
        }
        Ok((Self::Device, format!("rows ({data}) are kept in GPU memory, which had {free_text} free")))
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

/// Cache of blocks in main memory.
#[derive(Debug)]
pub(super) struct HostCache {
    blocks: Mutex<KeptBlocks>,
}

#[derive(Debug)]
struct KeptBlocks {
    rows: HashMap<(u32, u32), Arc<BlockRows>>,
    bytes_left: u64,
}

impl HostCache {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { blocks: Mutex::new(KeptBlocks { rows: HashMap::new(), bytes_left: bytes_max }) }
    }

    /// Returns a view of a block if that view is cached.
    pub(super) fn get(&self, block: u32, view: u32) -> Option<Arc<BlockRows>> {
        let kept = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        kept.rows.get(&(block, view)).map(Arc::clone)
    }

    /// Whether the cache has room for `bytes` more bytes.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).bytes_left >= bytes
    }

    /// Caches a view of a block if there is room for it. `bytes` is the size of the view.
    pub(super) fn keep(&self, block: u32, view: u32, bytes: u64, rows: &Arc<BlockRows>) {
        let mut kept = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes_left >= bytes && !kept.rows.contains_key(&(block, view)) {
            kept.bytes_left -= bytes;
            kept.rows.insert((block, view), Arc::clone(rows));
        }
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::HasExitCode;

    use super::*;

    fn choose(mode: CacheMode, host_bytes: u64, device_bytes: Option<u64>) -> Result<(Cache, String), ShardsError> {
        // 2 views of 100 rows with 2 * 42 + 16 bytes each: 20,000 bytes.
        let layout = DataLayout { block_rows: vec![60, 0, 40], width: 42, views: 2, fingerprint: 0 };
        let device = if device_bytes.is_some() { Device::Cuda(0) } else { Device::Cpu };
        Cache::choose(mode, &layout, device, Room { host_bytes, device_bytes })
    }

    #[test]
    fn auto_picks_the_fastest_cache_that_fits() {
        let auto = |host, device| choose(CacheMode::Auto, host, device).expect("mode `auto` never fails");
        assert_eq!(auto(0, Some(40_000)).0, Cache::Device);
        assert_eq!(auto(33_400, Some(39_999)).0, Cache::Host { bytes_max: 20_040 });
        assert_eq!(auto(33_400, None).0, Cache::Host { bytes_max: 20_040 });
        let (cache, summary) = auto(33_000, Some(39_999));
        assert_eq!(cache, Cache::None);
        assert!(
            summary.contains("neither into") && summary.contains("of GPU memory"),
            "the summary gives the wrong reason: {summary}"
        );
        let (cache, summary) = auto(0, None);
        assert_eq!(cache, Cache::None);
        assert!(
            summary.contains("not fit into 0.00 GiB of main memory") && !summary.contains("GPU"),
            "the summary gives the wrong reason: {summary}"
        );
    }

    #[test]
    fn explicit_cache_mode_is_never_replaced() {
        let error = choose(CacheMode::Device, 1 << 30, None).expect_err("the worker has no GPU");
        assert_eq!(error.exit_code().code(), 10);
        assert!(error.to_string().contains("but this worker runs on the CPU"), "wrong error: {error}");
        let error = choose(CacheMode::Device, 1 << 30, Some(19_999)).expect_err("the rows do not fit into the GPU");
        assert!(error.to_string().contains("of GPU memory are free"), "wrong error: {error}");
        assert_eq!(
            choose(CacheMode::Device, 0, Some(20_000)).expect("the rows just fit into the GPU").0,
            Cache::Device
        );
        assert_eq!(
            choose(CacheMode::None, 1 << 40, Some(1 << 40)).expect("mode `none` needs no memory").0,
            Cache::None
        );
        let (cache, summary) =
            choose(CacheMode::Host, 10_000, Some(1 << 40)).expect("mode `host` keeps as many rows as fit");
        assert_eq!(cache, Cache::Host { bytes_max: 6000 });
        assert!(
            summary.contains("all others are read again"),
            "the summary does not mention rows that are read again: {summary}"
        );
    }

    #[test]
    fn host_cache_keeps_only_what_fits() {
        let room = Room::measure(Device::Cpu, 1).expect("measuring main memory needs no GPU");
        assert!(room.host_bytes > 1 << 20 && room.device_bytes.is_none(), "wrong measured memory: {room:?}");
        assert!(
            Room::measure(Device::Cpu, 4).expect("measuring main memory needs no GPU").host_bytes < room.host_bytes
        );
        let cache = HostCache::new(10);
        let rows = Arc::new(BlockRows::default());
        cache.keep(0, 0, 6, &rows);
        cache.keep(0, 0, 6, &rows);
        cache.keep(1, 0, 6, &rows);
        cache.keep(0, 1, 4, &rows);
        assert!(cache.get(0, 0).is_some() && cache.get(1, 0).is_none() && cache.get(0, 1).is_some());
        assert!(!cache.has_room(1) && cache.has_room(0));
    }
}
