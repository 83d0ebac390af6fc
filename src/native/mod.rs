//! The C++ shim over libtorch and its safe Rust face. The only unsafe code of the project.
//!
//! Every function of the shim has a C ABI and catches all C++ exceptions; none unwinds into Rust.

pub mod autograd;
pub mod c10d;
mod c10d_store;
mod error;
mod version;

pub use c10d_store::Store;
pub use error::NativeError;
pub use version::{Versions, versions};
