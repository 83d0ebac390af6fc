//! A gallery: places with a spatial index, and an embedding for each place.
//!
//! GeoCLIP embeds the places of a gallery once, and the embeddings are cached on disk
//! ([`crate::geoclip::GalleryEmbeddings`]). Training photos can also serve as a gallery, with the stored embeddings of
//! the photos. These embeddings stay in f16, so that millions of photos fit in memory.
// Letters in tensor names: g gallery points, w width of an embedding, p rows of a piece.

use std::path::Path;

use locdiff_core::config::RetrievalConfig;
use locdiff_core::geo::{Place, SphereIndex, UnitVector};
use locdiff_core::tables;
use tch::{Device, Kind, Tensor};

use super::error::RetrievalError;
use crate::geoclip::{self, EMBEDDING_WIDTH, Embedder, Geoclip};

/// Number of rows whose norms are computed at once.
const PIECE_ROWS: i64 = 65_536;

/// Places with their embeddings and a spatial index.
#[derive(Debug)]
pub struct Gallery {
    index: SphereIndex,
    embeddings_gw: Tensor,
    inverse_lengths_g: Tensor,
}

impl Gallery {
    /// Opens the configured gallery. Embeddings that are not cached are computed with GeoCLIP, and `progress` is called
    /// with the number of places done and the number of all places.
    pub fn open(
        config: &RetrievalConfig,
        geoclip: &Geoclip,
        embedder: &Embedder,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, RetrievalError> {
        Ok(Self::open_with_places(config, geoclip, embedder, progress)?.0)
    }

    /// Like [`Self::open`], but also returns the places of the points with their exact coordinates, which
    /// [`Self::points`] does not keep.
    pub fn open_with_places(
        config: &RetrievalConfig,
        geoclip: &Geoclip,
        embedder: &Embedder,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<(Self, Vec<Place>), RetrievalError> {
        let (source, mut embedded) = if config.gallery.is_empty() {
            (geoclip.folder().display().to_string(), geoclip::GalleryEmbeddings::open(geoclip, embedder))
        } else {
            let places = tables::read_places(Path::new(&config.gallery))?;
            (config.gallery.clone(), geoclip::GalleryEmbeddings::of_places(geoclip, embedder, places))
        };
        let places = embedded.places().to_vec();
        embedded.complete(embedder, |done| progress(done, places.len()))?;
        let points: Vec<UnitVector> = places.iter().map(|place| UnitVector::from(*place)).collect();
        let shape = [points.len() as i64, EMBEDDING_WIDTH as i64];
        let embeddings_gw = Tensor::f_from_slice(&embedded.into_embeddings())?.f_view(shape)?;
        Ok((Self::of_embeddings(source, points, embeddings_gw)?, places))
    }

    /// A gallery of `points` with the embeddings `embeddings_gw`, `[points, width]` in f16 or f32. An embedding need
    /// not be normalised, but must be finite and not zero. `source` is the origin of the points in error messages.
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
                what: "gallery embeddings",
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

    /// The gallery of the points at these positions, which must be ascending. `None` if there are none.
    pub fn restricted(self, kept: &[u32]) -> Result<Option<Self>, RetrievalError> {
        if kept.is_empty() || kept.len() == self.points().len() {
            return Ok((!kept.is_empty()).then_some(self));
        }
        let positions: Vec<i64> = kept.iter().map(|at| i64::from(*at)).collect();
        let positions = Tensor::f_from_slice(&positions)?;
        Ok(Some(Self {
            embeddings_gw: self.embeddings_gw.f_index_select(0, &positions)?,
            inverse_lengths_g: self.inverse_lengths_g.f_index_select(0, &positions)?,
            index: SphereIndex::new(kept.iter().map(|at| self.points()[*at as usize]).collect()),
        }))
    }

    /// The places of the gallery.
    pub fn points(&self) -> &[UnitVector] {
        self.index.points()
    }

    /// The spatial index of the places.
    pub fn index(&self) -> &SphereIndex {
        &self.index
    }

    /// Width of the embeddings.
    pub fn width(&self) -> usize {
        self.embeddings_gw.size()[1] as usize
    }

    /// Embeddings `[points, width]` in main memory, not normalised.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings_gw
    }

    /// The inverse norm of each embedding, `[points]`, f32.
    pub(super) fn inverse_lengths(&self) -> &Tensor {
        &self.inverse_lengths_g
    }
}

/// The reciprocal of each row's norm. Rows are converted from f16 to f32 in pieces, which bounds the memory for the
/// conversion.
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
