//! The metadata of an exported model, and its checksum. `checkpoints/README.md` specifies the format.
//!
//! An export is one safetensors file: the averaged weights of a checkpoint, and everything else that a prediction needs
//! from the run. The checksum in its metadata covers the whole file, with zeros in the place of the checksum itself.
//!
//! This module does not interpret the tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::exit_code::{ExitCode, FailureKind, HasExitCode};
use crate::files::{FileError, HashedReader, TakeError};
use crate::protocol::RunParts;
use crate::pulse;

/// Name and version of the format.
const FORMAT: &str = "locdiff-export-2";
/// The only earlier version.
const OLDER_FORMAT: &str = "locdiff-export-1";
/// What the names of all versions of the format begin with.
const FORMATS: &str = "locdiff-export-";
/// Key of the checksum.
const CHECKSUM: &str = "xxh3";
/// The checksum while it is not known.
const NO_CHECKSUM: &str = "0000000000000000";
/// The largest header of a safetensors file that is accepted, in bytes. The safetensors library has the same limit.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Number of bytes of the length of the header, which is before the header.
const LENGTH_BYTES: u64 = 8;
/// Number of bytes that are read at once.
const BUFFER_BYTES: u64 = 1 << 20;
/// What to do about a file that cannot be used.
const EXPORT_AGAIN: &str = "export the run again with `locdiff-launch checkpoint export RUN --out FILE`";

/// An exported file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] FileError),
    /// The file is damaged.
    #[error("{path}: {reason}; copy the file again, or {EXPORT_AGAIN}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The file has another format.
    #[error("{path}: {reason}")]
    Bad {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
}

impl HasExitCode for ExportError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Io(_) => ExitCode::Io,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Bad { .. } => ExitCode::BadData,
        }
    }

    fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Io(error) => error.failure_kind(),
            _ => FailureKind::of_code(self.exit_code()),
        }
    }
}

/// The part of `state.json` that a prediction needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelState {
    /// Degree of the spherical harmonics in the codes.
    pub degree: u32,
    /// Width of the embeddings.
    pub embedding_width: u32,
    /// Dimensions of the code that the low-pass filter keeps; `None` if all dimensions are kept.
    #[serde(default)]
    pub kept_dimensions: Option<Vec<u32>>,
    /// The configuration at the step of the checkpoint.
    pub config: RunConfig,
}

/// The metadata of an export.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportMetadata {
    /// Training steps done.
    pub step: u64,
    /// Version of the program that wrote the checkpoint.
    pub version: String,
    /// Git revision of the program that wrote the checkpoint.
    pub revision: String,
    /// Checksum of the manifest of the checkpoint. It identifies the checkpoint.
    pub checkpoint: String,
    /// Validation score of the checkpoint; `None` if it was not measured.
    pub score: Option<f64>,
    /// The sizes and the configuration of the network.
    pub model: ModelState,
    /// What the export took from the folder of the run.
    pub run: RunParts,
}

