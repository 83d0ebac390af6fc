//! `locdiff-launch`: parses the command line, runs the verb, and exits with a documented code.

#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use locdiff_core::config::log_filter;
use locdiff_core::exit_code;
use locdiff_launch::cli::Cli;
use locdiff_launch::error::exit_code_of;
use locdiff_launch::output::Output;
use locdiff_launch::progress::LogWriter;
use locdiff_launch::verbs;
use serde_json::json;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    let cli = match Cli::try_parse().and_then(Cli::validate) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(LogWriter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .finish()
        .with(log_filter())
        .init();
    let output = Output { json: cli.global.json };
    match verbs::run(&cli, output) {
        Ok(result) => {
            output.result(&result);
            exit_code::ExitCode::Success.into()
        }
        Err(error) => fail(output, exit_code_of(&error), &format!("{error:#}")),
    }
}

/// Prints help to stdout and returns code 0, or prints a usage error to stderr and returns code 2. With `--json`, the
/// JSON result on stdout also contains the usage error.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return exit_code::ExitCode::Success.into();
    }
    let output = Output { json: std::env::args_os().any(|argument| argument == "--json") };
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    fail(output, exit_code::ExitCode::Usage, text)
}

/// Prints the error and returns its exit code. With `--json`, also prints the error as the JSON result, except for the
/// code `NotReady`: in this case `doctor` has already printed its JSON result.
fn fail(output: Output, code: exit_code::ExitCode, text: &str) -> ExitCode {
    output.error(text);
    if code != exit_code::ExitCode::NotReady {
        output.result(&json!({ "ok": false, "exit_code": code.code(), "error": text }));
    }
    code.into()
}
