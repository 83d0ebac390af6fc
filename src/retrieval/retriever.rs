//! Scores queries against a whole gallery with tiled matrix products. For each query, keeps the best gallery points and
//! the logits of the requested gallery points.
//!
//! Besides the gallery, each thread needs memory for one tile of the gallery and the logits of the tile. On a GPU, the
//! embeddings of the gallery stay in GPU memory if they need at most [`KEPT_BYTES_MAX`] bytes. Otherwise they are
//! copied to the GPU tile by tile.
//!
//! All tiles of queries on the same kind of device have the same size (the last tile is padded), and a gallery is
//! always divided in the same way. On the CPU, the last tile of the gallery is padded too, and each product runs on one
//! thread. On one kind of device, the bits of a logit therefore depend only on the query and the gallery.
// Letters in tensor names: i images of a tile, g gallery points, w width of an embedding.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use locdiff_core::geo::{Km, UnitVector};
use locdiff_core::parallel::in_parallel;
use tch::{Device, Kind, Tensor};

use super::error::RetrievalError;
use super::gallery::Gallery;
use crate::geoclip::for_each_tile;

/// The embeddings of a gallery stay in GPU memory if they need at most this many bytes.
const KEPT_BYTES_MAX: usize = 16 << 30;

/// Queries of a tile on a GPU. By default, a block of an evaluation has the same number of images, so only the last
/// block needs padding.
pub(super) const GPU_QUERIES: usize = 256;

/// Size of a tile: images (queries) × gallery points.
#[derive(Debug, Clone, Copy)]
struct TileSize {
    images: usize,
    points: usize,
}

impl TileSize {
    /// The size of a tile on a device. The logits of a tile take 2 MiB on the CPU and 256 MiB on a GPU.
    fn for_device(device: Device) -> Self {
        if device.is_cuda() {
            Self { images: GPU_QUERIES, points: 262_144 }
        } else {
            Self { images: 128, points: 4096 }
        }
    }
}

/// The result of one query.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scored {
    /// The best gallery points and their logits, best first.
    pub best: Vec<(u32, f32)>,
    /// Logits of the requested gallery points, in the order of the request.
    pub logits: Vec<f32>,
}

/// The gallery points that are left out for each photo: those within a radius of its true place. An evaluation leaves
/// them out to measure how accurate the methods are at places that are not in the gallery.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Exclusion<'a> {
    /// Points at most this far from the true place are left out.
    pub radius: Km,
    /// True place of each photo.
    pub truths: &'a [UnitVector],
}

impl Exclusion<'_> {
    /// The exclusion for the `count` photos from `first` on.
    pub(super) fn of_photos(&self, first: usize, count: usize) -> Self {
        Self { radius: self.radius, truths: &self.truths[first..first + count] }
    }
}

/// Answers queries against a gallery.
#[derive(Debug)]
pub struct Retriever<'a> {
    gallery: &'a Gallery,
    device: Device,
    threads: usize,
    /// The embeddings of the gallery and their inverse lengths in GPU memory.
    kept: Option<(Tensor, Tensor)>,
}

impl<'a> Retriever<'a> {
    /// A retriever that computes on `device`. Work on the CPU uses `threads` threads.
    pub fn new(gallery: &'a Gallery, device: Device, threads: usize) -> Result<Self, RetrievalError> {
        let embeddings_gw = gallery.embeddings();
        let bytes = embeddings_gw.numel() * embeddings_gw.kind().elt_size_in_bytes();
        let keep = device.is_cuda() && bytes <= KEPT_BYTES_MAX;
        let kept = if keep {
            Some((embeddings_gw.f_to_device(device)?, gallery.inverse_lengths().f_to_device(device)?))
        } else {
            None
        };
        Ok(Self { gallery, device, threads: threads.max(1), kept })
    }

