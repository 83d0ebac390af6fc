//! `eval.truth`: where the test rows really are, by identifier, whatever their shards say.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::geo::Place;
use locdiff_core::predictions::{PredictionsError, Truth};

use crate::infer::{ImageBlock, InferError, Rows};

/// The file and its places.
#[derive(Debug)]
pub struct TruthFile {
    path: String,
    /// Where the data is, for messages.
    location: String,
    places: HashMap<String, Place>,
}

impl TruthFile {
    /// Reads it where there is one and `rows` at `location` are those of `shards.test`. Each of its rows is one of the data: a truth
    /// of other rows is not the one that was meant.
    pub fn open(location: &str, rows: &Rows, config: &RunConfig) -> Result<Option<Self>, InferError> {
        let path = config.eval.truth.clone();
        if path.is_empty() || location != config.shards.test {
            return Ok(None);
        }
        let truth = Truth::read(Path::new(&path))?;
        let known: HashSet<String> = rows.names()?.into_iter().collect();
        let extra: Vec<&String> = truth.ids.iter().filter(|id| !known.contains(*id)).collect();
        if !extra.is_empty() {
            return Err(PredictionsError::extra(&path, location, truth.ids.len(), &extra).into());
        }
        let places = truth.ids.into_iter().zip(truth.places).collect();
        Ok(Some(Self { path, location: location.to_owned(), places }))
    }

    /// Puts its places in the place of those of the shards.
    pub fn apply(&self, block: &mut ImageBlock) -> Result<(), InferError> {
        for image in &mut block.images {
            let (truth, location, id) = (&self.path, &self.location, &image.id);
            let unknown = || {
                format!("{truth} (eval.truth) has no row {id:?}, which {location} has; wanted every row of the data")
            };
            image.truth = *self.places.get(id).ok_or_else(|| InferError::BadData(unknown()))?;
        }
        Ok(())
    }
}
