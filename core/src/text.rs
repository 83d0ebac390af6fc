//! Helpers for messages: readable durations, similar names.

/// A readable duration, such as "40 s", "12 min" or "3.5 h".
pub fn duration_text(seconds: f64) -> String {
    match seconds {
        _ if seconds < 90.0 => format!("{seconds:.0} s"),
        _ if seconds < 5400.0 => format!("{:.0} min", seconds / 60.0),
        _ if seconds < 48.0 * 3600.0 => format!("{:.1} h", seconds / 3600.0),
        _ => format!("{:.0} days", seconds / 86_400.0),
    }
}

/// Training that takes longer than this many seconds is probably a mistake.
const LONG_TRAINING_S: f64 = 48.0 * 3600.0;

/// Describes how long training takes, such as "about 3.5 h for 40000 steps". The description begins with `qualifier`,
/// here "about". Also returns whether the time is very long. If it is, the description ends with advice.
pub fn training_time(qualifier: &str, seconds: f64, steps: u64) -> (String, bool) {
    let is_long = seconds > LONG_TRAINING_S;
    let advice = if is_long { "; use a smaller model (`--config demo`), or lower train.steps" } else { "" };
    (format!("{qualifier} {} for {steps} steps{advice}", duration_text(seconds)), is_long)
}

/// How similar a known name is to `name`, ignoring case. If `name` abbreviates the known name, as `val` abbreviates
/// `validation`, the similarity is above 1. Otherwise, it is between 0 and 1.
pub(crate) fn similarity(known: &str, name: &str) -> f64 {
    let (known, name) = (known.to_lowercase(), name.to_lowercase());
    let prefix = if !name.is_empty() && known.starts_with(&name) { 1.0 } else { 0.0 };
    prefix + strsim::jaro_winkler(&known, &name)
}

/// Largest number of characters of a value that a message shows.
const SHOWN_MAX: usize = 40;

/// Text from a file as it is shown in a message: its start, with escapes for control characters, which could change a
/// terminal.
pub fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN_MAX).collect();
    let dots = if start.len() < text.len() { "..." } else { "" };
    let escaped = |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.into() };
    start.chars().map(escaped).chain([dots.to_owned()]).collect()
}

/// Up to three of the `known` names that resemble `name`, the most similar first.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found: Vec<(f64, &str)> = known.into_iter().map(|known| (similarity(known, name), known)).collect();
    found.retain(|(similarity, _)| *similarity > 0.7);
    found.sort_by(|left, right| right.0.total_cmp(&left.0));
    found.into_iter().take(3).map(|(_, known)| known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_fitting_unit() {
        let found = [0.4, 89.0, 600.0, 7200.0, 400_000.0].map(duration_text);
        assert_eq!(found, ["0 s", "89 s", "10 min", "2.0 h", "5 days"]);
    }

    #[test]
    fn similar_names_are_found_in_order() {
        assert_eq!(nearest("frist", ["second", "first", "firsts"]), ["first", "firsts"]);
        assert_eq!(nearest("exp", ["hexp", "exp-long-name", "exp1"]), ["exp1", "exp-long-name", "hexp"]);
        assert!(nearest("abc", ["xyz"]).is_empty());
    }
}