    /// The gallery that queries are compared with.
    pub fn gallery(&self) -> &'a Gallery {
        self.gallery
    }

    /// Number of threads for work on the CPU.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Scores `queries`, `[images, width]`. For each query, returns the best `top` gallery points, and the logits of
    /// the gallery points that `wanted` requests. The indices in `wanted` must be ascending. The logits of points that
    /// `excluded` leaves out are -∞, and these points are not among the best.
    pub fn score(
        &self,
        queries: &Tensor,
        wanted: &[Vec<u32>],
        top: usize,
        excluded: Option<Exclusion<'_>>,
    ) -> Result<Vec<Scored>, RetrievalError> {
        let (images, width) = (wanted.len() as i64, self.gallery.width() as i64);
        if queries.size() != [images, width] {
            let (got, want) = (format!("{:?}", queries.size()), format!("[{images}, {width}]"));
            return Err(RetrievalError::Shape { what: "queries", got, want });
        }
        let size = TileSize::for_device(self.device);
        let mut scored = Vec::with_capacity(wanted.len());
        let index = self.gallery.index();
        for (first, wanted) in (0..).step_by(size.images).zip(wanted.chunks(size.images)) {
            let tile_iw = padded(queries.f_narrow(0, first as i64, wanted.len() as i64)?, size.images)?;
            // The points are listed for one tile at a time, because a large radius contains many of them.
            let hidden = excluded.map_or_else(Vec::new, |excluded| {
                let Exclusion { radius, truths } = excluded.of_photos(first, wanted.len());
                in_parallel(self.threads, truths, |truth| index.within(*truth, radius))
            });
            scored.extend(self.score_tile(&tile_iw.f_to_device(self.device)?, (wanted, &hidden), top, size)?);
        }
        Ok(scored)
    }

    fn score_tile(
        &self,
        queries_iw: &Tensor,
        (wanted, hidden): (&[Vec<u32>], &[Vec<u32>]),
        top: usize,
        size: TileSize,
    ) -> Result<Vec<Scored>, RetrievalError> {
        let points = self.gallery.points().len();
        let tiles: Vec<Range<usize>> =
            (0..points).step_by(size.points).map(|first| first..(first + size.points).min(points)).collect();
        let parts = Mutex::new(Vec::new());
        let kept = self.kept.as_ref().map(|(embeddings_gw, inverse_lengths_g)| (embeddings_gw, inverse_lengths_g));
        let (embeddings_gw, inverse_lengths_g) =
            kept.unwrap_or((self.gallery.embeddings(), self.gallery.inverse_lengths()));
        let share = || Question {
            queries_iw: queries_iw.shallow_clone(),
            embeddings_gw: embeddings_gw.shallow_clone(),
            inverse_lengths_g: inverse_lengths_g.shallow_clone(),
            device: self.device,
            points: size.points,
        };
        let at_once = if self.device.is_cuda() { 1 } else { self.threads };
        for_each_tile(at_once, tiles, share, |question: &Question, range: Range<usize>| {
            let part = question.score(&range, (wanted, hidden), top)?;
            parts.lock().unwrap_or_else(PoisonError::into_inner).push((range.start, part));
            Ok::<(), RetrievalError>(())
        })?;
        let mut parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
        parts.sort_by_key(|(first, _)| *first);
        let mut scored = vec![Scored::default(); wanted.len()];
        for (_, part) in parts {
            for (all, one) in scored.iter_mut().zip(part) {
                all.logits.extend(one.logits);
                all.best.extend(one.best);
            }
        }
        for one in &mut scored {
            // Points with equal logits are in gallery order.
            let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            if one.best.len() > top {
                one.best.select_nth_unstable_by(top, order);
                one.best.truncate(top);
            }
            one.best.sort_unstable_by(order);
        }
        Ok(scored)
    }
}

/// The inputs of one thread. Each thread gets separate handles, because a tensor can be sent to another thread but not
/// shared between threads.
struct Question {
    queries_iw: Tensor,
    embeddings_gw: Tensor,
    inverse_lengths_g: Tensor,
    device: Device,
    points: usize,
}

