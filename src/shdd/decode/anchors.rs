//! Scores of fixed points (anchors). The score of an anchor is `code · Y(anchor)`, where Y is the vector of harmonics.
//! Scores are computed by matrix products over tiles. A tile holds the harmonics of some anchors.
//!
//! Memory: the harmonics of a million anchors at L = 47 take 4.6 GB even in 16 bits. They are therefore kept in memory
//! only if they do not exceed [`Budget::kept_bytes_max`]. Otherwise, every pass over the anchors computes all tiles
//! again, which takes a few microseconds per anchor. One pass handles many codes, so they share this cost.
//!
//! On CUDA, kept harmonics form one tile. The number of rows of a tile is padded to a multiple of [`TILE_MULTIPLE`],
//! because products of other sizes use the tensor cores poorly. Padding has the score −∞.
//!
//! [`Anchors::best`] and [`Anchors::scores`] need memory for the codes, the points and the kept harmonics. In addition,
//! they hold at most:
//! - two sets of scores: those of one tile and those collected so far.
//! - four buffers of the size of a tile: the harmonics as numbers and as a tensor, and the two factors of the product.
//!
//! Precision: on CUDA, scores are first computed in a coarse pass, which multiplies f16 numbers and sums in f32. Before
//! this pass, each code is divided by its largest value, so that no number overflows. Then the best [`CANDIDATES`]
//! anchors are rescored: a kernel computes their scores again from f32 harmonics, with sums in f64. Without rescoring,
//! the best anchor would often be wrong if anchors are close together. At L = 47 and 1 km between anchors, bf16 alone
//! is more than 1 km off for 87 % of clean codes.
//!
//! The coarse pass uses f16, not bf16. No harmonic exceeds √((2L+1)/4π), which is 2.75 at L = 47 and 9.02 at L = 511,
//! so bits of the mantissa matter more than bits of the exponent. At L = 47 and 1 km between anchors, the
//! best 64 anchors of a coarse pass in bf16 would not include the right anchor for 1 % of clean codes. The test
//! `decode_rescoring_finds_what_16_bits_miss` measures this percentage and the 87 % above.
//!
//! On the CPU, 16 bits are not faster, so the coarse pass uses f32 and no anchor is rescored.
//!
//! Invariant: the best anchors are ordered by score, and anchors with equal scores are ordered by index. If several
//! anchors have equal scores, libtorch's `topk` may return any of them. This module therefore takes at least
//! [`CANDIDATES`] anchors from `topk` and sorts them. The first of several anchors with equal scores is then found,
//! unless more than [`CANDIDATES`] anchors have that score, as in a gallery that repeats one place very often.

use std::ops::Range;

use locdiff_core::geo::{UnitVector, fibonacci_grid};
use tch::{Device, Kind, TchError, Tensor};

use super::best::{BestAnchors, PendingBest, check_bounds};
use super::columns::{largest_columns, numbers_needed};
use super::source::SourcePoints;
use crate::native::gemm::mm_f32;
use crate::shdd::{Basis, Filter, ShddError};

// Letters in tensor names: b codes, c coefficients (all, or those that a filter keeps), a anchors, k candidates.

/// For each code, at least this many anchors are sorted and, if the coarse pass is not exact, rescored.
pub const CANDIDATES: usize = 64;
/// The number of rows of a tile is padded to a multiple of this.
pub const TILE_MULTIPLE: usize = 128;

/// Number format of the coarse pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coarse {
    /// f16 factors, f32 sums.
    F16,
    /// f32 throughout.
    F32,
}

impl Coarse {
    /// The format in which the coarse pass is fastest on `device`.
    pub fn of(device: Device) -> Self {
        if device.is_cuda() { Self::F16 } else { Self::F32 }
    }

    fn kind(self) -> Kind {
        match self {
            Self::F16 => Kind::Half,
            Self::F32 => Kind::Float,
        }
    }
}

/// Memory limits of decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// The harmonics of all anchors are kept on the device if they take at most this many bytes.
    pub kept_bytes_max: usize,
    /// Maximum size of the f32 harmonics of one tile, bytes.
    pub tile_bytes: usize,
    /// Maximum size of the scores that are in memory at once, bytes.
    pub scores_bytes: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { kept_bytes_max: 1 << 30, tile_bytes: 64 << 20, scores_bytes: 256 << 20 }
    }
}

