//! Training through the command line: real workers, real shards, real kills.

mod board;
mod equality;
mod long;
mod refusals;
mod support;
