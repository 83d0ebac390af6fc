//! `locdiff-worker`: one rank. Reports to its launcher, does one job, ends.
//!
//! It never outlives the launcher: it asks the kernel for SIGKILL at the launcher's death, and ends when the control socket
//! closes.

use std::process::ExitCode;

use locdiff::worker;

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCDIFF_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .without_time()
        .with_ansi(false)
        .init();
    worker::run().into()
}