impl Budget {
    /// The limits that suit a device. On the CPU, tiles are so small that the allocator reuses their memory. For larger
    /// tiles, the operating system would map new memory each time, and clearing its pages would take as long as
    /// computing the harmonics.
    pub fn of(device: Device) -> Self {
        if device.is_cuda() {
            Self { scores_bytes: 1 << 30, ..Self::default() }
        } else {
            Self { tile_bytes: 8 << 20, ..Self::default() }
        }
    }
}

/// The points for which scores are computed, and their harmonics.
#[derive(Debug)]
pub struct Anchors {
    source: SourcePoints,
    coarse: Coarse,
    budget: Budget,
    kept_ac: Option<Tensor>,
    /// Added to the scores, f32 `[a]`; `None` if nothing is.
    added_a: Option<Tensor>,
}

/// The least number of grid points with which refinement reliably reaches the mode: 4 (L+1)².
///
/// The score of a clean code peaks at the place that it encodes. At an angular distance θ from that place, the score is
/// about 2·J₁(x)/x times the peak, where x = (L+1)·θ. The main lobe ends at x = 3.8, and positive side lobes reach 0.064
/// of the peak. The Hessian is negative definite up to x = 2.3.
///
/// On a Fibonacci grid of 4 (L+1)² points, every place has a grid point with x of at most 1.4. There, the score is at
/// least 0.77 of the peak. With `eval.refine`, the configuration does not accept fewer points for `eval.grid_points`.
pub fn grid_points_min(degree: u32) -> usize {
    locdiff_core::config::grid_points_min(degree) as usize
}

impl Anchors {
    /// Anchors at the given points, such as those of a gallery. They decode codes that have all dimensions. If `device`
    /// is a CUDA device, it must be the current device.
    pub fn new(
        basis: Basis,
        points: Vec<UnitVector>,
        device: Device,
        coarse: Coarse,
        budget: Budget,
    ) -> Result<Self, ShddError> {
        Self::filtered(basis, None, points, device, coarse, budget)
    }

    /// Like [`Anchors::new`], but for codes that hold only the dimensions that `filter` keeps.
    pub fn filtered(
        basis: Basis,
        filter: Option<Filter>,
        points: Vec<UnitVector>,
        device: Device,
        coarse: Coarse,
        budget: Budget,
    ) -> Result<Self, ShddError> {
        if points.is_empty() {
            return Err(ShddError::Bad("decoder: 0 anchors, wanted at least 1".to_owned()));
        }
        let source = SourcePoints::new(basis, points, filter, device)?;
        let mut anchors = Self { source, coarse, budget, kept_ac: None, added_a: None };
        let (count, dims) = (anchors.points().len(), anchors.dims());
        if count * dims * coarse.kind().elt_size_in_bytes() <= budget.kept_bytes_max {
            let rows = count.next_multiple_of(TILE_MULTIPLE) as i64;
            let kept_ac = Tensor::f_zeros([rows, dims as i64], (coarse.kind(), device))?;
            for range in anchors.tiles() {
                let mut rows = rows_of(&kept_ac, &range)?;
                rows.f_copy_(&anchors.source.tile(&range)?)?;
            }
            anchors.kept_ac = Some(kept_ac);
        }
        Ok(anchors)
    }

    /// Anchors on a uniform grid of `count` points. [`grid_points_min`] says how many points refinement needs.
    pub fn grid(basis: Basis, count: usize, device: Device) -> Result<Self, ShddError> {
        Self::new(basis, fibonacci_grid(count), device, Coarse::of(device), Budget::of(device))
    }

    /// Adds numbers to the scores that [`Self::best`] compares, one for each anchor.
    #[must_use = "the anchors are returned"]
    pub fn with_added(self, added: &[f32]) -> Result<Self, ShddError> {
        let (got, want) = (added.len(), self.points().len());
        if got != want {
            return Err(ShddError::Bad(format!("decoder: {got} numbers to add to the scores of {want} anchors")));
        }
        let added_a = Some(Tensor::f_from_slice(added)?.f_to_device(self.device())?);
        Ok(Self { added_a, ..self })
    }

    /// The points of the anchors.
    pub fn points(&self) -> &[UnitVector] {
        self.source.points()
    }

    /// The harmonics with which anchors are encoded.
    pub fn basis(&self) -> &Basis {
        self.source.basis()
    }

    /// The filter of the codes.
    pub fn filter(&self) -> Option<&Filter> {
        self.source.filter()
    }

    /// Number of dimensions of a code: (L+1)², or the number that the filter keeps.
    pub fn dims(&self) -> usize {
        self.source.dims()
    }

    /// The device on which scores are computed.
    pub fn device(&self) -> Device {
        self.source.device()
    }

