//! `shards verify`: checks the data and reports all problems, up to a limit. With a manifest, it reads every byte of
//! every file. Without a manifest, it reads the footers and the columns of coordinates, embeddings and identifiers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hasher as _;

use locdiff_core::config::OnBadRows;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::Problem;
use twox_hash::{XxHash3_64, XxHash3_128};

use super::blocks::{BlockRows, Blocks, Dataset};
use super::error::{ShardsError, Spot};
use super::format::Checksum;
use super::order::Mask;

/// Maximum number of problems to report. The search stops when it has found this many.
pub const PROBLEMS_MAX: usize = 20;

/// Number of bytes of a file to read at a time.
const PIECE_BYTES: usize = 4 << 20;

impl From<ShardsError> for Problem {
    fn from(error: ShardsError) -> Self {
        Self { exit_code: error.exit_code().code(), message: error.to_string() }
    }
}

/// Checks files, column chunks, values and identifiers. Returns the problems found, at most [`PROBLEMS_MAX`].
///
/// The schema and the manifest are not checked here, because [`Dataset::open`] has already checked them. With
/// [`OnBadRows::Skip`], bad rows are not reported as problems, but returned as a mask.
pub fn verify(dataset: &Dataset, on_bad_rows: OnBadRows) -> Result<(Vec<Problem>, Mask), ShardsError> {
    let mut problems = Vec::new();
    check_files(dataset, &mut problems);
    let skipped = check_values(dataset, on_bad_rows, &mut problems);
    check_ids(dataset, &mut problems);
    problems.truncate(PROBLEMS_MAX);
    Ok((problems, Mask::new(skipped, dataset.block_rows())?))
}

/// Compares the checksums of whole files with the manifest.
fn check_files(dataset: &Dataset, problems: &mut Vec<Problem>) {
    let Some(manifest) = &dataset.manifest else { return };
    for (file, listed) in manifest.files.iter().enumerate() {
        if problems.len() >= PROBLEMS_MAX {
            return;
        }
        match file_checksum(dataset, file) {
            Ok(computed) if computed == listed.xxh3 => {}
            Ok(computed) => {
                let reason =
                    format!("the file has xxh3 {computed}, but the manifest says {}: the file is damaged", listed.xxh3);
                problems.push(ShardsError::corrupt(Spot::file(&dataset.files[file].name), reason).into());
            }
            Err(error) => problems.push(error.into()),
        }
    }
}

fn file_checksum(dataset: &Dataset, file: usize) -> Result<Checksum, ShardsError> {
    let (mut hasher, mut buffer) = (XxHash3_64::new(), vec![0; PIECE_BYTES]);
    let bytes = dataset.files[file].bytes;
    let mut offset = 0;
    while offset < bytes {
        let length = (bytes - offset).min(PIECE_BYTES as u64);
        let piece = &mut buffer[..length as usize];
        dataset.source.read_at(file, offset, piece)?;
        hasher.write(piece);
        offset += length;
    }
    Ok(Checksum(hasher.finish()))
}

/// Checks every view of every block: checksums of column chunks, nulls, list lengths, numbers and coordinates. Returns
/// the rows to skip, by block.
fn check_values(dataset: &Dataset, on_bad_rows: OnBadRows, problems: &mut Vec<Problem>) -> BTreeMap<u32, Vec<u32>> {
    let (mut rows, mut skipped) = (BlockRows::default(), BTreeMap::new());
    for block in 0..dataset.block_rows().len() as u32 {
        let (mut seen, mut bad_rows): (Vec<String>, BTreeSet<u32>) = Default::default();
        for view in 0..dataset.stored_views() {
            if problems.len() >= PROBLEMS_MAX {
                return skipped;
            }
            let mut found = Vec::new();
            match dataset.read_block(block, view, &mut rows, &mut found, None) {
                Err(error) => add_once(error.into(), &mut seen, problems),
                Ok(()) if on_bad_rows == OnBadRows::Skip => bad_rows.extend(found.iter().map(|value| value.row as u32)),
                Ok(()) => found.into_iter().for_each(|value| {
                    add_once(dataset.bad_value(block, value).into(), &mut seen, problems);
                }),
            }
        }
        skipped.insert(block, bad_rows.into_iter().collect());
    }
    skipped
}

/// Adds a problem unless it is in `seen`. Coordinates are read again with every view, so the same problem can be found
/// more than once.
fn add_once(problem: Problem, seen: &mut Vec<String>, problems: &mut Vec<Problem>) {
    if problems.len() < PROBLEMS_MAX && !seen.contains(&problem.message) {
        seen.push(problem.message.clone());
        problems.push(problem);
    }
}

impl Dataset {
    /// Checks the identifiers if their column was only guessed, from a common name such as `path`. If an identifier is
    /// null or not unique, row numbers replace all identifiers, and a message about this is returned. Otherwise,
    /// returns `None`.
    pub fn forget_ambiguous_ids(&mut self) -> Option<String> {
        if !self.files.iter().any(|file| file.is_id_guessed) || !self.may_have_ambiguous_ids() {
            return None;
        }
        let mut problems = Vec::new();
        check_ids(self, &mut problems);
        let first = problems.into_iter().find(|problem| problem.exit_code == ExitCode::BadData.code())?;
        self.files.iter_mut().for_each(|file| file.id = None);
        Some(format!("{}; row numbers are the identifiers (set shards.id_column to use another column)", first.message))
    }
}

impl Dataset {
    /// Whether an identifier cannot be read, is null, or has the same 64-bit hash as another one. Takes 8 bytes of memory
    /// per row, which is less than [`check_ids`] takes.
    fn may_have_ambiguous_ids(&self) -> bool {
        let mut hashes = Vec::with_capacity(self.rows() as usize);
        for block in 0..self.block_rows().len() as u32 {
            let ids = match self.ids(block) {
                Ok(ids) => ids.unwrap_or_default().into_iter().collect::<Result<Vec<String>, String>>(),
                Err(_) => return true,
            };
            match ids {
                Ok(ids) => hashes.extend(ids.iter().map(|id| XxHash3_64::oneshot(id.as_bytes()))),
                Err(_) => return true,
            }
        }
        hashes.sort_unstable();
        hashes.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// Checks that no identifier is null or duplicate. Files without an identifier column are not checked. Identifiers are
/// compared by a 128-bit hash, so that two different identifiers practically never count as equal.
fn check_ids(dataset: &Dataset, problems: &mut Vec<Problem>) {
    let mut seen: HashMap<u128, (u32, u32)> = HashMap::new();
    for block in 0..dataset.block_rows().len() as u32 {
        if problems.len() >= PROBLEMS_MAX {
            return;
        }
        let ids = match dataset.ids(block) {
            Ok(Some(ids)) => ids,
            Ok(None) => continue,
            Err(error) => {
                problems.push(error.into());
                continue;
            }
        };
        for (row, id) in ids.into_iter().enumerate() {
            let reason = match id {
                Err(reason) => reason,
                Ok(id) => match seen.insert(XxHash3_128::oneshot(id.as_bytes()), (block, row as u32)) {
                    None => continue,
                    Some((block, row)) => {
                        let first = dataset.spot(block, None, Some(row as usize));
                        format!("duplicate identifier {id:?}, also at {first}")
                    }
                },
            };
            if problems.len() < PROBLEMS_MAX {
                let column = dataset.id_name(block);
                problems.push(ShardsError::bad(dataset.spot(block, column.as_deref(), Some(row)), reason).into());
            }
        }
    }
}
