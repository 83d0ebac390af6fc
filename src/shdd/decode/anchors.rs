//! Scores of fixed points: `code · Y(anchor)` by matrix products over tiles of anchors.
//!
//! Memory: a million anchors at L = 47 are 4.6 GB even in 16 bits. Their harmonics are therefore kept only where they fit
//! [`Budget::kept_bytes_max`]; otherwise each tile is computed anew for each pass, at a few microseconds per anchor, which a
//! pass over many codes pays once. The most that a call holds beside its codes: points, kept harmonics, scores twice (one tile
//! and what is collected), and a tile four times: as computed, as a tensor, and both factors of a product or of a rescoring.
//!
//! Precision: on CUDA the coarse pass multiplies f16 factors with sums in f32, after each code has been divided by its largest
//! value so that none overflows. 16 bits alone pick a wrong point of a dense gallery (at L = 47 and 1 km between points bf16 is
//! over 1 km off for 87 % of clean codes), so the best [`CANDIDATES`] are rescored in f32 by products and sums outside the
//! matrix units, where no setting can turn them into TF32. f16 and not bf16: harmonics lie within √((2L+1)/4π), 2.8 at L = 47
//! and 9.1 at L = 511, so that bits of mantissa are worth more than bits of exponent, and the best 64 by bf16 lack the right
//! point in 1 % of those cases. On the CPU, where 16 bits are no faster, the coarse pass is in f32 already and is the last word.
//! (`decode_rescored_finds_what_16_bits_miss` has the figures.)
//!
//! Invariant: the best come in the order of score, then of index. libtorch's `topk` says nothing about equal scores, so that at
//! least [`CANDIDATES`] are taken from it and put in order here: of anchors with equal scores the first wins, unless so many
//! are equal that they fill the candidates (a gallery with one place more than 64 times).

use std::ops::Range;

use locdiff_core::geo::{UnitVector, fibonacci_grid};
use tch::{Device, Kind, TchError, Tensor};

use super::source::{Source, flat};
use crate::native::gemm::mm_f32;
use crate::shdd::{Basis, Filter, ShddError};

// b codes · c coefficients, (L+1)² or those that a filter keeps · a anchors · k candidates

/// Anchors that are put in order, and after a pass in 16 bits rescored in f32.
pub const CANDIDATES: usize = 64;
/// Why a code is refused.
const NOT_FINITE: &str = "has a value that is NaN, infinite or too large for scores in f32";

/// Numbers of the coarse pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coarse {
    /// f16 factors, f32 sums.
    F16,
    /// f32 throughout.
    F32,
}

impl Coarse {
    /// What is fastest there.
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

/// How much memory decoding may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Harmonics of all anchors are kept on the device if they need no more.
    pub kept_bytes_max: usize,
    /// Harmonics of one tile in f32.
    pub tile_bytes: usize,
    /// Scores that are held at once.
    pub scores_bytes: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { kept_bytes_max: 1 << 30, tile_bytes: 64 << 20, scores_bytes: 256 << 20 }
    }
}

impl Budget {
    /// What suits a device. On the CPU tiles are small enough for the allocator to hand out the same memory again: larger ones
    /// are mapped anew for every tile, and the kernel's clearing of their pages takes as long as the harmonics.
    pub fn of(device: Device) -> Self {
        if device.is_cuda() { Self::default() } else { Self { tile_bytes: 8 << 20, ..Self::default() } }
    }
}

/// The best anchors of each code, best first.
#[derive(Debug, Clone, PartialEq)]
pub struct Best {
    /// Anchors and their scores, for one code after another.
    pub rows: Vec<Vec<(usize, f32)>>,
}

/// Points that codes are compared with.
#[derive(Debug)]
pub struct Anchors {
    source: Source,
    coarse: Coarse,
    budget: Budget,
    kept_ac: Option<Tensor>,
}

/// Grid points from which refinement reaches the mode: 4 (L+1)².
///
/// The score of a clean code falls off as 2 J₁(x)/x in x = (L+1)·angle: the main lobe ends at x = 3.8, the Hessian stays
/// negative definite to 2.3, side lobes reach 0.064. With 4 (L+1)² Fibonacci points the nearest is within x = 1.4 of any place,
/// where the score is still 0.77 of the peak. The configuration holds `eval.grid_points` to the same number.
pub fn grid_points_min(degree: u32) -> usize {
    locdiff_core::config::grid_points_min(degree) as usize
}

impl Anchors {
    /// Any points, such as a gallery, for whole codes. A CUDA device must be the current one.
    pub fn new(
        basis: Basis,
        points: Vec<UnitVector>,
        device: Device,
        coarse: Coarse,
        budget: Budget,
    ) -> Result<Self, ShddError> {
        Self::filtered(basis, None, points, device, coarse, budget)
    }

