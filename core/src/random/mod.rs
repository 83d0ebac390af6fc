//! Random numbers that are a function of where they are used, not of when they are drawn.

#[allow(unsafe_code, reason = "one call of a function that is compiled for AVX2, after asking the processor for it")]
mod philox;

pub use philox::{Draw, Philox, RangeError, STEP_END, Stream, mask_threshold, some_integers, within};
