//! Parts of a checkpoint: written by ranks, read back by whoever goes on from it. `checkpoints/README.md` is the format.
//!
//! A rank writes its parts into a hidden folder and brings them to the disk; making a checkpoint of them is the launcher's
//! (`launcher/src/run_folder`). A tensor that is read has passed its checksum on this very read. Nothing here knows what
//! the numbers mean.
//!
//! In reading order: `header` (safetensors, pure), `writer`, `background`, `pieces`, `reader`, `export`.

mod background;
mod error;
mod export;
mod header;
mod pieces;
mod reader;
mod writer;

pub use background::{Background, Part, Snapshot};
pub use error::CheckpointError;
pub use export::export;
pub use header::{Entry, Header, HeaderError};
pub use pieces::{DIVISIONS, Division, divisions_metadata};
pub use reader::{Checkpoint, load_bytes, load_tensors};
pub use writer::{write_json, write_tensors};

/// Weights that are trained.
pub const WEIGHTS: &str = "weights";
/// Their moving average, which evaluation uses.
pub const EMA: &str = "ema";
/// AdamW's first moments.
pub const FIRST_MOMENTS: &str = "first-moments";
/// AdamW's second moments.
pub const SECOND_MOMENTS: &str = "second-moments";
/// Everything that is no tensor: position in the data, counters, configuration.
pub const STATE: &str = "state.json";

/// Name of one piece of a part, such as `weights-00-of-01.safetensors`.
pub fn piece_name(part: &str, piece: u32, pieces: u32) -> String {
    format!("{part}-{piece:02}-of-{pieces:02}.safetensors")
}
