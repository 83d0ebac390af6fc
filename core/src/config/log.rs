//! The environment variable `LOCDIFF_LOG`: the log filter of both programs.
//!
//! The filter consists of targets and levels only (`debug`, `locdiff_launch=trace,info`). Filters on fields and spans
//! are not supported, because they would need a regular-expression engine.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The filter in `LOCDIFF_LOG`; `info` if the variable is unset or invalid.
pub fn log_filter() -> Targets {
    parse(std::env::var("LOCDIFF_LOG").ok().as_deref())
}

fn parse(text: Option<&str>) -> Targets {
    let filter = text.filter(|text| !text.trim().is_empty()).and_then(|text| text.parse().ok());
    filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::parse;

    #[test]
    fn targets_and_levels_are_accepted_and_anything_else_means_info() {
        for text in [None, Some(""), Some("locdiff=loud"), Some("info")] {
            let filter = parse(text);
            assert!(filter.would_enable("locdiff::train", &Level::INFO), "{text:?}");
            assert!(!filter.would_enable("locdiff::train", &Level::DEBUG), "{text:?}");
        }
        assert!(parse(Some("debug")).would_enable("locdiff::train", &Level::DEBUG));
        let filter = parse(Some("warn,locdiff_launch=trace"));
        assert!(filter.would_enable("locdiff_launch::supervisor", &Level::TRACE));
        assert!(!filter.would_enable("locdiff::train", &Level::INFO));
    }
}
