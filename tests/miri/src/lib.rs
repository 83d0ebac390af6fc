//! Compiles two pure Rust modules from their source files in the project, so that Miri can run their tests.
#![allow(dead_code, reason = "only the tests of the modules are run")]

#[path = "../../../core/src/random/philox.rs"]
pub mod philox;
#[path = "../../../src/native/row_pool.rs"]
pub mod row_pool;
