//! Merges layers of values into one [`RunConfig`] and records the origin of each value. If several layers set a field,
//! the last of them wins.
//!
//! The name and type of each value are checked separately, so that one bad field does not hide errors in other fields.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::errors::{Checker, wanted};
use super::{ConfigError, ConfigErrors, NO_CREDENTIALS, RunConfig, has_credentials, preset};
use crate::text::similarity;

/// One source of configuration values.
#[derive(Debug, Clone, PartialEq)]
pub enum Layer {
    /// A built-in preset, by name.
    Preset(String),
    /// A TOML file. If its key `preset` names a preset, the file builds on that preset.
    File(PathBuf),
    /// TOML text that was read from a file.
    Text {
        /// Name of the source in messages, such as the path of the file.
        source: String,
        /// The text.
        text: String,
    },
    /// A TOML file and the name of a preset. The file builds on this preset, unless its key `preset` names another.
    FileOver(PathBuf, String),
    /// The argument of `--set`: `key=value`.
    Set(String),
    /// A command-line flag that sets one key.
    Flag {
        /// Name of the flag, such as `--gpus`.
        flag: &'static str,
        /// Key that the flag sets, such as `parallel.workers`.
        key: &'static str,
        /// Value that the flag sets.
        value: Value,
    },
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueOrigin {
    /// The default, because no layer set the value.
    Default,
    /// A line of a preset or a file.
    Line {
        /// Name of the preset, in the form `preset demo`, or path of the file.
        source: String,
        /// Line number, from 1.
        line: usize,
    },
    /// `--set`.
    Set,
    /// A command-line flag, by name.
    Flag(&'static str),
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => out.write_str("default"),
            Self::Line { source, line } => write!(out, "{source}:{line}"),
            Self::Set => out.write_str("--set"),
            Self::Flag(flag) => out.write_str(flag),
        }
    }
}

/// A checked configuration with the origin of each value.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The values.
    pub config: RunConfig,
    origins: BTreeMap<String, ValueOrigin>,
}

impl Resolved {
    /// Origin of the value of a dotted key.
    pub fn origin(&self, key: &str) -> &ValueOrigin {
        self.origins.get(key).unwrap_or(&ValueOrigin::Default)
    }
}

/// Key with which a file names the preset that it builds on. With the value "", the file builds on the defaults.
pub(super) const PRESET_KEY: &str = "preset";

/// Why a preset is refused in a later layer.
const LATE_PRESET: &str =
    "only the first --config may be or name a preset; a later preset would replace values of earlier files";

/// Size limit of a configuration file, bytes. Larger files are refused without being read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A dotted key, its value, and the origin of the value.
type Leaf = (String, Value, ValueOrigin);

/// All sections with their default values.
static SECTIONS: LazyLock<Table> =
    LazyLock::new(|| Table::try_from(RunConfig::default()).expect("the defaults are plain TOML values"));

/// All fields as dotted keys with their default values, in the order in which the structs define them.
static DEFAULTS: LazyLock<Vec<(String, Value)>> = LazyLock::new(|| {
    let mut leaves = Vec::new();
    flatten("", &SECTIONS, &mut leaves);
    leaves
});

/// Merges the layers and checks the result. The error lists all problems that were found.
pub fn load(layers: &[Layer]) -> Result<Resolved, ConfigErrors> {
    load_where(layers, |_| true)
}

/// Like [`load`], but looks for values out of range and for contradictions only in `sections`, the sections that a
/// command uses. Names and types are checked in all sections.
pub fn load_for(layers: &[Layer], sections: &[&str]) -> Result<Resolved, ConfigErrors> {
    load_where(layers, |section| sections.contains(&section))
}

fn load_where(layers: &[Layer], is_used: impl Fn(&str) -> bool) -> Result<Resolved, ConfigErrors> {
    let mut errors = Vec::new();
    let mut chosen: BTreeMap<String, (Value, ValueOrigin)> = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        match read_layer(layer, index == 0) {
            Ok(found) => {
                for (key, value, origin) in found {
                    match check_leaf(&key, value, &origin) {
                        Ok(value) => drop(chosen.insert(key, (value, origin))),
                        Err(error) => errors.push(error),
                    }
                }
            }
            Err(error) => errors.push(error),
        }
    }
    let config = assemble(&chosen);
    let origins: BTreeMap<_, _> = chosen.into_iter().map(|(key, (_, origin))| (key, origin)).collect();
    let mut checker = Checker::default();
    config.check(&mut checker);
    let found = checker.found.into_iter().filter(|(key, _)| is_used(key.split('.').next().unwrap_or_default()));
    errors.extend(found.map(|(key, message)| {
        let origin = origins.get(&key).unwrap_or(&ValueOrigin::Default).to_string();
        ConfigError { key, origin, message }
    }));
    if errors.is_empty() { Ok(Resolved { config, origins }) } else { Err(ConfigErrors(errors)) }
}