    /// The same for codes of which a filter keeps some dimensions.
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
        let source = Source::new(basis, points, filter, device)?;
        let mut anchors = Self { source, coarse, budget, kept_ac: None };
        let (count, dims) = (anchors.points().len(), anchors.dims());
        if count * dims * coarse.kind().elt_size_in_bytes() <= budget.kept_bytes_max {
            let kept_ac = Tensor::f_empty([count as i64, dims as i64], (coarse.kind(), device))?;
            for range in anchors.tiles() {
                let mut rows = rows_of(&kept_ac, &range)?;
                rows.f_copy_(&anchors.source.tile(&range)?)?;
            }
            anchors.kept_ac = Some(kept_ac);
        }
        Ok(anchors)
    }

    /// An even grid; see [`grid_points_min`] for how fine it must be.
    pub fn grid(basis: Basis, count: usize, device: Device) -> Result<Self, ShddError> {
        Self::new(basis, fibonacci_grid(count), device, Coarse::of(device), Budget::of(device))
    }

    /// The anchors.
    pub fn points(&self) -> &[UnitVector] {
        self.source.points()
    }

    /// The harmonics.
    pub fn basis(&self) -> &Basis {
        self.source.basis()
    }

    /// Numbers of a code: (L+1)², or those that the filter keeps.
    pub fn dims(&self) -> usize {
        self.source.dims()
    }

    /// Where scores are computed.
    pub fn device(&self) -> Device {
        self.source.device()
    }

    /// The `count` best anchors of each code in `codes_bc`.
    pub fn best(&self, codes_bc: &Tensor, count: usize) -> Result<Best, ShddError> {
        let codes_bc = self.checked(codes_bc)?;
        let wanted = count.max(CANDIDATES).min(self.points().len());
        let per_chunk = (self.budget.scores_bytes / 4 / (self.tile_rows() + 2 * wanted)).max(1);
        let mut rows = Vec::new();
        for range in ranges(codes_bc.size()[0] as usize, per_chunk) {
            let chunk_bc = rows_of(&codes_bc, &range)?;
            let (scores_bk, anchors_bk) = self.coarse_best(&chunk_bc, wanted)?;
            rows.extend(self.sorted(&chunk_bc, &scores_bk, &anchors_bk, count)?);
        }
        Ok(Best { rows })
    }

    /// Codes whose scores over all anchors fit the budget.
    pub fn codes_per_pass(&self) -> usize {
        (self.budget.scores_bytes / 4 / self.points().len()).max(1)
    }

    /// The scores of all anchors, `[b, a]` in f32 on the CPU, for at most [`codes_per_pass`](Self::codes_per_pass) codes, or a
    /// few more. After a pass in 16 bits the best [`CANDIDATES`] of each code have their f32 scores.
    pub fn scores(&self, codes_bc: &Tensor) -> Result<Tensor, ShddError> {
        let codes_bc = self.checked(codes_bc)?;
        let shape = [codes_bc.size()[0], self.points().len() as i64];
        let scores_ba = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
        for range in self.tiles() {
            let tile_ba = self.tile_scores(&codes_bc, &range)?;
            let columns = scores_ba.f_narrow(1, range.start as i64, range.len() as i64);
            columns?.f_copy_(&tile_ba)?;
        }
        if !self.rescores() {
            return Ok(scores_ba);
        }
        let candidates = CANDIDATES.min(self.points().len()) as i64;
        let (_, best_bk) = scores_ba.f_topk(candidates, 1, true, false)?;
        let fine_bk = self.rescored(&codes_bc, &best_bk)?.f_to_device(Device::Cpu)?;
        Ok(scores_ba.f_scatter(1, &best_bk, &fine_bk)?)
    }

    /// A coarse pass on CUDA is never the last word, not even in f32: TF32 may be switched on for the whole process.
    fn rescores(&self) -> bool {
        self.coarse != Coarse::F32 || self.device().is_cuda()
    }

    /// By the size of whole codes: a filter is applied to a tile of them.
    fn tile_rows(&self) -> usize {
        (self.budget.tile_bytes / 4 / self.basis().dims()).clamp(1, self.points().len())
    }

    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        ranges(self.points().len(), self.tile_rows())
    }

    /// Codes as f32 on the device, each of them finite and small enough for scores to be.
    fn checked(&self, codes_bc: &Tensor) -> Result<Tensor, ShddError> {
        let dims = self.dims();
        if codes_bc.dim() != 2 || codes_bc.size()[1] != dims as i64 {
            let got = codes_bc.size();
            return Err(ShddError::Bad(format!("decoder: codes have shape {got:?}, wanted [.., {dims}]")));
        }
        let codes_bc = codes_bc.f_detach()?.f_to_device(self.device())?.f_to_kind(Kind::Float)?;
        // No score and no part of its sum is larger than this, and what is not finite makes it so.
        let most_b = codes_bc.f_abs()?.f_sum_dim_intlist([1_i64].as_slice(), false, Kind::Float)?;
        let finite_b = most_b.f_mul_scalar(self.basis().value_max())?.f_isfinite()?.f_to_device(Device::Cpu)?;
        let finite: Vec<bool> = Vec::try_from(&finite_b)?;
        match finite.iter().position(|finite| !finite) {
            Some(row) => Err(ShddError::Bad(format!("decoder: row {row}: the code {NOT_FINITE}"))),
            None => Ok(codes_bc),
        }
    }

    /// Codes as whole ones in f64, row after row: where refinement begins.
    pub(in crate::shdd) fn lifted(&self, codes_bc: &Tensor) -> Result<Vec<f64>, ShddError> {
        self.source.lifted(codes_bc)
    }

    fn tile_scores(&self, codes_bc: &Tensor, range: &Range<usize>) -> Result<Tensor, ShddError> {
        let tile_ac = match &self.kept_ac {
            Some(kept_ac) => rows_of(kept_ac, range)?,
            None => self.source.tile(range)?.f_to_kind(self.coarse.kind())?,
        };
        let tile_ca = tile_ac.f_tr()?;
        if self.coarse == Coarse::F32 {
            return Ok(mm_f32(codes_bc, &tile_ca)?);
        }
        let largest_b1 =
            codes_bc.f_abs()?.f_amax([1_i64].as_slice(), true)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
        let narrow_bc = codes_bc.f_div(&largest_b1)?.f_to_kind(self.coarse.kind())?;
        Ok(mm_f32(&narrow_bc, &tile_ca)?.f_mul_(&largest_b1)?)
    }

    /// Scores and indices of the best `count`, tile after tile.
    fn coarse_best(&self, codes_bc: &Tensor, count: usize) -> Result<(Tensor, Tensor), ShddError> {
        let mut best: Option<(Tensor, Tensor)> = None;
        for range in self.tiles() {
            let tile_ba = self.tile_scores(codes_bc, &range)?;
            let (scores_bk, places_bk) = tile_ba.f_topk(count.min(range.len()) as i64, 1, true, true)?;
            let anchors_bk = places_bk.f_add_scalar(range.start as i64)?;
            let Some((old_scores, old_anchors)) = &best else {
                best = Some((scores_bk, anchors_bk));
                continue;
            };
            let scores_bk = Tensor::f_cat(&[old_scores, &scores_bk], 1)?;
            let anchors_bk = Tensor::f_cat(&[old_anchors, &anchors_bk], 1)?;
            let (scores_bk, chosen_bk) = scores_bk.f_topk((count as i64).min(scores_bk.size()[1]), 1, true, true)?;
            best = Some((scores_bk, anchors_bk.f_gather(1, &chosen_bk, false)?));
        }
        Ok(best.expect("there is at least one anchor, so at least one tile"))
    }

    /// f32 scores of the candidates `anchors_bk`.
    fn rescored(&self, codes_bc: &Tensor, anchors_bk: &Tensor) -> Result<Tensor, ShddError> {
        let candidates = anchors_bk.size()[1] as usize;
        let per_chunk = (self.budget.tile_bytes / 4 / self.basis().dims() / candidates).max(1);
        let mut chunks = Vec::new();
        for range in ranges(codes_bc.size()[0] as usize, per_chunk) {
            let harmonics = self.source.rows(&rows_of(anchors_bk, &range)?)?;
            let shape = [range.len() as i64, candidates as i64, self.dims() as i64];
            let codes_b1c = rows_of(codes_bc, &range)?.f_unsqueeze(1)?;
            let product_bkc = harmonics.f_view(shape)?.f_mul_(&codes_b1c)?;
            chunks.push(product_bkc.f_sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float)?);
        }
        Ok(Tensor::f_cat(&chunks, 0)?)
    }

    fn sorted(
        &self,
        codes_bc: &Tensor,
        scores_bk: &Tensor,
        anchors_bk: &Tensor,
        count: usize,
    ) -> Result<Vec<Vec<(usize, f32)>>, ShddError> {
        let fine_bk;
        let scores_bk = if self.rescores() {
            fine_bk = self.rescored(codes_bc, anchors_bk)?;
            &fine_bk
        } else {
            scores_bk
        };
        let width = anchors_bk.size()[1] as usize;
        let scores: Vec<f32> = flat(scores_bk)?;
        let anchors: Vec<i64> = flat(anchors_bk)?;
        let row = |(scores, anchors): (&[f32], &[i64])| {
            let mut row: Vec<(usize, f32)> =
                anchors.iter().zip(scores).map(|(anchor, score)| (*anchor as usize, *score)).collect();
            row.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
            row.truncate(count);
            row
        };
        Ok(scores.chunks_exact(width).zip(anchors.chunks_exact(width)).map(row).collect())
    }
}

/// `0..count` in pieces of `size`.
pub(super) fn ranges(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..(start + size).min(count))
}

/// Rows of a matrix, as a view.
pub(super) fn rows_of(matrix: &Tensor, range: &Range<usize>) -> Result<Tensor, TchError> {
    matrix.f_narrow(0, range.start as i64, range.len() as i64)
}
