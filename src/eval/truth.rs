//! The file `eval.truth`: the true places of the test rows, by row identifier. These places override the coordinates in
//! the shards.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::geo::Place;
use locdiff_core::predictions::{PredictionsError, Truth};

use crate::infer::{ImageBlock, ImageRows, InferError};

/// The places in the truth file.
#[derive(Debug)]
pub struct TruthFile {
    path: String,
    /// Location of the data, for error messages.
    location: String,
    places: HashMap<String, Place>,
}

impl TruthFile {
    /// Reads the truth file. Returns `None` if `eval.truth` is not set, or if `location`, the data to evaluate, is not
    /// `shards.test`. Fails if the file has an identifier that no row of the data has, because the file then probably
    /// belongs to different data.
    pub fn open(location: &str, rows: &ImageRows, config: &RunConfig) -> Result<Option<Self>, InferError> {
        let path = config.eval.truth.clone();
        if path.is_empty() || location != config.shards.test {
            return Ok(None);
        }
        let truth = Truth::read(Path::new(&path))?;
        let ids: HashSet<String> = rows.ids()?.into_iter().collect();
        let extra: Vec<&String> = truth.ids.iter().filter(|id| !ids.contains(*id)).collect();
        if !extra.is_empty() {
            return Err(PredictionsError::extra_rows(&path, location, truth.ids.len(), &extra).into());
        }
        let places = truth.ids.into_iter().zip(truth.places).collect();
        Ok(Some(Self { path, location: location.to_owned(), places }))
    }

    /// Replaces the true places of the images in a block with the places in the file. Fails if the file has no place
    /// for an image.
    pub fn apply(&self, block: &mut ImageBlock) -> Result<(), InferError> {
        for image in &mut block.images {
            image.truth = Some(self.place(&image.id)?);
        }
        Ok(())
    }

    /// The true place of the photo with this identifier. It is an error if the file has no row for it.
    pub fn place(&self, id: &str) -> Result<Place, InferError> {
        let (truth, location) = (&self.path, &self.location);
        let missing = || {
            format!(
                "{truth} (eval.truth) has no row {id:?}, which {location} has; the truth file must have a row for \
                 every photo"
            )
        };
        self.places.get(id).copied().ok_or_else(|| InferError::BadData(missing()))
    }
}
