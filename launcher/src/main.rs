//! `locdiff-launch`: parses the command line, runs the verb, and exits with a documented code.

#![forbid(unsafe_code)]

use std::backtrace::Backtrace;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use locdiff_core::config::log_filter;
use locdiff_core::exit_code;
use locdiff_launch::cli::Cli;
use locdiff_launch::output::{Output, end_process, finish};
use locdiff_launch::terminal::{self, LogFormat, LogWriter};
use locdiff_launch::verbs;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Longest time that a panicking thread waits for its message to be written to stderr.
const PANIC_LIMIT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // The standard hook writes to stderr directly, so it would wait forever if nobody reads stderr.
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let (name, trace) = (thread.name().unwrap_or("unnamed"), Backtrace::capture());
        terminal::write_stderr(format!("thread '{name}' {panic}\n{trace}\n"));
        terminal::flush_stderr(PANIC_LIMIT);
    }));
    if std::env::args_os().len() == 1 {
        let _ = Cli::command().print_help();
        return exit_code::ExitCode::Success.into();
    }
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let cli = match Cli::try_parse().and_then(|cli| cli.validate(words)) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(LogWriter)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(LogFormat)
        .finish()
        .with(log_filter())
        .init();
    let output = Output::of_process(cli.global.json);
    match verbs::run(&cli, output) {
        Ok(result) => {
            output.result(&result);
            finish(exit_code::ExitCode::Success).into()
        }
        Err(error) => end_process(&error),
    }
}

/// Prints help to stdout and returns code 0, or prints a usage error to stderr and returns code 2. With `--json`, the
/// JSON result on stdout also contains the usage error.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return exit_code::ExitCode::Success.into();
    }
    let output = Output::of_process(std::env::args_os().any(|argument| argument == "--json"));
    let text = error.to_string();
    output.fail(exit_code::ExitCode::Usage, text.strip_prefix("error: ").unwrap_or(&text).trim_end());
    finish(exit_code::ExitCode::Usage).into()
}
