//! Counter-based random numbers. Each number depends only on the seed and on the number's own position (stream, step,
//! sample, element), not on the numbers drawn before it.

#[allow(unsafe_code, reason = "one call of a function compiled for AVX2, after a check that the processor has AVX2")]
mod philox;
mod splitmix;

pub use philox::{Draw, Philox, RangeError, STEP_END, Stream, check_below, check_int_bound, mask_threshold};
pub use splitmix::{SPLITMIX_INCREMENT, splitmix};