/// The values of one layer. Only the first layer may be a preset or name a preset, because a preset in a later layer
/// would replace values of earlier files.
fn read_layer(layer: &Layer, is_first: bool) -> Result<Vec<Leaf>, ConfigError> {
    match layer {
        Layer::Preset(name) if !is_first => Err(file_error(name, LATE_PRESET.to_owned())),
        Layer::Preset(name) => match preset(name) {
            Some(preset) => parse(preset.toml, &format!("preset {name}")),
            None => Err(file_error(name, format!("no preset has this name; presets: {}", preset_names()))),
        },
        Layer::File(path) => read_file(path, "", is_first),
        Layer::Text { source, text } => parse_over(text, source, "", is_first),
        Layer::FileOver(path, preset) => read_file(path, preset, is_first),
        Layer::Set(typed) => {
            let (key, value) =
                typed.split_once('=').filter(|(key, _)| !key.trim().is_empty()).ok_or_else(|| ConfigError {
                    key: typed.clone(),
                    origin: ValueOrigin::Set.to_string(),
                    message: "wanted key=value".into(),
                })?;
            let value = value.trim();
            // Text that is not a TOML value is taken as a string, so that paths need no quotes.
            let parsed = toml::from_str::<Table>(&format!("value = {value}"))
                .ok()
                .filter(|table| table.len() == 1)
                .and_then(|mut table| table.remove("value"))
                .unwrap_or_else(|| Value::String(value.to_owned()));
            Ok(vec![(key.trim().to_owned(), parsed, ValueOrigin::Set)])
        }
        Layer::Flag { flag, key, value } => Ok(vec![((*key).to_owned(), value.clone(), ValueOrigin::Flag(flag))]),
    }
}

fn read_file(path: &Path, fallback: &str, is_first: bool) -> Result<Vec<Leaf>, ConfigError> {
    let name = path.display().to_string();
    let text = read(path).map_err(|error| file_error(&name, error))?;
    parse_over(&text, &name, fallback, is_first)
}

/// The values of the preset that the file `name` builds on, followed by the file's own values. A file that names no
/// preset builds on the preset `fallback`, or on the defaults if `fallback` is "".
fn parse_over(text: &str, name: &str, fallback: &str, is_first: bool) -> Result<Vec<Leaf>, ConfigError> {
    let mut found = parse(text, name)?;
    let named = found.iter().position(|(key, ..)| key == PRESET_KEY).map(|at| found.remove(at));
    let base = match &named {
        Some((key, _, origin)) if !is_first => {
            return Err(ConfigError { key: key.clone(), origin: origin.to_string(), message: LATE_PRESET.to_owned() });
        }
        None => fallback,
        Some((_, Value::String(base), _)) if base.is_empty() || preset(base).is_some() => base,
        Some((key, got, origin)) => {
            return Err(ConfigError {
                key: key.clone(),
                origin: origin.to_string(),
                message: format!("is {got}, wanted a preset: {}, or \"\" for the defaults", preset_names()),
            });
        }
    };
    let Some(base) = preset(base) else { return Ok(found) };
    Ok(parse(base.toml, &format!("preset {}", base.name))?.into_iter().chain(found).collect())
}

/// Reads a configuration file. Pipes, devices and very large files are refused without being read.
fn read(path: &Path) -> Result<String, String> {
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => format!("{error}, and no preset has this name; presets: {}", preset_names()),
        _ => error.to_string(),
    })?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return Err(format!("not a configuration file; wanted a regular file of at most {FILE_BYTES_MAX} bytes"));
    }
    std::fs::read_to_string(path).map_err(|error| error.to_string())
}

fn preset_names() -> String {
    super::PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ")
}

fn file_error(name: &str, message: String) -> ConfigError {
    ConfigError { key: name.to_owned(), origin: String::new(), message }
}

