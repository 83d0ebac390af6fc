//! Modules of `locdiff` that are pure Rust, taken from where they live, for Miri.
#![allow(dead_code, reason = "only their tests are run")]

#[path = "../../../core/src/random/philox.rs"]
pub mod philox;
#[path = "../../../src/native/row_pool.rs"]
pub mod row_pool;
