//! Tests of `train` through the command line, with real workers and real shards. Some tests kill workers.

mod board;
mod corruption;
mod equality;
mod hangs;
mod long;
mod preempt;
mod refusals;
mod support;
