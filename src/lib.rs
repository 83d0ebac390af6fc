//! LocDiff's data plane: what one worker process does.
//!
//! In reading order:
//! - [`native`]: the C++ shim over libtorch and its safe face.
//! - [`comm`]: process groups, collectives with timeouts, the data × tensor layout, gradient buckets.

pub mod comm;
pub mod native;
