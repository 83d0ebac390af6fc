//! Detects data that has changed since the run began. If the run has recorded [`Contents`], every read is compared with
//! them.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

use super::block::Blocks as _;
use super::contents::Contents;
use super::dataset::{BlockAt, Dataset};
use crate::shards::error::ShardsError;
use crate::shards::format::{Checksum, Column};

impl Dataset {
    /// Sets the checksums that column chunks must match in every read after this call. `None` turns the comparison off.
    pub fn expect_contents(&mut self, contents: Option<Contents>) -> Result<(), ShardsError> {
        if let Some(contents) = &contents {
            self.check_shape_of(contents)?;
        }
        self.contents = contents;
        Ok(())
    }

    /// Computes the checksums of all column chunks that training reads, without decoding them.
    pub fn read_contents(&self) -> Result<Contents, ShardsError> {
        let versions = self.versions()?;
        let xxh3 = self.blocks.iter().map(|at| self.hash(*at)).collect::<Result<Vec<_>, _>>()?;
        Ok(Contents { versions, xxh3: xxh3.concat() })
    }

    /// Checks that the data still has the recorded contents. Only files whose version differs from the recorded version
    /// are read. Returns the contents with the current versions.
    pub fn check_contents(&self, recorded: &Contents) -> Result<Contents, ShardsError> {
        self.check_shape_of(recorded)?;
        let versions = self.versions()?;
        for (at, wanted) in self.blocks.iter().zip(recorded.xxh3.chunks_exact(self.columns())) {
            if versions[at.file] == recorded.versions[at.file] {
                continue;
            }
            for (column, (got, wanted)) in self.files[at.file].columns().zip(self.hash(*at)?.iter().zip(wanted)) {
                self.check_chunk(*at, column, *got, *wanted)?;
            }
        }
        Ok(Contents { versions, xxh3: recorded.xxh3.clone() })
    }

    /// Text that changes if the data changes. With a manifest, it depends on the fingerprint, which covers all bytes.
    /// Without a manifest, it also depends on the versions of the files, so it may change when the bytes stay the same.
    pub fn version(&self) -> Result<String, ShardsError> {
        let mut hasher = XxHash3_64::new();
        hasher.write(&self.fingerprint().to_le_bytes());
        let versions = if self.manifest.is_some() { Vec::new() } else { self.versions()? };
        for version in versions {
            hasher.write(&(version.len() as u64).to_le_bytes());
            hasher.write(version.as_bytes());
        }
        Ok(format!("{:016x}", hasher.finish()))
    }

    /// Number of columns that training reads.
    pub(super) fn columns(&self) -> usize {
        self.files[0].columns().count()
    }

    /// The version that the source reports for each file.
    pub(super) fn versions(&self) -> Result<Vec<String>, ShardsError> {
        (0..self.files.len()).map(|file| self.source.version(file)).collect()
    }

    /// Fails if the checksum of a chunk has changed.
    pub(super) fn check_chunk(
        &self,
        at: BlockAt,
        column: &Column,
        got: Checksum,
        wanted: Checksum,
    ) -> Result<(), ShardsError> {
        if got == wanted {
            return Ok(());
        }
        let reason = format!("its bytes have xxh3 {got}, wanted {wanted}");
        Err(ShardsError::Changed { location: self.chunk_spot(at, &column.name).to_string(), reason })
    }

    fn hash(&self, at: BlockAt) -> Result<Vec<Checksum>, ShardsError> {
        let columns = self.files[at.file].columns();
        columns.map(|column| Ok(Checksum::of(&self.read_chunk(at, column, None)?.bytes))).collect()
    }

    fn check_shape_of(&self, recorded: &Contents) -> Result<(), ShardsError> {
        let now = (self.files.len(), self.blocks.len() * self.columns());
        let recorded = (recorded.versions.len(), recorded.xxh3.len());
        if now == recorded {
            return Ok(());
        }
        let reason = format!(
            "the data has {} files and {} column chunks, wanted {} and {}",
            now.0, now.1, recorded.0, recorded.1
        );
        Err(ShardsError::Changed { location: self.files[0].name.clone(), reason })
    }
}