/// Parses TOML into leaves. The origin of each leaf is `source` and the line number.
fn parse(text: &str, source: &str) -> Result<Vec<Leaf>, ConfigError> {
    let malformed = |error: toml::de::Error| {
        let line = error.span().map_or(0, |span| line_of(text, span.start));
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        let advice = "`locdiff-launch config show` prints all fields as valid TOML";
        file_error(&format!("{source}:{line}"), format!("malformed TOML: {message}; {advice}"))
    };
    let spans = DeTable::parse(text).map_err(malformed)?;
    let table: Table = toml::from_str(text).map_err(malformed)?;
    let mut lines = BTreeMap::new();
    collect_lines("", spans.get_ref(), text, &mut lines);
    let mut found = Vec::new();
    flatten("", &table, &mut found);
    let leaf = |(key, value): (String, Value)| {
        let origin = ValueOrigin::Line { source: source.to_owned(), line: lines.get(&key).copied().unwrap_or(0) };
        (key, value, origin)
    };
    Ok(found.into_iter().map(leaf).collect())
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

fn collect_lines(prefix: &str, table: &DeTable<'_>, text: &str, lines: &mut BTreeMap<String, usize>) {
    for (key, value) in table {
        let path = join(prefix, key.get_ref());
        if let DeValue::Table(inner) = value.get_ref() {
            collect_lines(&path, inner, text, lines);
        } else {
            lines.insert(path, line_of(text, key.span().start));
        }
    }
}

/// Collects every value with its dotted path. An empty table counts as a value unless it is a known section, so that a
/// misspelt section is reported even if all its fields are commented out.
fn flatten(prefix: &str, table: &Table, leaves: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        let path = join(prefix, key);
        match value {
            Value::Table(inner) if inner.is_empty() && prefix.is_empty() && SECTIONS.contains_key(key) => {}
            Value::Table(inner) if !inner.is_empty() => flatten(&path, inner, leaves),
            other => leaves.push((path, other.clone())),
        }
    }
}

/// Appends `key` to a dotted path. A key that contains a dot (`"model.degree"`, in quotes) keeps its quotes, so that it
/// is reported as unknown.
fn join(prefix: &str, key: &str) -> String {
    let key = if key.contains('.') { format!("\"{key}\"") } else { key.to_owned() };
    if prefix.is_empty() { key } else { format!("{prefix}.{key}") }
}

/// Checks that the key exists, that its value has the right type, and that the value contains no credentials. Does not
/// look at other fields. Returns the value, converted to a string if `--set` gave a number or boolean for a string
/// field, and to an integer if a number such as `1e3` was given for an integer field.
fn check_leaf(key: &str, value: Value, origin: &ValueOrigin) -> Result<Value, ConfigError> {
    let fail = |message| ConfigError { key: key.to_owned(), origin: origin.to_string(), message };
    if !DEFAULTS.iter().any(|(known, _)| known == key) {
        return Err(fail(unknown_field(key)));
    }
    // Refuse credentials before all other checks of the value, because the messages of those checks may repeat the
    // value.
    if value.as_str().is_some_and(has_credentials) {
        return Err(fail(NO_CREDENTIALS.to_owned()));
    }
    let error = match parse_alone(key, &value) {
        Ok(()) => return Ok(value),
        Err(error) => error,
    };
    // `checkpoint.run` is a string, so `--set checkpoint.run=7` means the string "7".
    if let (ValueOrigin::Set, Value::Integer(_) | Value::Float(_) | Value::Boolean(_)) = (origin, &value) {
        let text = Value::String(value.to_string());
        if parse_alone(key, &text).is_ok() {
            return Ok(text);
        }
    }
    if let Value::Float(number) = value
        && number.fract() == 0.0
        && number.abs() < EXACT_BELOW
    {
        let whole = Value::Integer(number as i64);
        if parse_alone(key, &whole).is_ok() {
            return Ok(whole);
        }
    }
    let default = DEFAULTS.iter().find(|(known, _)| known == key).map(|(_, default)| default);
    // The field accepts only certain names, but the value is not text. Parse the value as text, so that the parser's
    // error lists the accepted names.
    let error = match default {
        Some(Value::String(_)) if !value.is_str() && !error.message().contains("wanted") => {
            parse_alone(key, &Value::String(value.to_string())).err().unwrap_or(error)
        }
        _ => error,
    };
    Err(fail(wanted(default, &value, error.message().lines().next().unwrap_or_default())))
}

/// Every whole number below this limit (2⁵³) has an exact floating-point representation.
const EXACT_BELOW: f64 = 9_007_199_254_740_992.0;

fn parse_alone(key: &str, value: &Value) -> Result<(), toml::de::Error> {
    let mut table = Table::new();
    insert(&mut table, key, value.clone());
    table.try_into::<RunConfig>().map(drop)
}

