//! Tests of `train` through the command line, with real workers and real shards. Some tests kill workers.

mod alive;
mod board;
mod chaos;
mod corruption;
mod equality;
mod hangs;
mod head;
mod nodes;
mod partitions;
mod preempt;
mod refusals;
mod restarts;
mod status;
mod support;
