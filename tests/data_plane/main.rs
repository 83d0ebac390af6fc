//! Integration tests of the data plane.
#![allow(clippy::print_stdout, reason = "tests print what they measured")]

mod native_philox;
