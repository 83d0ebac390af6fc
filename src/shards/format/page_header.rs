//! The header of a version 1 data page, for readers that want its values without its bytes passing through memory twice.
//!
//! Takes what a plain page of numbers has and answers none to anything else, which the `parquet` crate then reads or refuses.
//! Thrift's compact protocol: <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>; the fields:
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>.

/// A data page of PLAIN values with run-length levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlainPage {
    /// Values, nulls among them.
    pub(crate) values: usize,
    /// Bytes of levels and values.
    pub(crate) bytes: usize,
}

/// Thrift's numbers of its types: the only ones that are read.
const I32: u8 = 5;
const STRUCT: u8 = 12;

/// What Parquet numbers so: `PageType::DATA_PAGE`, `Encoding::PLAIN`, twice `Encoding::RLE`.
const PLAIN_DATA_PAGE: (i64, i64, i64, i64) = (0, 0, 3, 3);

/// Structs within structs; a page header has two.
const DEPTH_MAX: u32 = 4;

/// Takes the header off the front of a page that is not compressed.
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

/// What is left of a message.
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

    /// Hands the number and type of every field to `take`, which takes its value.
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
            // The type of a boolean is its value.
            1 | 2 => {}
            // Integers of 16, 32 and 64 bits.
            4..=6 => drop(self.varint()?),
            // Bytes behind their number.
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

    /// Type, both sizes, a checksum, then values, encodings and statistics of a maximum; two bytes of a body.
    const PAGE: [u8; 24] = [
        0x15, 0, 0x15, 0x90, 0x03, 0x15, 0x90, 0x03, 0x15, 7, 0x1c, 0x15, 0x80, 0x02, 0x15, 0, 0x15, 6, 0x15, 6, 0x00,
        0x00, 0xaa, 0xbb,
    ];

    #[test]
    fn plain_pages_are_told_from_all_others() {
        let page = PlainPage { values: 128, bytes: 200 };
        assert_eq!(split_plain_page(&PAGE), Some((page, &PAGE[22..])));
        let mut with_statistics = PAGE[..20].to_vec();
        with_statistics.extend([0x1c, 0x18, 1, 9, 0x16, 4, 0x11, 0x00, 0x00, 0x00, 0xaa]);
        assert_eq!(split_plain_page(&with_statistics), Some((page, &[0xaa][..])));
        for (at, byte, what) in
            [(1, 4, "a dictionary"), (6, 0x92, "compressed"), (15, 16, "indices"), (17, 8, "old levels")]
        {
            let mut other = PAGE;
            other[at] = byte;
            assert_eq!(split_plain_page(&other), None, "{what}");
        }
        for length in 0..22 {
            assert_eq!(split_plain_page(&PAGE[..length]), None, "cut after {length}");
        }
        let deep = [0x1c; 64];
        assert_eq!(split_plain_page(&deep), None, "structs in structs");
    }
}
