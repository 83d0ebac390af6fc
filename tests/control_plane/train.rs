//! Training through the command line, with real workers, real shards and real kills.

mod board;
mod equality;
mod long;
mod refusals;
mod support;
