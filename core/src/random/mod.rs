//! Counter-based random numbers: each number depends on where it is used, not on when it is drawn.

#[allow(unsafe_code, reason = "one call of a function compiled for AVX2, after checking that the processor has it")]
mod philox;

pub use philox::{Draw, Philox, RangeError, STEP_END, Stream, check_below, check_int_bound, mask_threshold};
