//! Training through the command line: real workers, real shards, real kills.

mod equality;
mod long;
mod refusals;
mod support;
