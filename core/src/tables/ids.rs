//! Converts the identifiers in an Arrow column to text.

use arrow_array::cast::AsArray;
use arrow_array::{Array, downcast_integer_array};
use arrow_schema::DataType;

/// The identifier in row `row` of `column`. Error texts begin with a verb, as in "is null": the caller puts the column
/// name before the text.
pub fn id(column: &dyn Array, row: usize) -> Result<String, String> {
    if column.is_null(row) {
        return Err("is null, wanted an identifier".to_owned());
    }
    downcast_integer_array!(
        column => Ok(column.value(row).to_string()),
        DataType::Utf8 => Ok(column.as_string::<i32>().value(row).to_owned()),
        DataType::LargeUtf8 => Ok(column.as_string::<i64>().value(row).to_owned()),
        DataType::Utf8View => Ok(column.as_string_view().value(row).to_owned()),
        DataType::Binary => Ok(text(column.as_binary::<i32>().value(row))),
        DataType::LargeBinary => Ok(text(column.as_binary::<i64>().value(row))),
        DataType::BinaryView => Ok(text(column.as_binary_view().value(row))),
        DataType::FixedSizeBinary(_) => Ok(hexadecimal(column.as_fixed_size_binary().value(row))),
        other => Err(format!("is {other}, wanted text, bytes or integers")),
    )
}

/// Returns bytes as text if they are valid UTF-8, because some writers store text as plain bytes. Other bytes become
/// hexadecimal digits.
fn text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| hexadecimal(bytes), str::to_owned)
}

/// Writes bytes, such as digests and UUIDs, as hexadecimal digits. Different bytes always give different texts, which a
/// lossy conversion to UTF-8 would not guarantee.
fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{
        ArrayRef, BinaryArray, BooleanArray, FixedSizeBinaryArray, Int8Array, LargeStringArray, StringViewArray,
        UInt64Array,
    };

    use super::*;

    #[test]
    fn identifiers_of_every_type_become_text() {
        let fixed =
            FixedSizeBinaryArray::try_from_iter([[0_u8, 255], [1, 2]].into_iter()).expect("all values have two bytes");
        let columns: [(ArrayRef, &str); 6] = [
            (Arc::new(UInt64Array::from(vec![0, u64::MAX])), "18446744073709551615"),
            (Arc::new(Int8Array::from(vec![0, -3])), "-3"),
            (Arc::new(fixed), "0x0102"),
            (Arc::new(BinaryArray::from(vec![b"a".as_slice(), b"\xff\x00"])), "0xff00"),
            (Arc::new(LargeStringArray::from(vec!["a", "photo"])), "photo"),
            (Arc::new(StringViewArray::from(vec!["a", "photo"])), "photo"),
        ];
        for (column, want) in columns {
            assert_eq!(id(column.as_ref(), 1).as_deref(), Ok(want), "{}", column.data_type());
        }
        let null = UInt64Array::from(vec![Some(1), None]);
        assert_eq!(id(&null, 1), Err("is null, wanted an identifier".to_owned()));
        let error = id(&BooleanArray::from(vec![true]), 0).expect_err("a boolean is not an identifier");
        assert_eq!(error, "is Boolean, wanted text, bytes or integers");
    }
}
