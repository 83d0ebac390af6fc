//! A data set in memory for tests. The tests can count and delay its reads, stall them, and make them fail.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use locdiff::shards::{BlockRows, Blocks, DataLayout, Sample, ShardsError, Spot};

/// What goes wrong when a block is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The read returns a checksum error.
    Corrupt,
    /// The read panics.
    Panic,
    /// The read returns one row too few.
    Short,
    /// The read waits until [`Memory::release_stalled`] is called.
    Stall,
}

/// A data set that computes each embedding from the block, the row and the view, and each coordinate from the block and
/// the row.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) layout: DataLayout,
    /// The bad rows, each as (block, row).
    pub(crate) bad: BTreeSet<(u32, u32)>,
    pub(crate) fault: Option<(u32, Fault)>,
    /// Whether reads are delayed. The delay varies from read to read.
    pub(crate) slow: bool,
    /// Every read so far, as (block, view).
    pub(crate) reads: Mutex<Vec<(u32, u32)>>,
    pub(crate) scans: AtomicUsize,
    gate: (Mutex<bool>, Condvar),
}

impl Memory {
    pub(crate) fn new(block_rows: &[u32], width: usize, views: u32) -> Self {
        Self {
            layout: DataLayout { block_rows: block_rows.to_vec(), width, views, fingerprint: 77 },
            bad: BTreeSet::new(),
            fault: None,
            slow: false,
            reads: Mutex::default(),
            scans: AtomicUsize::new(0),
            gate: (Mutex::new(false), Condvar::new()),
        }
    }

    pub(crate) fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }

    /// Lets stalled reads continue.
    pub(crate) fn release_stalled(&self) {
        *self.gate.0.lock().expect("no thread panicked while it held the lock") = true;
        self.gate.1.notify_all();
    }

    pub(crate) fn read_count(&self) -> usize {
        self.reads.lock().expect("no thread panicked while it held the lock").len()
    }

    /// The embedding of a sample, as the bytes of finite float16 numbers.
    pub(crate) fn embedding(&self, sample: Sample) -> Vec<u8> {
        let number = |element: usize| {
            let mixed = (sample.block.wrapping_mul(7919) ^ sample.row.wrapping_mul(104_729))
                .wrapping_add(sample.view.wrapping_mul(15_485_863))
                .wrapping_add(element as u32 * 31);
            (mixed as u16 & 0xbbff).to_le_bytes()
        };
        (0..self.layout.width).flat_map(number).collect()
    }

    pub(crate) fn latitude(block: u32, row: u32) -> f64 {
        f64::from(block % 90) + f64::from(row) * 1e-6
    }

    pub(crate) fn longitude(block: u32, row: u32) -> f64 {
        -f64::from(block % 180) - f64::from(row) * 1e-6
    }

    fn spot(block: u32, row: Option<u32>) -> Box<Spot> {
        let (file, column) = ("memory.parquet".to_owned(), Some("embedding".to_owned()));
        Box::new(Spot { file, row_group: Some(block), column, row: row.map(u64::from) })
    }

    fn apply_fault(&self, block: u32) -> Result<(), ShardsError> {
        let Some((_, fault)) = self.fault.filter(|(at, _)| *at == block) else { return Ok(()) };
        match fault {
            Fault::Corrupt => {
                let reason = "its xxh3 is 1, wanted 2".to_owned();
                Err(ShardsError::Corrupt { spot: Self::spot(block, None), reason })
            }
            Fault::Panic => panic!("the reader has a bug in block {block}"),
            Fault::Stall => {
                let open = self.gate.0.lock().expect("no thread panicked while it held the lock");
                drop(self.gate.1.wait_while(open, |open| !*open).expect("no thread panicked while it held the lock"));
                Ok(())
            }
            Fault::Short => Ok(()),
        }
    }
}

impl Blocks for Memory {
    fn block_rows(&self) -> &[u32] {
        &self.layout.block_rows
    }

    fn width(&self) -> usize {
        self.layout.width
    }

    fn views(&self) -> u32 {
        self.layout.views
    }

    fn fingerprint(&self) -> u64 {
        self.layout.fingerprint
    }

    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, &[], into)
    }

    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let count = {
            let mut reads = self.reads.lock().expect("no thread panicked while it held the lock");
            reads.push((block, view));
            reads.len()
        };
        if self.slow {
            std::thread::sleep(Duration::from_micros([0, 900, 100, 400][count % 4]));
        }
        self.apply_fault(block)?;
        into.latitudes.clear();
        into.longitudes.clear();
        into.embeddings.clear();
        let short = u32::from(self.fault == Some((block, Fault::Short)));
        for row in 0..self.layout.block_rows[block as usize] - short {
            let bad = self.bad.contains(&(block, row));
            if bad && skip.binary_search(&row).is_err() {
                let reason = "got NaN, wanted finite numbers".to_owned();
                return Err(ShardsError::Bad { spot: Self::spot(block, Some(row)), reason });
            }
            into.latitudes.push(if bad { f64::NAN } else { Self::latitude(block, row) });
            into.longitudes.push(if bad { f64::NAN } else { Self::longitude(block, row) });
            into.embeddings.extend(self.embedding(Sample { block, row, view }));
        }
        Ok(())
    }

    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError> {
        self.scans.fetch_add(1, Ordering::Relaxed);
        self.apply_fault(block)?;
        Ok(self.bad.range((block, 0)..=(block, u32::MAX)).map(|(_, row)| *row).collect())
    }
}