impl Question {
    /// Scores the queries against one tile of the gallery. The logits of the points in `hidden` become -∞.
    fn score(
        &self,
        range: &Range<usize>,
        (wanted, hidden): (&[Vec<u32>], &[Vec<u32>]),
        top: usize,
    ) -> Result<Vec<Scored>, RetrievalError> {
        tch::no_grad(|| {
            let logits_ig = self.logits(range)?;
            let columns = logits_ig.size()[1] as usize;
            let flat = |lists: &[&[u32]]| -> Result<Tensor, RetrievalError> {
                let at = |(image, list): (usize, &&[u32])| -> Vec<i64> {
                    list.iter().map(|point| (image * columns + *point as usize - range.start) as i64).collect()
                };
                let places: Vec<i64> = lists.iter().enumerate().flat_map(at).collect();
                Ok(Tensor::f_from_slice(&places)?.f_to_device(self.device)?)
            };
            if hidden.iter().any(|points| !slice(points, range).is_empty()) {
                let places = flat(&hidden.iter().map(|points| slice(points, range)).collect::<Vec<_>>())?;
                let _ = logits_ig.f_view([-1])?.f_index_fill_(0, &places, f64::NEG_INFINITY)?;
            }
            let best = best_of(&logits_ig, range, wanted.len(), top)?;
            let slices: Vec<&[u32]> = wanted.iter().map(|wanted| slice(wanted, range)).collect();
            let values = logits_ig.f_view([-1])?.f_index_select(0, &flat(&slices)?)?.f_to_device(Device::Cpu)?;
            let mut values = Vec::<f32>::try_from(values)?.into_iter();
            let scored = best.into_iter().zip(slices).map(|(best, slice)| {
                let logits = values.by_ref().take(slice.len()).collect();
                Scored { best, logits }
            });
            Ok(scored.collect())
        })
    }

    /// The logits of the queries for one tile of the gallery, one row per query. On the CPU, the tile is padded, and
    /// the logits of padding are -∞.
    fn logits(&self, range: &Range<usize>) -> Result<Tensor, RetrievalError> {
        let (first, count) = (range.start as i64, range.len() as i64);
        let tile_gw = self.embeddings_gw.f_narrow(0, first, count)?.f_to_device(self.device)?.f_to_kind(Kind::Float)?;
        let inverse_g = self.inverse_lengths_g.f_narrow(0, first, count)?.f_to_device(self.device)?;
        if self.device.is_cuda() {
            return Ok(self.queries_iw.f_matmul(&tile_gw.f_tr()?)?.f_mul_(&inverse_g)?);
        }
        let (tile_gw, inverse_g) = (padded(tile_gw, self.points)?, padded(inverse_g, self.points)?);
        let logits_ig = self.queries_iw.f_matmul(&tile_gw.f_tr()?)?.f_mul_(&inverse_g)?;
        let _ = logits_ig.f_narrow(1, count, self.points as i64 - count)?.f_fill_(f64::NEG_INFINITY)?;
        Ok(logits_ig)
    }
}

/// Pads a tensor with rows of zeros up to `count` rows.
pub(super) fn padded(rows: Tensor, count: usize) -> Result<Tensor, tch::TchError> {
    let missing = count as i64 - rows.size()[0];
    if missing == 0 {
        return Ok(rows);
    }
    let sides = 2 * rows.dim();
    let mut pad = vec![0; sides];
    pad[sides - 1] = missing;
    rows.f_constant_pad_nd(pad)
}

/// The best `top` points of a tile for each of the first `images` queries, in any order, without points whose logit is
/// -∞. All further queries are padding.
fn best_of(
    logits_ig: &Tensor,
    range: &Range<usize>,
    images: usize,
    top: usize,
) -> Result<Vec<Vec<(u32, f32)>>, RetrievalError> {
    let count = top.min(range.len());
    if count == 0 {
        return Ok(vec![Vec::new(); images]);
    }
    let (values, places) =
        if count == 1 { logits_ig.f_max_dim(1, true)? } else { logits_ig.f_topk(count as i64, 1, true, false)? };
    let values = Vec::<f32>::try_from(values.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?)?;
    let places = Vec::<i64>::try_from(places.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?)?;
    let pair = |(place, value): (&i64, &f32)| ((range.start as i64 + place) as u32, *value);
    let rows = places.chunks_exact(count).zip(values.chunks_exact(count)).take(images);
    let is_shown = |(_, logit): &(u32, f32)| *logit > f32::NEG_INFINITY;
    Ok(rows.map(|(places, values)| places.iter().zip(values).map(pair).filter(is_shown).collect()).collect())
}

/// The part of `wanted` that lies in the tile `range`. `wanted` must be ascending.
fn slice<'w>(wanted: &'w [u32], range: &Range<usize>) -> &'w [u32] {
    let first = wanted.partition_point(|point| (*point as usize) < range.start);
    let end = wanted.partition_point(|point| (*point as usize) < range.end);
    &wanted[first..end]
}
