//! A configuration for tools: the JSON schema and the reference page.

use std::borrow::Cow;
use std::fmt::Write as _;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value as Json;

use super::{AutoOr, RunConfig};

/// The JSON schema of a configuration file.
pub fn schema() -> Json {
    let settings = schemars::generate::SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<RunConfig>().to_value()
}

/// Every field with its meaning and default: the text of `configs/README.md`.
pub fn markdown() -> String {
    let schema = schema();
    let mut text = String::from(
        "# Configuration\n\nMade by `locdiff-launch config schema --markdown`; a test keeps it up to date.\n\n\
         A preset (`--config l47`) or a file (`--config my.toml`) sets what differs from these defaults, `--set model.degree=23` \
         a single field.\nRelative paths are relative to the current folder. `locdiff-launch config show` prints the result and \
         where each value came from.\n",
    );
    for (section, fields) in properties(&schema) {
        let _ =
            writeln!(text, "\n## `[{section}]`\n{}\n\n| field | default | meaning |\n|---|---|---|", described(fields));
        for (field, schema) in properties(fields) {
            let default = schema.get("default").map(Json::to_string).unwrap_or_default();
            let _ = writeln!(text, "| `{field}` | `{default}` | {}{} |", described(schema), choices(schema));
        }
    }
    text
}

fn properties(schema: &Json) -> impl Iterator<Item = (&String, &Json)> {
    schema.get("properties").and_then(Json::as_object).into_iter().flatten()
}

fn described(schema: &Json) -> String {
    schema.get("description").and_then(Json::as_str).unwrap_or_default().replace('\n', " ")
}

/// The words that a field takes, each with its meaning.
fn choices(schema: &Json) -> String {
    let Some(variants) = schema.get("oneOf").and_then(Json::as_array) else { return String::new() };
    let list = variants.iter().filter_map(|variant| {
        let word = variant.get("const")?.as_str()?;
        Some(format!("<br>`\"{word}\"`: {}", described(variant)))
    });
    list.collect()
}

impl<T: JsonSchema> JsonSchema for AutoOr<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("AutoOr_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "const": "auto" }, generator.subschema_for::<T>()] })
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_says_what_it_means() {
        let schema = schema();
        let mut fields = 0;
        for (section, inner) in properties(&schema) {
            assert!(!described(inner).is_empty(), "{section}");
            for (field, schema) in properties(inner) {
                assert!(!described(schema).is_empty(), "{section}.{field} has no description");
                assert!(schema.get("default").is_some(), "{section}.{field} has no default");
                fields += 1;
            }
        }
        assert!(fields > 60, "only {fields} fields found");
    }

    #[test]
    fn reference_page_is_up_to_date() {
        let page = include_str!("../../../configs/README.md");
        assert!(page == markdown(), "run: locdiff-launch config schema --markdown > configs/README.md");
    }
}
