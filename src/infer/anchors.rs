//! The anchors: an even grid of points, or the places of a gallery. The decoder compares codes with these points.

use std::path::Path;

use locdiff_core::config::{DecodeAnchors, RetrievalConfig, RetrievalHead, RunConfig, grid_points_min};
use locdiff_core::geo::{Place, UnitVector, fibonacci_grid, places};
use locdiff_core::{pulse, tables};

use super::error::InferError;
use super::retrieve::Retrieval;
use super::trained::Trained;
use crate::geoclip::Geoclip;
use crate::shards::{BlockRows, Blocks, Dataset, Mask};

/// The anchors that `eval.anchors` selects. With `eval.refine`, a grid must have enough points for the degree of the
/// checkpoint. This degree may differ from the configured degree.
pub fn anchors(
    config: &RunConfig,
    trained: &Trained,
    retrieval: Option<&Retrieval>,
) -> Result<Vec<UnitVector>, InferError> {
    let degree = trained.denoiser.degree;
    match config.eval.anchors {
        DecodeAnchors::Grid => {
            let (got, want) = (config.eval.grid_points(degree), grid_points_min(degree));
            if config.eval.refine && got < want {
                return Err(InferError::Config(format!(
                    "eval.grid_points is {got}, which is too few for eval.refine, because {} has model.degree = \
                     {degree}; wanted \"auto\" or at least {want}",
                    trained.path.display()
                )));
            }
            Ok(fibonacci_grid(got as usize))
        }
        DecodeAnchors::Gallery => gallery_points(config, retrieval),
    }
}

/// The points of the gallery. If `retrieval.gallery` is empty, the gallery depends on the head: with the head "knn", it
/// holds the places of the training photos, and with any other head, the places of GeoCLIP's gallery.
pub(super) fn gallery_points(config: &RunConfig, opened: Option<&Retrieval>) -> Result<Vec<UnitVector>, InferError> {
    let RetrievalConfig { gallery, head, geoclip, .. } = &config.retrieval;
    let is_photos = *head == RetrievalHead::Knn;
    let places = match opened {
        Some(opened) if !is_photos || gallery.is_empty() => return Ok(opened.gallery().points().to_vec()),
        _ if !gallery.is_empty() => tables::read_places(Path::new(gallery))?,
        _ if is_photos => training_places(config, None)?,
        _ => Geoclip::open(Path::new(geoclip))?.places().to_vec(),
    };
    Ok(places.into_iter().map(UnitVector::from).collect())
}

/// The places of all usable training rows. `mask` marks the rows to skip; `None` if they are not known yet.
pub(super) fn training_places(config: &RunConfig, mask: Option<Mask>) -> Result<Vec<Place>, InferError> {
    let opened = Dataset::open(&config.shards.train, &config.shards);
    let dataset = opened.map_err(|error| error.of_field("shards.train"))?;
    let mask = mask.map_or_else(|| Mask::for_config(&dataset, &config.shards), Ok)?;
    let (mut found, mut rows) = (Vec::new(), BlockRows::default());
    for block in 0..dataset.block_rows().len() as u32 {
        pulse::advance();
        dataset.read_usable_coordinates(&mask, block, &mut rows)?;
        found.extend(places(&rows.latitudes, &rows.longitudes)?);
    }
    Ok(found)
}