fn insert(table: &mut Table, key: &str, value: Value) {
    let (section, field) = key.split_once('.').expect("every known key has a section");
    let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    section.as_table_mut().expect("sections are tables").insert(field.to_owned(), value);
}

fn unknown_field(key: &str) -> String {
    if DEFAULTS.iter().any(|(known, _)| known.starts_with(&format!("{key}."))) {
        return "is a section; wanted the name of one of its fields".into();
    }
    let nearest = DEFAULTS
        .iter()
        .map(|(known, _)| (similarity(known, key).max(field_similarity(known, key)), known))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    match nearest {
        Some((similarity, known)) if similarity > 0.75 => format!("unknown field; did you mean {known}?"),
        _ => "unknown field; `locdiff-launch config show` lists all fields".into(),
    }
}

/// Similarity of two keys by their field names alone: high if the names are equal, otherwise 0. A key with the right
/// field name and a wrong or missing section is therefore recognised.
fn field_similarity(known: &str, key: &str) -> f64 {
    let field = |dotted: &str| dotted.rsplit('.').next().map(str::to_owned).unwrap_or_default();
    if field(known) == field(key) { 0.99 } else { 0.0 }
}

fn assemble(chosen: &BTreeMap<String, (Value, ValueOrigin)>) -> RunConfig {
    let mut table = Table::new();
    for (key, (value, _)) in chosen {
        insert(&mut table, key, value.clone());
    }
    table.try_into().expect("check_leaf parsed each leaf")
}

#[cfg(test)]
mod tests {
    use super::super::CheckpointChoice;
    use super::*;

    fn set(text: &str) -> Layer {
        Layer::Set(text.into())
    }

    fn messages(layers: &[Layer]) -> String {
        load(layers).expect_err("the configuration is invalid").to_string()
    }

    #[test]
    fn later_layers_win_and_origins_are_recorded() {
        let flag = Layer::Flag { flag: "--workers", key: "parallel.workers", value: Value::Integer(4) };
        let found =
            load(&[Layer::Preset("demo".into()), set("model.degree=23"), flag]).expect("the settings are valid");
        assert_eq!(found.config.model.degree, 23);
        assert_eq!(found.origin("model.degree"), &ValueOrigin::Set);
        assert_eq!(found.config.parallel.workers.value(), Some(4));
        assert_eq!(found.origin("parallel.workers").to_string(), "--workers");
        assert_eq!(found.origin("network.interface"), &ValueOrigin::Default);
    }

    #[test]
    fn all_errors_are_reported_together_with_their_fields() {
        let text = messages(&[
            set("model.degre=3"),
            set("train.steps=many"),
            set("model.dropout=1.5"),
            set("steps=5"),
            set("loss=1"),
            set("nonsense"),
        ]);
        for part in [
            "6 errors",
            "model.degre: unknown field; did you mean model.degree?",
            "train.steps: got \"many\"",
            "model.dropout: is 1.5, wanted at least 0 and below 1 (from --set)",
            "steps: unknown field; did you mean train.steps?",
            "loss: is a section",
            "nonsense: wanted key=value",
        ] {
            assert!(text.contains(part), "missing {part:?} in:\n{text}");
        }
    }

    #[test]
    fn set_takes_unquoted_strings_and_numbers_as_names() {
        let found = load(&[set("shards.train=some/where"), set("checkpoint.run=7")]).expect("the settings are valid");
        assert_eq!(found.config.shards.train, "some/where");
        assert_eq!(found.config.checkpoint.run, "7");
    }

    #[test]
    fn auto_field_accepts_only_auto_or_a_number() {
        assert!(load(&[set("loss.kl_weight=0.1")]).is_ok());
        assert!(load(&[set("loss.kl_weight=auto")]).is_ok());
        assert!(messages(&[set("loss.kl_weight=much")]).contains("got \"much\", wanted \"auto\" or a number"));
        assert!(messages(&[set("parallel.workers=-3")]).contains("parallel.workers"));
        assert!(messages(&[set("parallel.workers=0")]).contains("is 0, wanted 1 to 1024"));
    }