    /// The `count` best anchors of each code in `codes_bc`.
    pub fn best(&self, codes_bc: &Tensor, count: usize) -> Result<BestAnchors, ShddError> {
        self.start_best(codes_bc, count)?.finish()
    }

    /// Like [`Anchors::best`], but the host does not wait for the device.
    pub fn start_best(&self, codes_bc: &Tensor, count: usize) -> Result<PendingBest, ShddError> {
        let (codes_bc, bounds_b) = self.bounded(codes_bc)?;
        let codes = codes_bc.size()[0] as usize;
        let wanted = count.max(CANDIDATES).min(self.points().len());
        let count = count.min(wanted);
        let columns = self.tile_rows().next_multiple_of(TILE_MULTIPLE);
        let per_pass = self.budget.scores_bytes / 4 / (columns + numbers_needed(columns, wanted));
        let passes = codes.div_ceil(per_pass.max(1)).max(1);
        let (mut scores, mut anchors) = (Vec::new(), Vec::new());
        for range in ranges(codes, codes.div_ceil(passes).max(1)) {
            let chunk_bc = rows_of(&codes_bc, &range)?;
            let (scores_bk, anchors_bk) = self.coarse_best(&chunk_bc, wanted)?;
            let (scores_bk, anchors_bk) = self.sorted(&chunk_bc, &scores_bk, &anchors_bk)?;
            scores.push(scores_bk.f_narrow(1, 0, count as i64)?);
            anchors.push(anchors_bk.f_narrow(1, 0, count as i64)?);
        }
        if scores.is_empty() {
            scores.push(Tensor::f_zeros([0, count as i64], (Kind::Float, self.device()))?);
            anchors.push(Tensor::f_zeros([0, count as i64], (Kind::Int64, self.device()))?);
        }
        let (scores_bk, anchors_bk) = (Tensor::f_cat(&scores, 0)?, Tensor::f_cat(&anchors, 0)?);
        PendingBest::new(&scores_bk, &anchors_bk, &bounds_b)
    }

    /// Number of codes whose scores over all anchors fit the budget. At least 1.
    pub fn codes_per_pass(&self) -> usize {
        (self.budget.scores_bytes / 4 / self.points().len()).max(1)
    }

    /// The scores of all anchors for each code, `[b, a]` in f32 on the CPU. To stay within the memory budget, pass at
    /// most [`codes_per_pass`](Self::codes_per_pass) codes. On CUDA, or if the coarse pass uses f16, the best
    /// [`CANDIDATES`] anchors of each code are rescored.
    pub fn scores(&self, codes_bc: &Tensor) -> Result<Tensor, ShddError> {
        let (codes_bc, bounds_b) = self.bounded(codes_bc)?;
        check_bounds(&bounds_b)?;
        let shape = [codes_bc.size()[0], self.points().len() as i64];
        let scores_ba = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
        let (narrow_bc, factor_b1) = self.narrowed(&codes_bc)?;
        for range in self.tiles() {
            let tile_ba = self.tile_scores(&narrow_bc, &range)?.f_narrow(1, 0, range.len() as i64)?;
            let tile_ba =
                factor_b1.as_ref().map_or(Ok(tile_ba.shallow_clone()), |factor_b1| tile_ba.f_mul(factor_b1))?;
            let columns = scores_ba.f_narrow(1, range.start as i64, range.len() as i64);
            columns?.f_copy_(&tile_ba)?;
        }
        if !self.rescores() {
            return Ok(scores_ba);
        }
        let candidates = CANDIDATES.min(self.points().len()) as i64;
        let (_, best_bk) = scores_ba.f_topk(candidates, 1, true, false)?;
        let fine_bk =
            self.source.scores_at(&codes_bc, &best_bk.f_to_device(self.device())?)?.f_to_device(Device::Cpu)?;
        Ok(scores_ba.f_scatter(1, &best_bk, &fine_bk)?)
    }

