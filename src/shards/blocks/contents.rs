//! What data without a manifest was when a run began: a checksum of every column chunk that training reads.
//!
//! It is the manifest that others' files lack. The first scan makes it, every checkpoint keeps it, every worker compares what it
//! reads with it. Resuming reads nothing again of a file that its source says is the same ([`ByteSource::version`]); any other is
//! hashed before the first step. A version never condemns a file, and is never the last word for one: bytes are.
//!
//! [`ByteSource::version`]: super::ByteSource::version

use serde::{Deserialize, Serialize};

use super::checksum::Checksum;
use super::dataset::{BlockAt, Dataset};
use super::error::ShardsError;

/// Checksums of all column chunks that are ever read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// What the source said of each file before it was read.
    versions: Vec<String>,
    /// Block after block: latitudes, longitudes, each view.
    xxh3: Vec<Checksum>,
}

impl Contents {
    /// What a scan has found.
    pub(super) fn new(versions: Vec<String>, xxh3: Vec<Checksum>) -> Self {
        Self { versions, xxh3 }
    }

    /// The checksum of a chunk; none: of a column that training does not read.
    fn of(&self, dataset: &Dataset, at: BlockAt, column: &str) -> Option<Checksum> {
        let number = dataset.files[at.file].columns().position(|known| known.name == column)?;
        self.xxh3.get(at.number * dataset.columns() + number).copied()
    }
}

impl Dataset {
    /// Compares every chunk that is read from now on with what the run knows of it.
    pub fn expect(&mut self, contents: Option<Contents>) -> Result<(), ShardsError> {
        if let Some(contents) = &contents {
            self.check_shape_of(contents)?;
        }
        self.contents = contents;
        Ok(())
    }

    /// Reads all that training reads, and decodes nothing of it.
    pub fn read_contents(&self) -> Result<Contents, ShardsError> {
        let versions = self.versions()?;
        let xxh3 = self.blocks.iter().map(|at| self.hash(*at)).collect::<Result<Vec<_>, _>>()?;
        Ok(Contents { versions, xxh3: xxh3.concat() })
    }

    /// Is the data what it was? Files of another version are read for it. What comes back has the versions of today.
    pub fn check_contents(&self, then: &Contents) -> Result<Contents, ShardsError> {
        self.check_shape_of(then)?;
        let versions = self.versions()?;
        for (at, wanted) in self.blocks.iter().zip(then.xxh3.chunks_exact(self.columns())) {
            if versions[at.file] == then.versions[at.file] {
                continue;
            }
            for (column, (got, wanted)) in self.files[at.file].columns().zip(self.hash(*at)?.iter().zip(wanted)) {
                self.same_chunk(*at, &column.name, *got, *wanted)?;
            }
        }
        Ok(Contents { versions, xxh3: then.xxh3.clone() })
    }

    /// Columns that training reads.
    pub(super) fn columns(&self) -> usize {
        self.files[0].columns().count()
    }

    /// What the source says of each file.
    pub(super) fn versions(&self) -> Result<Vec<String>, ShardsError> {
        (0..self.files.len()).map(|file| self.source.version(file)).collect()
    }

    /// Compares a chunk with what the run, where it does, knows of it.
    pub(super) fn compare_contents(&self, at: BlockAt, column: &str, got: Checksum) -> Result<(), ShardsError> {
        match self.contents.as_ref().and_then(|contents| contents.of(self, at, column)) {
            Some(wanted) => self.same_chunk(at, column, got, wanted),
            None => Ok(()),
        }
    }

    fn same_chunk(&self, at: BlockAt, column: &str, got: Checksum, wanted: Checksum) -> Result<(), ShardsError> {
        if got == wanted {
            return Ok(());
        }
        let (location, reason) =
            (self.chunk_spot(at, column).to_string(), format!("its bytes have xxh3 {got}, wanted {wanted}"));
        Err(ShardsError::Changed { location, reason })
    }

    fn hash(&self, at: BlockAt) -> Result<Vec<Checksum>, ShardsError> {
        let columns = self.files[at.file].columns();
        columns.map(|column| Ok(Checksum::of(&self.read_chunk(at, column.leaf, &column.name, None)?.bytes))).collect()
    }

    fn check_shape_of(&self, then: &Contents) -> Result<(), ShardsError> {
        let now = (self.files.len(), self.blocks.len() * self.columns());
        let then = (then.versions.len(), then.xxh3.len());
        if now == then {
            return Ok(());
        }
        let reason = format!("{} files of {} column chunks, wanted {} of {}", now.0, now.1, then.0, then.1);
        Err(ShardsError::Changed { location: self.files[0].name.clone(), reason })
    }
}