impl ExportMetadata {
    /// The metadata as strings, with zeros instead of the checksum.
    pub fn strings(&self) -> BTreeMap<String, String> {
        let json = |value: serde_json::Result<String>| value.expect("plain values can be written as JSON");
        let (model, run) = (&self.model, &self.run);
        let toml = |config| toml::to_string(config).expect("a checked configuration can be written as TOML");
        let optional = [
            ("score", self.score.map(|score| score.to_string())),
            ("kept_dimensions", model.kept_dimensions.as_ref().map(|kept| json(serde_json::to_string(kept)))),
            ("tuned", run.tuned.clone()),
            ("tuned_even", run.tuned_even.clone()),
            ("calibration", run.calibration.clone()),
            ("calibration_hybrid", run.calibration_hybrid.clone()),
        ];
        let always = [
            ("format", FORMAT.to_owned()),
            (CHECKSUM, NO_CHECKSUM.to_owned()),
            ("step", self.step.to_string()),
            ("version", self.version.clone()),
            ("revision", self.revision.clone()),
            ("checkpoint", self.checkpoint.clone()),
            ("degree", model.degree.to_string()),
            ("embedding_width", model.embedding_width.to_string()),
            ("config", json(serde_json::to_string(&model.config))),
            ("run_config", run.config.clone().unwrap_or_else(|| toml(&model.config))),
            ("heads", json(serde_json::to_string(&run.heads))),
        ];
        let present = optional.into_iter().filter_map(|(key, value)| Some((key, value?)));
        always.into_iter().chain(present).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// The error says which value is wrong.
    fn parse(strings: &BTreeMap<String, String>) -> Result<Self, String> {
        let text = |key: &str| strings.get(key).cloned();
        let needed = |key: &str| text(key).ok_or_else(|| missing(key));
        Ok(Self {
            step: json_of(strings, "step")?,
            version: needed("version")?,
            revision: needed("revision")?,
            checkpoint: needed("checkpoint")?,
            score: find_json(strings, "score")?,
            model: ModelState {
                degree: json_of(strings, "degree")?,
                embedding_width: json_of(strings, "embedding_width")?,
                kept_dimensions: find_json(strings, "kept_dimensions")?,
                config: json_of(strings, "config")?,
            },
            run: RunParts {
                config: Some(needed("run_config")?),
                tuned: text("tuned"),
                tuned_even: text("tuned_even"),
                calibration: text("calibration"),
                calibration_hybrid: text("calibration_hybrid"),
                heads: json_of(strings, "heads")?,
            },
        })
    }

    /// Reads the metadata of an exported file, and checks the checksum of the whole file.
    pub fn verified(path: &Path) -> Result<Self, ExportError> {
        let mut file = ExportReader::open(path)?;
        let metadata = file.metadata();
        while file.left() > 0 {
            pulse::advance();
            file.take(file.left().min(BUFFER_BYTES))?;
        }
        // In a damaged file, the damage is the reason for everything else that is wrong.
        file.finish()?;
        metadata
    }
}

/// The value of a key, which is a number or JSON; `None` without the key.
fn find_json<Found: DeserializeOwned>(strings: &BTreeMap<String, String>, key: &str) -> Result<Option<Found>, String> {
    let parse = |text| serde_json::from_str(text).map_err(|error| format!("`{key}` in the metadata: {error}"));
    strings.get(key).map(|text| parse(text)).transpose()
}

/// The value of a key, which must be there.
fn json_of<Found: DeserializeOwned>(strings: &BTreeMap<String, String>, key: &str) -> Result<Found, String> {
    find_json(strings, key)?.ok_or_else(|| missing(key))
}

fn missing(key: &str) -> String {
    format!("the metadata has no `{key}`")
}

/// An exported file that is being read.
#[derive(Debug)]
pub struct ExportReader {
    file: HashedReader,
    /// The JSON text of the header, with zeros in the place of the checksum.
    header: Vec<u8>,
    strings: BTreeMap<String, String>,
    /// The checksum in the metadata.
    checksum: String,
    /// Position of the checksum in the header.
    position: usize,
}

/// The metadata of a safetensors header. Its tensors are ignored.
#[derive(Deserialize)]
struct Envelope {
    #[serde(rename = "__metadata__", default)]
    metadata: BTreeMap<String, String>,
}

impl ExportReader {
    /// Reads the header of an exported file. The header is not verified yet: that needs the whole file.
    pub fn open(path: &Path) -> Result<Self, ExportError> {
        let corrupt = |reason| ExportError::Corrupt { path: path.to_owned(), reason };
        let bad = |reason| ExportError::Bad { path: path.to_owned(), reason };
        let mut file = HashedReader::open(path)?;
        let wrapped = |error| match error {
            TakeError::Short(reason) => corrupt(format!("not a safetensors file, or cut short: {reason}")),
            TakeError::Io(error) => ExportError::Io(error),
        };
        let length = file.take(LENGTH_BYTES).map_err(wrapped)?;
        let size = length.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        if size > HEADER_BYTES_MAX.min(file.left()) {
            let limit = HEADER_BYTES_MAX.min(file.left());
            let reason = format!("not a safetensors file, or cut short: its header would have {size} bytes");
            return Err(corrupt(format!("{reason}, wanted at most {limit}")));
        }
        let mut header = file.take(size).map_err(wrapped)?;
        let Envelope { metadata } = serde_json::from_slice(&header)
            .map_err(|error| corrupt(format!("the header cannot be parsed: {error}")))?;
        check_format(metadata.get("format").map_or("", String::as_str)).map_err(bad)?;
        let checksum = metadata.get(CHECKSUM).cloned().unwrap_or_default();
        let Some(position) = checksum_position(&header, &checksum) else {
            return Err(corrupt("another program has rewritten the file, so it has no valid checksum".to_owned()));
        };
        header[position..position + NO_CHECKSUM.len()].copy_from_slice(NO_CHECKSUM.as_bytes());
        file.hash_instead(&[&*length, &*header].concat());
        Ok(Self { file, header, strings: metadata, checksum, position })
    }