    /// The scores of all anchors for each code, `[b, a]` in f32 on the device. No anchor is rescored. Each result, to
    /// the last bit, depends only on the codes, if their number is always the same.
    pub fn coarse_scores(&self, codes_bc: &Tensor) -> Result<Tensor, ShddError> {
        let (codes_bc, bounds_b) = self.bounded(codes_bc)?;
        check_bounds(&bounds_b)?;
        let (narrow_bc, factor_b1) = self.narrowed(&codes_bc)?;
        let count = self.points().len() as i64;
        let scores_ba = match &self.kept_ac {
            // One product over all anchors: the factors of small products may be divided among threads.
            Some(kept_ac) => mm_f32(&narrow_bc, &kept_ac.f_tr()?)?.f_narrow(1, 0, count)?,
            None => {
                let tile = |range: Range<usize>| {
                    Ok(self.tile_scores(&narrow_bc, &range)?.f_narrow(1, 0, range.len() as i64)?)
                };
                Tensor::f_cat(&self.tiles().map(tile).collect::<Result<Vec<Tensor>, ShddError>>()?, 1)?
            }
        };
        Ok(factor_b1.map_or(Ok(scores_ba.shallow_clone()), |factor_b1| scores_ba.f_mul(&factor_b1))?)
    }

    /// The scores of the anchors `anchors_bk` for each code, computed from f32 harmonics. See
    /// [`SourcePoints::scores_at`].
    pub(super) fn scores_at(&self, codes_bc: &Tensor, anchors_bk: &Tensor) -> Result<Tensor, ShddError> {
        self.source.scores_at(codes_bc, anchors_bk)
    }

    /// Whether the best anchors are rescored. On CUDA, they are rescored even if the coarse pass uses f32, because the
    /// process may have enabled TF32.
    fn rescores(&self) -> bool {
        self.coarse != Coarse::F32 || self.device().is_cuda()
    }

