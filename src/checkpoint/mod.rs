//! Writes and reads the parts of a checkpoint. `checkpoints/README.md` specifies the format.
//!
//! Each rank writes its parts into a hidden folder and fsyncs them. The launcher then commits the parts of all ranks as
//! a checkpoint (`launcher/src/run_folder`). Every read of a file verifies its checksum. This module does not interpret
//! the tensors.
//!
//! In reading order:
//! - `header`: encodes and parses the header of a safetensors file.
//! - `writer`: writes one part.
//! - `background`: writes parts while training continues.
//! - `pieces`: joins the pieces of a part.
//! - `reader`: reads a committed checkpoint or an exported file.
//! - `export`: writes averaged weights to one file, with what else a prediction needs.

mod background;
mod error;
mod export;
mod header;
mod pieces;
mod reader;
mod writer;

use locdiff_core::protocol::CHECKPOINT_STATE;

pub use background::{Background, Part, Snapshot, WriteFault};
pub use error::CheckpointError;
pub use export::export;
pub use header::{Header, HeaderError, TensorEntry};
pub use pieces::{DIVISIONS, Division, NamedTensors, divisions_metadata};
pub use reader::{Checkpoint, load_bytes, load_export, load_tensors};
pub use writer::{write_json, write_tensors};

/// The trained weights.
pub const WEIGHTS: &str = "weights";
/// The moving average of the weights, which evaluation uses.
pub const EMA: &str = "ema";
/// AdamW's first moments.
pub const FIRST_MOMENTS: &str = "first-moments";
/// AdamW's second moments.
pub const SECOND_MOMENTS: &str = "second-moments";
/// Everything that is not a tensor: position in the data, counters, configuration.
pub const STATE: &str = CHECKPOINT_STATE;

/// File name of one piece of a part, such as `weights-00-of-01.safetensors`.
pub fn piece_name(part: &str, piece: u32, pieces: u32) -> String {
    format!("{part}-{piece:02}-of-{pieces:02}.safetensors")
}
