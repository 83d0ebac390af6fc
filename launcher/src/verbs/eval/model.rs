//! The model that a command evaluates or predicts with, and the files that belong to it: settings and calibrations.
//! They come from the folder of a run, or from an exported file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use locdiff_core::config::{Layer, Prior, RunConfig};
use locdiff_core::exported::ExportMetadata;
use locdiff_core::files;
use locdiff_core::protocol::{CHECKPOINT_MANIFEST, CHECKPOINT_STATE};
use serde::Deserialize;

use super::files::{calibration_name, tuned_name};
use crate::error::LaunchError;
use crate::run_folder::{CONFIG, WholeCheckpoint};
use crate::verbs::paths::require_file;
use crate::verbs::runs::checkpoint_at;

/// What the name of an exported file ends with.
const EXTENSION: &str = "safetensors";

/// A model as the workers open it.
#[derive(Debug, Clone)]
pub(in crate::verbs) struct ModelFile {
    /// The folder of a checkpoint, or an exported file. It is intact.
    pub(in crate::verbs) path: PathBuf,
    /// Training steps done.
    pub(in crate::verbs) step: u64,
    /// Checksum of the manifest of the checkpoint. It identifies the checkpoint, also in an exported file.
    pub(in crate::verbs) xxh3: String,
    /// Numbers of an embedding; `None` if the state of the checkpoint cannot be read, which a worker will report.
    pub(in crate::verbs) width: Option<usize>,
}

/// What is read of the state in a checkpoint.
#[derive(Deserialize)]
struct StateOfModel {
    embedding_width: usize,
}

impl ModelFile {
    /// The model of a checkpoint.
    pub(in crate::verbs) fn of(checkpoint: &WholeCheckpoint) -> Result<Self, LaunchError> {
        let xxh3 = files::measure(&checkpoint.path.join(CHECKPOINT_MANIFEST))?.xxh3;
        let state = std::fs::read(checkpoint.path.join(CHECKPOINT_STATE)).unwrap_or_default();
        let width = serde_json::from_slice(&state).ok().map(|StateOfModel { embedding_width }| embedding_width);
        Ok(Self { path: checkpoint.path.clone(), step: checkpoint.manifest.step, xxh3, width })
    }

    /// The model in an exported file, with its metadata. Verifies the checksum of the file. `name` is the flag or the
    /// field that names the file.
    pub(super) fn exported(name: &str, path: &Path) -> Result<(Self, ExportMetadata), LaunchError> {
        require_file(name, path)?;
        let found = ExportMetadata::verified(path).map_err(|error| LaunchError::reported(error).about(name))?;
        let width = Some(found.model.embedding_width as usize);
        Ok((Self { path: path.to_owned(), step: found.step, xxh3: found.checkpoint.clone(), width }, found))
    }
}

/// The image head that `retrieval.run` names: a run in the folder of all runs, the folder of a run or a checkpoint, or
/// an exported file.
pub(super) fn head_model(config: &RunConfig) -> Result<ModelFile, LaunchError> {
    let (named, dir) = (Path::new(&config.retrieval.run), &config.checkpoint.dir);
    if named.extension().is_some_and(|extension| extension == EXTENSION) {
        return ModelFile::exported("retrieval.run", named).map(|(model, _)| model);
    }
    let folder = if named.components().count() == 1 { Path::new(dir).join(named) } else { named.to_owned() };
    ModelFile::of(&checkpoint_at("retrieval.run", &folder, dir)?)
}

/// The checksum that identifies the image head of the run `named`. `None` if there is none.
pub(in crate::verbs) fn head_xxh3(config: &RunConfig, named: &str) -> Option<String> {
    let mut config = config.clone();
    named.clone_into(&mut config.retrieval.run);
    if named.is_empty() { None } else { head_model(&config).ok().map(|head| head.xxh3) }
}

/// A text, and where it is from.
pub(in crate::verbs) struct SourceText {
    /// The path of the file, for messages.
    pub(super) name: String,
    pub(in crate::verbs) text: String,
}

