//! Parses the header of a version 1 data page. The caller can then read the values directly from the file to their
//! destination.
//!
//! Accepts only uncompressed PLAIN pages. The caller reads all other pages with the `parquet` crate.
//!
//! Sources: Thrift's compact protocol
//! <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md> and Parquet's fields
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>.

/// A data page with PLAIN values and run-length-encoded definition and repetition levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlainPage {
    /// Number of values, nulls included.
    pub(crate) values: usize,
    /// Size of the levels and values in bytes.
    pub(crate) bytes: usize,
}

/// Thrift's codes for the field types that are read here.
const I32: u8 = 5;
const STRUCT: u8 = 12;

/// Parquet's numeric codes for a plain data page: page type `DATA_PAGE`, values `PLAIN`, definition levels `RLE`,
/// repetition levels `RLE`.
const PLAIN_DATA_PAGE: (i64, i64, i64, i64) = (0, 0, 3, 3);

/// Maximum nesting of structs. A page header needs two levels.
const DEPTH_MAX: u32 = 4;

/// Parses the header at the front of a page. Returns the header and the bytes after it. `None` if the page is not an
/// uncompressed PLAIN data page, or the header is malformed.
pub(crate) fn split_plain_page(bytes: &[u8]) -> Option<(PlainPage, &[u8])> {
    let mut thrift = Compact(bytes);
    let (mut kind, mut unpacked, mut packed, mut data) = (None, None, None, [None; 4]);
    thrift.fields(|thrift, id, of| {
        match (id, of) {
            (1, I32) => kind = Some(thrift.int()?),
            (2, I32) => unpacked = Some(thrift.int()?),
            (3, I32) => packed = Some(thrift.int()?),
            (5, STRUCT) => thrift.fields(|thrift, id, of| {
                match (id, of) {
                    (1..=4, I32) => data[id as usize - 1] = Some(thrift.int()?),
                    _ => thrift.skip(of, DEPTH_MAX)?,
                }
                Some(())
            })?,
            _ => thrift.skip(of, DEPTH_MAX)?,
        }
        Some(())
    })?;
    let [values, encoding, definition, repetition] = data;
    let plain = (kind?, encoding?, definition?, repetition?) == PLAIN_DATA_PAGE;
    let page = PlainPage { values: usize::try_from(values?).ok()?, bytes: usize::try_from(packed?).ok()? };
    (plain && packed == unpacked).then_some((page, thrift.0))
}

/// The unread rest of a message in Thrift's compact protocol.
struct Compact<'a>(&'a [u8]);

impl Compact<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn int(&mut self) -> Option<i64> {
        let zigzag = self.varint()?;
        Some((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
    }

    /// Calls `take` with the id and type of each field of a struct. `take` must read or skip the value of the field.
    fn fields(&mut self, mut take: impl FnMut(&mut Self, i64, u8) -> Option<()>) -> Option<()> {
        let mut id = 0_i64;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            id = if head >> 4 == 0 { self.int()? } else { id.checked_add(i64::from(head >> 4))? };
            take(self, id, head & 0x0f)?;
        }
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Option<()> {
        match kind {
            // A boolean has no bytes of its own: its type code tells whether it is true or false.
            1 | 2 => {}
            // Integers of 16, 32 and 64 bits.
            4..=6 => drop(self.varint()?),
            // Binary data: a length followed by that many bytes.
            8 => {
                let length = usize::try_from(self.varint()?).ok()?;
                self.0 = self.0.get(length..)?;
            }
            STRUCT => {
                let depth = depth.checked_sub(1)?;
                self.fields(|thrift, _, kind| thrift.skip(kind, depth))?;
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page header, with the page type, the sizes before and after compression, a checksum, the number of values and
    /// the encodings. The last two bytes are not part of the header.
    const PAGE: [u8; 24] = [
        0x15, 0, 0x15, 0x90, 0x03, 0x15, 0x90, 0x03, 0x15, 7, 0x1c, 0x15, 0x80, 0x02, 0x15, 0, 0x15, 6, 0x15, 6, 0x00,
        0x00, 0xaa, 0xbb,
    ];

    #[test]
    fn only_plain_pages_are_accepted() {
        let page = PlainPage { values: 128, bytes: 200 };
        assert_eq!(split_plain_page(&PAGE), Some((page, &PAGE[22..])));
        let mut with_statistics = PAGE[..20].to_vec();
        with_statistics.extend([0x1c, 0x18, 1, 9, 0x16, 4, 0x11, 0x00, 0x00, 0x00, 0xaa]);
        assert_eq!(split_plain_page(&with_statistics), Some((page, &[0xaa][..])));
        for (at, byte, what) in [
            (1, 4, "a dictionary page"),
            (6, 0x92, "a compressed page"),
            (15, 16, "a page of indices"),
            (17, 8, "old levels"),
        ] {
            let mut other = PAGE;
            other[at] = byte;
            assert_eq!(split_plain_page(&other), None, "accepted: {what}");
        }
        for length in 0..22 {
            assert_eq!(split_plain_page(&PAGE[..length]), None, "a header truncated after {length} bytes was accepted");
        }
        let deep = [0x1c; 64];
        assert_eq!(split_plain_page(&deep), None, "deeply nested structs were accepted");
    }
}
