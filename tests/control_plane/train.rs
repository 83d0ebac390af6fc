//! Tests of `train` through the command line, with real workers and real shards. Some tests kill workers.

mod board;
mod equality;
mod hangs;
mod long;
mod refusals;
mod support;
