//! `eval.truth`: true places of the test rows by identifier. They override the coordinates in the shards.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::geo::Place;
use locdiff_core::predictions::{PredictionsError, Truth};

use crate::infer::{ImageBlock, ImageRows, InferError};

/// The truth file and its places.
#[derive(Debug)]
pub struct TruthFile {
    path: String,
    /// Location of the data, for error messages.
    location: String,
    places: HashMap<String, Place>,
}

impl TruthFile {
    /// Reads the truth file; `None` if none is configured or `location` is not `shards.test`. A row of the file that is
    /// not in the data is an error: the file probably belongs to other data.
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

    /// Replaces the places of a block by those of the file.
    pub fn apply(&self, block: &mut ImageBlock) -> Result<(), InferError> {
        for image in &mut block.images {
            let (truth, location, id) = (&self.path, &self.location, &image.id);
            let missing =
                || format!("{truth} (eval.truth) has no row {id:?} of {location}; it must have every row of the data");
            image.truth = *self.places.get(id).ok_or_else(|| InferError::BadData(missing()))?;
        }
        Ok(())
    }
}