    /// Number of anchors per tile. If the values of all anchors are kept on a GPU, there is only one tile. Otherwise,
    /// the number is computed from the size of whole codes, because the filter is applied after a tile is computed.
    fn tile_rows(&self) -> usize {
        let count = self.points().len();
        if self.kept_ac.is_some() && self.device().is_cuda() {
            return count;
        }
        let rows = self.budget.tile_bytes / 4 / self.basis().dims();
        let rows = if rows > TILE_MULTIPLE { rows - rows % TILE_MULTIPLE } else { rows };
        rows.clamp(1, count)
    }

    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        ranges(self.points().len(), self.tile_rows())
    }

    /// Converts codes to f32 on the device. For each code, also returns an upper bound of all its scores. The bound is
    /// not finite if the code is not finite or is so large that its scores could overflow.
    fn bounded(&self, codes_bc: &Tensor) -> Result<(Tensor, Tensor), ShddError> {
        let dims = self.dims();
        if codes_bc.dim() != 2 || codes_bc.size()[1] != dims as i64 {
            let got = codes_bc.size();
            return Err(ShddError::Bad(format!("decoder: codes have shape {got:?}, wanted [any, {dims}]")));
        }
        let codes_bc = codes_bc.f_detach()?.f_to_device(self.device())?.f_to_kind(Kind::Float)?;
        // The sum of a code's absolute values times `value_max` is an upper bound of all scores of the code and of
        // their partial sums.
        let sums_b = codes_bc.f_norm_scalaropt_dim(1.0, [1_i64].as_slice(), false)?;
        let bounds_b = sums_b.f_mul_scalar(self.basis().value_max())?;
        Ok((codes_bc, bounds_b))
    }

    /// Expands codes to whole codes in row-major order. Dimensions that the filter dropped are 0.
    pub fn whole_codes<T: tch::kind::Element>(&self, codes_bc: &Tensor) -> Result<Vec<T>, ShddError>
    where
        Vec<T>: TryFrom<Tensor, Error = TchError>,
    {
        self.source.whole_codes(codes_bc)
    }

    /// The codes in the format of the coarse pass. If the format is f16, each code is divided by its largest magnitude,
    /// and the largest magnitudes are returned too.
    fn narrowed(&self, codes_bc: &Tensor) -> Result<(Tensor, Option<Tensor>), ShddError> {
        if self.coarse == Coarse::F32 {
            return Ok((codes_bc.shallow_clone(), None));
        }
        let largest_b1 =
            codes_bc.f_abs()?.f_amax([1_i64].as_slice(), true)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
        Ok((codes_bc.f_div(&largest_b1)?.f_to_kind(self.coarse.kind())?, Some(largest_b1)))
    }

    /// The scores of the anchors in `range`, followed by those of the padding.
    fn tile_scores(&self, narrow_bc: &Tensor, range: &Range<usize>) -> Result<Tensor, ShddError> {
        let (count, columns) = (range.len() as i64, range.len().next_multiple_of(TILE_MULTIPLE) as i64);
        let tile_ac = match &self.kept_ac {
            Some(kept_ac) if range.start as i64 + columns <= kept_ac.size()[0] => {
                kept_ac.f_narrow(0, range.start as i64, columns)?
            }
            Some(kept_ac) => rows_of(kept_ac, range)?.f_constant_pad_nd([0, 0, 0, columns - count])?,
            None => {
                self.source.tile(range)?.f_to_kind(self.coarse.kind())?.f_constant_pad_nd([0, 0, 0, columns - count])?
            }
        };
        let scores_ba = mm_f32(narrow_bc, &tile_ac.f_tr()?)?;
        let _ = scores_ba.f_narrow(1, count, columns - count)?.f_fill_(f64::NEG_INFINITY)?;
        Ok(scores_ba)
    }

    /// For each code, the coarse scores and the indices of the best `count` anchors. The best anchors of each tile are
    /// merged with the best anchors of the earlier tiles. If the coarse pass uses f16, the scores of each code are
    /// divided by the largest absolute value in the code.
    fn coarse_best(&self, codes_bc: &Tensor, count: usize) -> Result<(Tensor, Tensor), ShddError> {
        let (narrow_bc, factor_b1) = self.narrowed(codes_bc)?;
        let mut best: Option<(Tensor, Tensor)> = None;
        for range in self.tiles() {
            let tile_ba = self.tile_scores(&narrow_bc, &range)?;
            self.add_to_tile(&tile_ba, factor_b1.as_ref(), &range)?;
            let (scores_bk, positions_bk) = largest_columns(&tile_ba, count.min(range.len()))?;
            let anchors_bk = positions_bk.f_add_scalar(range.start as i64)?;
            let Some((old_scores, old_anchors)) = &best else {
                best = Some((scores_bk, anchors_bk));
                continue;
            };
            let scores_bk = Tensor::f_cat(&[old_scores, &scores_bk], 1)?;
            let anchors_bk = Tensor::f_cat(&[old_anchors, &anchors_bk], 1)?;
            let (scores_bk, chosen_bk) = scores_bk.f_topk((count as i64).min(scores_bk.size()[1]), 1, true, false)?;
            best = Some((scores_bk, anchors_bk.f_gather(1, &chosen_bk, false)?));
        }
        let (scores_bk, anchors_bk) = best.expect("there is at least one anchor, so at least one tile");
        // If a code is not finite, real scores may be −∞, and padding may be among the best.
        Ok((scores_bk, anchors_bk.f_clamp_max(self.points().len() as i64 - 1)?))
    }

    /// Adds the numbers of [`Self::with_added`] to the scores of a tile. If the scores of each code are divided by a
    /// factor, so are the numbers.
    fn add_to_tile(&self, tile_ba: &Tensor, factor_b1: Option<&Tensor>, range: &Range<usize>) -> Result<(), TchError> {
        let Some(added_a) = &self.added_a else { return Ok(()) };
        let added_1a = rows_of(added_a, range)?.f_unsqueeze(0)?;
        let mut own_ba = tile_ba.f_narrow(1, 0, range.len() as i64)?;
        match factor_b1 {
            Some(factor_b1) => own_ba.f_addcdiv_(&added_1a, factor_b1).map(drop),
            None => own_ba.f_add_(&added_1a).map(drop),
        }
    }

    /// Rescores the candidates if necessary, and sorts them by score and then by index.
    fn sorted(
        &self,
        codes_bc: &Tensor,
        scores_bk: &Tensor,
        anchors_bk: &Tensor,
    ) -> Result<(Tensor, Tensor), ShddError> {
        let (anchors_bk, order_bk) = anchors_bk.f_sort(1, false)?;
        let scores_bk = match (self.rescores(), &self.added_a) {
            (false, _) => scores_bk.f_gather(1, &order_bk, false)?,
            (true, None) => self.source.scores_at(codes_bc, &anchors_bk)?,
            (true, Some(added_a)) => {
                let added_bk = added_a.f_index_select(0, &anchors_bk.f_flatten(0, 1)?)?.f_view_as(&anchors_bk)?;
                self.source.scores_at(codes_bc, &anchors_bk)?.f_add(&added_bk)?
            }
        };
        let (scores_bk, order_bk) = scores_bk.f_sort_stable(true, 1, true)?;
        Ok((scores_bk, anchors_bk.f_gather(1, &order_bk, false)?))
    }
}

/// Splits `0..count` into ranges of length `size`. The last range may be shorter.
pub(super) fn ranges(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..(start + size).min(count))
}

/// A view of some rows of a matrix.
pub(super) fn rows_of(matrix: &Tensor, range: &Range<usize>) -> Result<Tensor, TchError> {
    matrix.f_narrow(0, range.start as i64, range.len() as i64)
}
