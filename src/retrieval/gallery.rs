//! A gallery: places, an index of them, and an embedding each.
//!
//! GeoCLIP's embeddings of places are computed once and kept on disk ([`crate::geoclip::Gallery`]). Training photos serve as a
//! gallery too, with their own embeddings, in f16 as they are stored: millions of them fit.
// g gallery points · w width

use std::path::Path;

use locdiff_core::config::RetrievalConfig;
use locdiff_core::geo::{SphereIndex, UnitVector};
use locdiff_core::tables;
use tch::{Device, Kind, Tensor};

use super::error::RetrievalError;
use crate::geoclip::{self, EMBEDDING_WIDTH, Embedder, Geoclip};

/// Rows whose lengths are computed at once.
const PIECE_ROWS: i64 = 65_536;

/// Places with embeddings.
#[derive(Debug)]
pub struct Gallery {
    index: SphereIndex,
    embeddings_gw: Tensor,
    inverse_lengths_g: Tensor,
}

impl Gallery {
    /// The gallery that the configuration names, embedded by GeoCLIP; `progress` hears how many embeddings are computed, which
    /// is none where an earlier run has kept them.
    pub fn open(
        config: &RetrievalConfig,
        geoclip: &Geoclip,
        embedder: &Embedder,
        progress: impl FnMut(usize),
    ) -> Result<Self, RetrievalError> {
        let (source, mut embedded) = if config.gallery.is_empty() {
            (geoclip.folder().display().to_string(), geoclip::Gallery::open(geoclip, embedder))
        } else {
            let places = tables::read_places(Path::new(&config.gallery))?;
            (config.gallery.clone(), geoclip::Gallery::of_places(geoclip, embedder, places))
        };
        embedded.complete(embedder, progress)?;
        let points: Vec<UnitVector> = embedded.places().iter().map(|place| UnitVector::from(*place)).collect();
        let shape = [points.len() as i64, EMBEDDING_WIDTH as i64];
        let embeddings_gw = Tensor::f_from_slice(&embedded.into_embeddings())?.f_view(shape)?;
        Self::of_embeddings(source, points, embeddings_gw)
    }

    /// Points with embeddings of their own, `[points, width]`, f16 or f32, of any length but zero. `source` names them in messages.
    pub fn of_embeddings(
        source: String,
        points: Vec<UnitVector>,
        embeddings_gw: Tensor,
    ) -> Result<Self, RetrievalError> {
        if points.is_empty() {
            return Err(RetrievalError::EmptyGallery(source));
        }
        let shape = embeddings_gw.size();
        if shape.len() != 2 || shape[0] != points.len() as i64 {
            return Err(RetrievalError::Shape {
                what: "embeddings of a gallery",
                got: format!("{shape:?}"),
                want: format!("[{}, width]", points.len()),
            });
        }
        let embeddings_gw = embeddings_gw.f_to_device(Device::Cpu)?.f_contiguous()?;
        let inverse_lengths_g = inverse_lengths(&embeddings_gw)?;
        let inverse = Vec::<f32>::try_from(&inverse_lengths_g)?;
        if let Some(row) = inverse.iter().position(|value| !value.is_finite() || *value == 0.0) {
            return Err(RetrievalError::NoDirection { what: "gallery point", row });
        }
        Ok(Self { index: SphereIndex::new(points), embeddings_gw, inverse_lengths_g })
    }

    /// Its places.
    pub fn points(&self) -> &[UnitVector] {
        self.index.points()
    }

    /// What is near what.
    pub fn index(&self) -> &SphereIndex {
        &self.index
    }

    /// Numbers of an embedding.
    pub fn width(&self) -> usize {
        self.embeddings_gw.size()[1] as usize
    }

    /// `[points, width]`, in main memory, not normalised.
    pub(super) fn embeddings(&self) -> &Tensor {
        &self.embeddings_gw
    }

    /// What makes unit vectors of the rows, `[points]`, f32.
    pub(super) fn inverse_lengths(&self) -> &Tensor {
        &self.inverse_lengths_g
    }
}

/// One over the length of each row, piece by piece: rows may be in f16.
fn inverse_lengths(embeddings_gw: &Tensor) -> Result<Tensor, RetrievalError> {
    let rows = embeddings_gw.size()[0];
    let piece = |first: i64| -> Result<Tensor, RetrievalError> {
        let count = PIECE_ROWS.min(rows - first);
        let piece_pw = embeddings_gw.f_narrow(0, first, count)?.f_to_kind(Kind::Float)?;
        Ok(piece_pw.f_norm_scalaropt_dim(2.0, [1].as_slice(), false)?.f_reciprocal()?)
    };
    let pieces = (0..rows).step_by(PIECE_ROWS as usize).map(piece).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&pieces, 0)?)
}
