//! Errors in the computation of metrics.

/// An error from [`crate::metrics`]. The message gives the value found and the values accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MetricsError(pub(super) String);

impl MetricsError {
    pub(super) fn no_answers() -> Self {
        Self("0 answers, wanted at least 1".into())
    }
}

/// This error occurs if there are more answers or resamples than the counter of the random numbers can address.
impl From<crate::random::RangeError> for MetricsError {
    fn from(error: crate::random::RangeError) -> Self {
        Self(error.to_string())
    }
}
