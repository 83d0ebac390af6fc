//! Reads the JSON of a request: one embedding as a list of numbers, or an object with `embeddings`. Messages count
//! from 1.

use locdiff_core::tables::to_halves;
use serde_json::{Map, Value};

/// Most embeddings in a request.
pub(super) const ROWS_MAX: usize = 64;
/// The fields of a request.
const FIELDS: [&str; 4] = ["embeddings", "ids", "samples", "density"];

/// What a client asks.
#[derive(Debug, PartialEq)]
pub(super) struct ServeQuestion {
    /// The embeddings: the bits of their float16 numbers.
    pub(super) embeddings: Vec<Vec<u16>>,
    /// The id of each row.
    pub(super) ids: Vec<String>,
    /// Whether the answers contain all samples.
    pub(super) with_samples: bool,
    /// Whether the answers contain the densities.
    pub(super) with_density: bool,
    /// Whether the request is a single embedding, not an object with `embeddings`.
    pub(super) is_single: bool,
}

/// Why a request cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadQuestion {
    /// It has too many rows.
    TooMany(String),
    /// Something else is wrong.
    Wrong(String),
}

impl From<String> for BadQuestion {
    fn from(text: String) -> Self {
        Self::Wrong(text)
    }
}

impl ServeQuestion {
    /// Reads the body of a request. Embeddings must have `width` numbers.
    pub(super) fn parse(body: &[u8], width: usize) -> Result<Self, BadQuestion> {
        let found: Value =
            serde_json::from_slice(body).map_err(|error| format!("the body is not valid JSON: {error}"))?;
        match found {
            Value::Array(numbers) if numbers.first().is_some_and(Value::is_array) => {
                Err("the body is a list of lists; send one list of numbers, or {\"embeddings\": [[...], ...]}"
                    .to_owned())?
            }
            Value::Array(numbers) => Ok(Self {
                embeddings: vec![embedding(&numbers, width, "the embedding")?],
                ids: vec!["0".to_owned()],
                with_samples: false,
                with_density: false,
                is_single: true,
            }),
            Value::Object(fields) => Self::of_fields(fields, width),
            other => Err(format!(
                "the body is {}, wanted a list of {width} numbers or an object with `embeddings`",
                kind(&other)
            ))?,
        }
    }

    fn of_fields(mut fields: Map<String, Value>, width: usize) -> Result<Self, BadQuestion> {
        let [rows, ids, samples, density] = FIELDS.map(|name| fields.remove(name));
        if let Some(name) = fields.keys().next() {
            Err(format!("unknown field {name:?}; known fields: {}", FIELDS.join(", ")))?;
        }
        let rows = match rows {
            Some(Value::Array(rows)) => rows,
            Some(other) => Err(format!("`embeddings` is {}, wanted a list of lists of numbers", kind(&other)))?,
            None => Err("the object has no field `embeddings`".to_owned())?,
        };
        if rows.is_empty() {
            Err("`embeddings` is empty".to_owned())?;
        }
        if rows.len() > ROWS_MAX {
            let text = format!("`embeddings` has {} rows, wanted at most {ROWS_MAX} in a request", rows.len());
            return Err(BadQuestion::TooMany(text));
        }
        let embedding = |(row, numbers): (usize, &Value)| match (numbers, row_name(row, rows.len())) {
            (Value::Array(numbers), name) => embedding(numbers, width, &name),
            (other, name) => Err(format!("{name} is {}, wanted a list of {width} numbers", kind(other))),
        };
        let (with_samples, with_density) = (read_flag(samples, "samples")?, read_flag(density, "density")?);
        let embeddings = rows.iter().enumerate().map(embedding).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { ids: read_ids(ids, embeddings.len())?, embeddings, with_samples, with_density, is_single: false })
    }
}

/// A field that is true or false, by default false.
fn read_flag(field: Option<Value>, name: &str) -> Result<bool, String> {
    match field {
        None => Ok(false),
        Some(Value::Bool(wanted)) => Ok(wanted),
        Some(other) => Err(format!("`{name}` is {}, wanted true or false", kind(&other))),
    }
}

/// The name of a row in messages.
pub(super) fn row_name(row: usize, rows: usize) -> String {
    if rows == 1 { "the embedding".to_owned() } else { format!("embedding {} of {rows}", row + 1) }
}

/// The ids of `rows` rows. Without ids, the number of a row is its id, as in `predict`.
fn read_ids(ids: Option<Value>, rows: usize) -> Result<Vec<String>, String> {
    let ids = match ids {
        None => return Ok((0..rows).map(|row| row.to_string()).collect()),
        Some(Value::Array(ids)) => ids,
        Some(other) => return Err(format!("`ids` is {}, wanted a list of strings", kind(&other))),
    };
    if ids.len() != rows {
        return Err(format!("`ids` has {} entries, but `embeddings` has {rows} rows", ids.len()));
    }
    let id = |(row, id): (usize, Value)| match id {
        Value::String(id) => Ok(id),
        other => Err(format!("id {} is {}, wanted a string", row + 1, kind(&other))),
    };
    ids.into_iter().enumerate().map(id).collect()
}

