//! Joins folders of shards.

use std::path::{Path, PathBuf};
use std::time::Duration;

use locdiff_core::config::ShardsConfig;
use locdiff_core::files::wait_until_visible;

use super::blocks::{BlockRows, Blocks as _, Dataset};
use super::error::ShardsError;
use super::format::{Coordinates, MANIFEST_NAME, Manifest, ShardWriter, WriterOptions};
use super::order::Mask;

/// How long to wait for a folder that another machine has written. File servers may show a new folder late.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes one folder of shards from the files of several folders, in this order. Each folder must have the given number of
/// rows and fit `options`. All embeddings of view 0 are read, so that the bytes of the manifest are those of a single
/// writer.
pub fn join(folders: &[(PathBuf, u64)], options: WriterOptions, out: &Path) -> Result<Manifest, ShardsError> {
    let mut writer = ShardWriter::create(out, options.clone())?;
    let mut rows = BlockRows::default();
    for (folder, count) in folders {
        wait_until_visible(&folder.join(MANIFEST_NAME), PATIENCE);
        let location = folder.display().to_string();
        let dataset = Dataset::open_with(Coordinates::Stored, &location, &ShardsConfig::default())?;
        let manifest =
            dataset.manifest().ok_or_else(|| ShardsError::Argument(format!("{location} has no manifest")))?;
        let got = (manifest.rows, manifest.width, manifest.views, &manifest.source, manifest.image_head);
        let wanted = (*count, options.width, options.views, &options.source, options.image_head);
        if got != wanted {
            return Err(ShardsError::Argument(format!("{location} holds {got:?}, wanted {wanted:?}")));
        }
        for block in 0..dataset.block_rows().len() as u32 {
            dataset.read_usable_first_view(&Mask::none(), block, &mut rows)?;
            writer.moments().add_bytes(&rows.embeddings, |_| true);
        }
        writer.append(folder, manifest)?;
    }
    writer.finish()
}
