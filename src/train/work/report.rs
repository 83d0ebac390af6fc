//! The numbers that a step computes for the host.

use tch::Tensor;

/// The losses of this rank's rows, before the reduction over ranks.
#[derive(Debug)]
pub(in crate::train) struct LocalLosses {
    /// Six f64 values. The first five are the losses in a [`Report`], each summed over this rank's rows and divided by
    /// the number of rows of the global batch. The sixth is this rank's encoded requests.
    pub(super) sums: Tensor,
    /// With autograd, the last six values of the [`Report`]. With the explicit engine, a tensor for all values of the
    /// [`Report`], in which only the last six are set so far.
    pub(super) last: Tensor,
}

/// The results of a step, as f64 values.
#[derive(Debug)]
pub(in crate::train) struct Report {
    /// In this order:
    /// - five mean losses over the global batch: total, KL, L2, L1, cosine,
    /// - the sum of the encoded requests of all ranks ([`Requests`](super::Requests)),
    /// - the squared norm of the gradient,
    /// - six values of this rank's last micro-batch: the same five losses, and the largest finite logit
    ///   ([`Losses::largest`](crate::loss::Losses::largest)).
    pub(in crate::train) numbers: Tensor,
}

impl Report {
    /// Number of values.
    pub(in crate::train) const NUMBERS: i64 = 13;
}
