//! What cannot be scored.

/// An error of [`crate::metrics`]: got and wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MetricsError(pub(super) String);

impl MetricsError {
    /// There is nothing to score.
    pub(super) fn no_answers() -> Self {
        Self("0 answers, wanted at least 1".into())
    }
}

/// More answers or resamples than random numbers have names for.
impl From<crate::random::RangeError> for MetricsError {
    fn from(error: crate::random::RangeError) -> Self {
        Self(error.to_string())
    }
}