    /// The metadata, which [`ExportReader::finish`] verifies later.
    pub fn metadata(&self) -> Result<ExportMetadata, ExportError> {
        let bad = |reason| ExportError::Bad { path: self.file.path().to_owned(), reason };
        ExportMetadata::parse(&self.strings).map_err(|reason| bad(format!("{reason}; {EXPORT_AGAIN}")))
    }

    /// Position of the checksum in the file.
    pub fn checksum_position(&self) -> u64 {
        LENGTH_BYTES + self.position as u64
    }

    /// The JSON text of the header, with zeros in the place of the checksum.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Number of bytes that are not read yet.
    pub fn left(&self) -> u64 {
        self.file.left()
    }

    /// Reads the next `bytes` bytes of the tensors.
    pub fn take(&mut self, bytes: u64) -> Result<Vec<u8>, ExportError> {
        self.file.take(bytes).map_err(|error| match error {
            TakeError::Short(reason) => ExportError::Corrupt { path: self.file.path().to_owned(), reason },
            TakeError::Io(error) => ExportError::Io(error),
        })
    }

    /// Compares the checksum with that of the file, which must have been read to its end.
    pub fn finish(self) -> Result<(), ExportError> {
        let (got, left, want) = (self.file.hex(), self.file.left(), self.checksum);
        if left == 0 && got == want {
            return Ok(());
        }
        let reason =
            format!("the file is damaged or cut short: its xxh3 checksum is {got}, but its metadata says {want}");
        Err(ExportError::Corrupt { path: self.file.path().to_owned(), reason })
    }
}

/// Fails if a file with the value `format` of the key `format` cannot be read.
fn check_format(format: &str) -> Result<(), String> {
    if format == FORMAT {
        return Ok(());
    }
    Err(if format == OLDER_FORMAT {
        format!("this export is from an older version and lacks what a prediction needs; {EXPORT_AGAIN}")
    } else if format.starts_with(FORMATS) {
        format!(
            "the export has the format {format:?}, wanted {FORMAT:?}; use the version of locdiff-launch that wrote it"
        )
    } else {
        format!("the file is not an export of locdiff-launch, or damaged; {EXPORT_AGAIN}")
    })
}

/// Position of the checksum in the text of a header. `None` if the checksum has another form or place than
/// [`ExportMetadata::strings`] gives it. In JSON, quotes within other values are escaped, so only the key itself has
/// this form.
fn checksum_position(header: &[u8], checksum: &str) -> Option<usize> {
    let wanted = format!("\"{CHECKSUM}\":\"{checksum}\"");
    let found = header.windows(wanted.len()).position(|part| part == wanted.as_bytes())?;
    (checksum.len() == NO_CHECKSUM.len()).then_some(found + wanted.len() - checksum.len() - 1)
}
