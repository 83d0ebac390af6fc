//! `eval` from the command line to the result table, with real workers and a small model on small shards.

mod after_train;
mod data;
mod equality;
mod heads;
mod predictions;
mod refusals;
mod support;
