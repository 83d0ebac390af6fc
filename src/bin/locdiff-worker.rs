//! `locdiff-worker`: the process of one rank. It connects to its launcher, runs one job and exits.
//!
//! The worker never outlives the launcher. It asks the kernel to kill it when the launcher dies, and it exits when the
//! control socket closes.

use std::process::ExitCode;

use locdiff::worker;
use locdiff_core::config::log_filter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(false)
        .finish()
        .with(log_filter())
        .init();
    worker::run().into()
}
