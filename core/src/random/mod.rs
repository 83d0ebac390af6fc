//! Counter-based random numbers: each number is a function of the seed and its position (stream, step, sample,
//! element), not of the numbers drawn before it.

#[allow(unsafe_code, reason = "one call of a function compiled for AVX2, after a check that the processor has AVX2")]
mod philox;

pub use philox::{Draw, Philox, RangeError, STEP_END, Stream, check_below, check_int_bound, mask_threshold};