    #[test]
    fn wrong_types_are_reported_in_plain_words() {
        for (typed, part) in [
            ("train.steps=many", "train.steps: got \"many\", wanted a whole number (from --set)"),
            ("train.steps=1.5", "got 1.5, wanted a whole number"),
            ("train.global_batch=-1", "got -1, wanted a whole number, 0 or above"),
            ("train.global_batch=99999999999", "got 99999999999, wanted a smaller whole number"),
            ("train.learning_rate=fast", "got \"fast\", wanted a number"),
            ("eval.after_train=maybe", "got \"maybe\", wanted true or false"),
            ("eval.thresholds_km=7", "got 7, wanted a list of numbers"),
            ("parallel.device=gpu", "got \"gpu\", wanted \"auto\", \"cpu\" or \"cuda\""),
            ("parallel.device=3", "got 3, wanted \"auto\", \"cpu\" or \"cuda\""),
            ("eval.checkpoint=last", "got \"last\", wanted \"newest\", \"best\" or the step of a checkpoint"),
            ("parallel.workers=-3", "got -3, wanted \"auto\" or a number in range"),
        ] {
            let text = messages(&[set(typed)]);
            assert!(text.contains(part), "{typed}: {text}");
        }
        let found = load(&[set("train.steps=1e3"), set("eval.checkpoint=2e3")]).expect("both are whole numbers");
        assert_eq!((found.config.train.steps, found.config.eval.checkpoint), (1000, CheckpointChoice::Step(2000)));
    }

    #[test]
    fn nan_is_out_of_every_range() {
        for key in ["train.learning_rate", "model.dropout", "retrieval.radius_km", "loss.l2_weight"] {
            assert!(messages(&[set(&format!("{key}=nan"))]).contains(key), "{key} accepted NaN");
        }
    }

    #[test]
    fn conflicting_values_are_reported() {
        let text = messages(&[set("eval.sampler_steps=500"), set("train.steps=10"), set("train.warmup_steps=500")]);
        assert!(text.contains("eval.sampler_steps: is 500, more than diffusion.timesteps = 200"), "{text}");
        assert!(text.contains("train.warmup_steps: is 500, more than train.steps = 10"), "{text}");
        let text = messages(&[set("eval.guidance=1.5")]);
        assert!(text.contains("eval.guidance: is 1.5, but diffusion.condition_drop is 0"), "{text}");
        assert!(load(&[set("eval.guidance=1.5"), set("diffusion.condition_drop=0.1")]).is_ok());
        assert!(load(&[set("diffusion.shift=0.2")]).is_ok());
        assert!(messages(&[set("diffusion.shift=0")]).contains("diffusion.shift: is 0"));
        let text = messages(&[set("diffusion.shift=0.2"), set("diffusion.schedule=cosine")]);
        assert!(text.contains("diffusion.shift: applies only to schedule = \"shifted-cosine\""), "{text}");
    }

    #[test]
    fn errors_in_a_file_name_the_line() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file can be created");
        std::fs::write(file.path(), "[model]\ndegree = 15\n\n[train]\nstepz = 3\n").expect("the file is writable");
        let text = messages(&[Layer::File(file.path().into())]);
        assert!(text.contains(&format!("{}:5", file.path().display())), "{text}");
        std::fs::write(file.path(), "[model\ndegree = 15\n").expect("the temporary file is writable");
        let text = messages(&[Layer::File(file.path().into())]);
        assert!(text.contains(":1: malformed TOML"), "{text}");
        let text = messages(&[Layer::File("/nowhere/x.toml".into())]);
        assert!(text.contains("/nowhere/x.toml: No such file"), "{text}");
    }

    #[test]
    fn empty_tables_and_quoted_keys_are_checked() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file can be created");
        for (text, part) in [
            ("[nosuch]\n", "nosuch: unknown field"),
            ("[model.degree]\n", "model.degree: got"),
            ("\"model.degree\" = 7\n", "\"model.degree\": unknown field"),
        ] {
            std::fs::write(file.path(), text).expect("the temporary file is writable");
            let found = messages(&[Layer::File(file.path().into())]);
            assert!(found.contains(part), "{text}: {found}");
        }
        std::fs::write(file.path(), "[model]\n").expect("the temporary file is writable");
        assert!(load(&[Layer::File(file.path().into())]).is_ok());
        assert!(messages(&[set("=1")]).contains("wanted key=value"));
        assert!(messages(&[Layer::File("/dev/zero".into())]).contains("not a configuration file"));
    }

    #[test]
    fn every_preset_is_valid_and_repeats_no_default() {
        let defaults: BTreeMap<_, _> = DEFAULTS.iter().cloned().collect();
        for preset in super::super::PRESETS {
            load(&[Layer::Preset(preset.name.into())]).unwrap_or_else(|error| panic!("{}: {error}", preset.name));
            for (key, value, _) in parse(preset.toml, preset.name).expect("the preset is valid TOML") {
                assert_ne!(defaults.get(&key), Some(&value), "{}: {key} repeats the default", preset.name);
            }
        }
    }
}
