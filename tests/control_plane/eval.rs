//! Tests of `eval` from the command line to the results table, with real workers, a small model and small shards.

mod after_train;
mod beside_training;
mod data;
mod density;
mod equality;
mod hangs;
mod heads;
mod known_places;
mod predict;
mod predictions;
mod refusals;
mod report;
mod serve;
mod suites;
mod support;
