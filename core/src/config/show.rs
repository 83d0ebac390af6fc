//! Prints a resolved configuration as TOML, with the origin of each value in a comment.

use std::fmt::Write as _;

use toml::Table;

use super::Resolved;

/// The resolved configuration as TOML. A comment after each value names its origin.
pub fn show(resolved: &Resolved) -> String {
    let table = Table::try_from(&resolved.config).expect("a checked configuration has only TOML values");
    let mut text = String::new();
    for (section, fields) in &table {
        let _ = writeln!(text, "{}[{section}]", if text.is_empty() { "" } else { "\n" });
        for (field, value) in fields.as_table().into_iter().flatten() {
            let assignment = format!("{field} = {value}");
            let _ = writeln!(text, "{assignment:<40} # {}", resolved.origin(&format!("{section}.{field}")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::{Layer, load};
    use super::*;

    #[test]
    fn shown_configuration_loads_back_unchanged() {
        let first =
            load(&[Layer::Preset("l95".into()), Layer::Set("shards.train=a # b".into())]).expect("the preset is valid");
        let file = tempfile::NamedTempFile::new().expect("a temporary file can be created");
        std::fs::write(file.path(), show(&first)).expect("the temporary file is writable");
        let second = load(&[Layer::File(file.path().into())]).expect("the printed configuration is valid");
        assert_eq!(first.config, second.config);
        assert!(show(&first).contains("# preset l95:"), "{}", show(&first));
    }
}