/// The bits of an embedding. `name` names the row in error messages.
fn embedding(numbers: &[Value], width: usize, name: &str) -> Result<Vec<u16>, String> {
    if numbers.len() != width {
        return Err(format!("{name} has {} numbers, wanted {width}", numbers.len()));
    }
    let number = |(column, number): (usize, &Value)| {
        let wrong = || format!("{name}: number {} is {}, wanted a number", column + 1, kind(number));
        number.as_f64().map(|number| number as f32).ok_or_else(wrong)
    };
    let values = numbers.iter().enumerate().map(number).collect::<Result<Vec<f32>, String>>()?;
    let halves = to_halves(&values).map_err(|reason| format!("{name}: {reason}"))?;
    Ok(halves.iter().map(|half| half.to_bits()).collect())
}

/// The kind of a JSON value, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_embedding_and_several_are_read() {
        let one = ServeQuestion::parse(b"[1, -2.5]", 2).expect("the request is right");
        assert_eq!((one.embeddings, one.is_single), (vec![vec![0x3c00, 0xc100]], true));
        let text = br#"{"embeddings": [[0, 1], [1e-9, 65504]], "ids": ["a", "b"], "samples": true}"#;
        let several = ServeQuestion::parse(text, 2).expect("the request is right");
        assert_eq!(several.embeddings, [[0, 0x3c00], [0, 0x7bff]]);
        assert_eq!((several.ids, several.with_samples), (vec!["a".to_owned(), "b".to_owned()], true));
        assert!(!several.with_density);
        let plain = ServeQuestion::parse(br#"{"embeddings": [[0, 1]]}"#, 2).expect("the request is right");
        assert_eq!((plain.ids, plain.with_samples, plain.is_single), (vec!["0".to_owned()], false, false));
    }

    #[test]
    fn every_mistake_is_named_with_its_place() {
        for (body, part) in [
            ("", "not valid JSON"),
            ("[1, 2", "line 1 column 5"),
            ("[1, NaN]", "not valid JSON"),
            ("[1, 1e999]", "number out of range"),
            ("\"x\"", "the body is a string, wanted a list of 2 numbers"),
            ("[]", "the embedding has 0 numbers, wanted 2"),
            ("[1, 2, 3]", "the embedding has 3 numbers, wanted 2"),
            ("[1, \"2\"]", "the embedding: number 2 is a string, wanted a number"),
            ("[1, 70000]", "the embedding: number 2 is 70000, wanted a number that float16 can hold"),
            ("[[1, 2]]", "list of lists"),
            ("{}", "no field `embeddings`"),
            ("{\"embeddings\": []}", "`embeddings` is empty"),
            ("{\"embeddings\": 1}", "`embeddings` is a number"),
            ("{\"embeddings\": [[1, 2], null]}", "embedding 2 of 2 is null"),
            ("{\"embeddings\": [[1, 2], [1]]}", "embedding 2 of 2 has 1 numbers, wanted 2"),
            ("{\"embeddings\": [[1, true]]}", "the embedding: number 2 is true or false"),
            ("{\"embeddings\": [[1, 1e9]]}", "the embedding: number 2 is 1000000000"),
            ("{\"embeddings\": [[1, 2]], \"ids\": []}", "`ids` has 0 entries"),
            ("{\"embeddings\": [[1, 2]], \"ids\": [3]}", "id 1 is a number"),
            ("{\"embeddings\": [[1, 2]], \"samples\": 1}", "`samples` is a number"),
            ("{\"embeddings\": [[1, 2]], \"density\": null}", "`density` is null"),
            ("{\"embedding\": [1, 2]}", "unknown field \"embedding\""),
        ] {
            match ServeQuestion::parse(body.as_bytes(), 2) {
                Err(BadQuestion::Wrong(text)) => assert!(text.contains(part), "{body}: {text}"),
                other => panic!("{body}: {other:?}"),
            }
        }
        let many = format!("{{\"embeddings\": [{}]}}", vec!["[1, 2]"; ROWS_MAX + 1].join(", "));
        let error = ServeQuestion::parse(many.as_bytes(), 2).expect_err("there are too many rows");
        assert_eq!(error, BadQuestion::TooMany("`embeddings` has 65 rows, wanted at most 64 in a request".to_owned()));
        let deep = "[".repeat(100_000);
        assert!(ServeQuestion::parse(deep.as_bytes(), 2).is_err());
    }
}
