//! `eval` from the command line to the table: real launcher, real workers, a small model on small shards.

mod after_train;
mod data;
mod equality;
mod heads;
mod predictions;
mod refusals;
mod support;