impl SourceText {
    /// Reads a file; `None` if it does not exist.
    pub(super) fn read(path: PathBuf) -> Result<Option<Self>, LaunchError> {
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(Self { name: path.display().to_string(), text })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(LaunchError::at(path)(error)),
        }
    }

    /// The text as a layer of the configuration.
    pub(in crate::verbs) fn layer(&self) -> Layer {
        Layer::Text { source: self.name.clone(), text: self.text.clone() }
    }
}

/// Where the settings and the calibrations of a model are.
#[derive(Debug)]
pub(in crate::verbs) enum ModelSource {
    /// The folder of a run.
    Run(PathBuf),
    /// An exported file.
    Export(PathBuf, Box<ExportMetadata>),
}

impl ModelSource {
    /// The folder of the run; `None` for an exported file.
    pub(in crate::verbs) fn run(&self) -> Option<&Path> {
        match self {
            Self::Run(folder) => Some(folder),
            Self::Export(..) => None,
        }
    }

    /// The run or the file, for messages.
    pub(in crate::verbs) fn described(&self) -> String {
        match self {
            Self::Run(folder) => format!("run {}", folder.display()),
            Self::Export(file, _) => file.display().to_string(),
        }
    }

    /// The folder of the run, or the exported file.
    pub(in crate::verbs) fn path(&self) -> &Path {
        match self {
            Self::Run(path) | Self::Export(path, _) => path,
        }
    }

    /// The configuration of the run, as the lowest layer.
    pub(super) fn base(&self) -> Layer {
        match self {
            Self::Run(folder) => Layer::File(folder.join(CONFIG)),
            Self::Export(_, metadata) => {
                let text = metadata.run.config.clone().unwrap_or_default();
                self.part("run_config", text).layer()
            }
        }
    }

    /// The settings of LocDiff-H that were tuned with `prior`; `None` if there are none.
    pub(in crate::verbs) fn tuned(&self, prior: Prior) -> Result<Option<SourceText>, LaunchError> {
        let (name, run) = (tuned_name(prior), |metadata: &ExportMetadata| match prior {
            Prior::Training => metadata.run.tuned.clone(),
            Prior::Even => metadata.run.tuned_even.clone(),
        });
        self.find(name, run)
    }

    /// The calibration of LocDiff, or of LocDiff-H; `None` if there is none.
    pub(super) fn calibration(&self, is_hybrid: bool) -> Result<Option<SourceText>, LaunchError> {
        self.find(calibration_name(is_hybrid), |metadata| match is_hybrid {
            false => metadata.run.calibration.clone(),
            true => metadata.run.calibration_hybrid.clone(),
        })
    }

    /// The file `name` in the folder `eval` of the run, or the part of the exported file that has its text.
    fn find(
        &self,
        name: &str,
        part: impl Fn(&ExportMetadata) -> Option<String>,
    ) -> Result<Option<SourceText>, LaunchError> {
        match self {
            Self::Run(folder) => SourceText::read(folder.join("eval").join(name)),
            Self::Export(_, metadata) => Ok(part(metadata).map(|text| self.part(name, text))),
        }
    }

    fn part(&self, name: &str, text: String) -> SourceText {
        SourceText { name: format!("{name} in {}", self.path().display()), text }
    }

    /// Whether `retrieval.run` in `config` names the image head that the run `other` had when settings were tuned for
    /// it.
    pub(super) fn is_head(&self, other: &str, config: &RunConfig) -> bool {
        let named = &config.retrieval.run;
        let known = || match self {
            Self::Run(_) => head_xxh3(config, other),
            Self::Export(_, metadata) => metadata.run.heads.get(other).cloned(),
        };
        named == other || known().is_some_and(|known| head_xxh3(config, named) == Some(known))
    }

    /// How to measure a calibration that is missing.
    pub(in crate::verbs) fn how_to_calibrate(&self, is_hybrid: bool) -> String {
        let flag = if is_hybrid { " --hybrid" } else { "" };
        match self {
            Self::Run(_) => format!("`eval --calibrate{flag}` measures the radii"),
            Self::Export(..) => format!("calibrate its run with `eval --calibrate{flag}`, and export it again"),
        }
    }
}
