//! A malformed safetensors header gives an error, never a panic. A header that claims to be longer than the file is
//! refused too.

use std::collections::BTreeMap;

use locdiff::checkpoint::{Header, HeaderError, TensorEntry, load_tensors};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::Files;
use locdiff_core::protocol::CheckpointFile;
use proptest::prelude::*;
use serde_json::json;
use tch::Kind;

fn refusal(header: &serde_json::Value, data_bytes: u64) -> String {
    match Header::parse(header.to_string().as_bytes(), data_bytes) {
        Err(HeaderError::Malformed(text)) => text,
        other => panic!("wanted `HeaderError::Malformed`, got {other:?} for {header}"),
    }
}

fn tensor(shape: &serde_json::Value, begin: u64, end: u64) -> serde_json::Value {
    json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, end] })
}

#[test]
fn every_rule_of_the_format_is_enforced() {
    let two = json!([2]);
    for (header, part) in [
        (json!({ "a": tensor(&two, 0, 8), "b": tensor(&two, 4, 12) }), "begins at byte 4, wanted byte 8"),
        (json!({ "a": tensor(&two, 0, 8), "b": tensor(&two, 12, 20) }), "begins at byte 12, wanted byte 8"),
        (json!({ "a": tensor(&two, 0, 8) }), "the tensors end at byte 8, but the data ends at byte 16"),
        (json!({ "a": tensor(&json!([8]), 0, 32) }), "ends beyond the end of the file"),
        (json!({ "a": tensor(&two, 0, 12) }), "its shape needs 8 bytes"),
        (json!({ "a": tensor(&two, 8, 0) }), "its shape needs 8 bytes"),
        (json!({ "a": tensor(&json!([u64::MAX]), 0, 8) }), "tensor `a` has the impossible shape"),
        (json!({ "a": tensor(&json!([i64::MAX, 4]), 0, 8) }), "impossible shape"),
        (json!({ "a": tensor(&json!([-2]), 0, 8) }), "tensor `a`: invalid value: integer `-2`, expected usize"),
        (json!({ "a": tensor(&json!([4]), u64::MAX, 7) }), "its shape needs 16 bytes"),
        (json!({ "a/b": tensor(&two, 0, 8) }), "is not a valid tensor name"),
        (json!({ "": tensor(&two, 0, 8) }), "is not a valid tensor name"),
        (json!({ "__metadata__": { "x": 3 } }), "__metadata__: invalid type: integer `3`, expected a string"),
        (json!({ "__metadata__": 3 }), "__metadata__: invalid type: integer `3`, expected a map"),
        (json!([1, 2]), "header: "),
    ] {
        let text = refusal(&header, 16);
        assert!(text.contains(part), "the error for {header} is {text:?}, wanted {part:?}");
    }
    let unknown = json!({ "a": { "dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16] } });
    let error = Header::parse(unknown.to_string().as_bytes(), 16).expect_err("the type is not supported");
    assert!(matches!(&error, HeaderError::Unsupported(text) if text.contains("F8_E4M3")), "{error}");
}

/// Writes `bytes` to a file and loads the tensors of the file. The expected checksum is computed from `bytes`.
fn load(bytes: &[u8]) -> Result<(), ExitCode> {
    let folder =
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary folder can be created");
    let written = Files::real().write_new(&folder.path().join("x"), bytes).expect("the file can be written");
    let want = CheckpointFile { name: "x".into(), bytes: written.bytes, xxh3: written.xxh3 };
    load_tensors(folder.path(), &want).map(drop).map_err(|error| error.exit_code())
}

#[test]
fn header_longer_than_the_file_is_refused() {
    for length in [9, 100_000_000, 100_000_001, u64::MAX / 2, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}      ");
        assert_eq!(load(&bytes), Err(ExitCode::Corrupt), "wrong result for a header of {length} bytes");
    }
    assert_eq!(load(b""), Err(ExitCode::Corrupt));
    assert_eq!(load(b"1234567"), Err(ExitCode::Corrupt));
    assert_eq!(load(b"\x08\0\0\0\0\0\0\0{}      "), Ok(()), "a file without tensors was refused");
}

fn entries() -> impl Strategy<Value = Vec<TensorEntry>> {
    let kinds = prop::sample::select(vec![Kind::Double, Kind::Int64, Kind::Float, Kind::BFloat16, Kind::Half]);
    let shapes = prop::collection::vec(0_i64..5, 0..4);
    prop::collection::btree_map("[a-z.]{1,6}", (kinds, shapes), 0..6).prop_map(|named| {
        named
            .into_iter()
            .map(|(name, (kind, shape))| {
                TensorEntry::new(&name, kind, shape).expect("the name and the shape are valid")
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn header_round_trips(tensors in entries(), key in "[^\"]{0,5}", text in ".{0,9}") {
        let header = Header { metadata: BTreeMap::from([(key, text)]), tensors };
        let bytes = header.encode();
        let data_bytes = header.tensors.iter().map(|entry| entry.bytes).sum();
        let mut parsed = Header::parse(&bytes[8..], data_bytes).expect("a valid header");
        // Parsing sorts tensors by their position in the file. Empty tensors may share a position, so their order may
        // change.
        let by_name = |a: &TensorEntry, b: &TensorEntry| a.name.cmp(&b.name);
        let mut header = header;
        parsed.tensors.sort_by(by_name);
        header.tensors.sort_by(by_name);
        prop_assert_eq!(parsed, header);
    }

    #[test]
    fn hostile_headers_are_errors_not_panics(
        tensors in entries(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        data_bytes in 0_u64..200,
    ) {
        let mut bytes = Header { metadata: BTreeMap::new(), tensors }.encode();
        for (at, byte) in cuts {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = Header::parse(&bytes[8..], data_bytes);
        bytes.extend(vec![7; data_bytes as usize]);
        if let Err(code) = load(&bytes) {
            prop_assert!(matches!(code, ExitCode::Corrupt | ExitCode::BadData), "unexpected exit code {code:?}");
        }
    }

    #[test]
    fn random_bytes_are_errors_not_panics(bytes: Vec<u8>) {
        let _ = Header::parse(&bytes, 8);
        prop_assert!(load(&bytes).is_err());
    }
}
