//! LocDiff's data plane: what one worker process does.
//!
//! In reading order:
//! - [`native`]: the C++ shim over libtorch and its safe face.

pub mod native;
