//! Parquet's hybrid of run-length encoding and bit packing, used for the levels of list columns and for dictionary
//! indices.
//!
//! Levels are checked run by run, without expanding repeated values. For example, the levels of a list of 768 numbers
//! are one bit-packed group and one run of a repeated value. The encoding is specified at
//! <https://parquet.apache.org/docs/file-format/data-pages/encodings/>.

/// One run of a hybrid stream: one repeated value, or several bit-packed values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Run<'a> {
    /// The same value `count` times.
    Repeated { value: u32, count: usize },
    /// `count` bit-packed values, least significant bit first.
    Packed { bytes: &'a [u8], count: usize },
}

/// Iterates over the runs in a stream of values with `bits` bits each. `left` is the number of values that have not
/// been returned yet. If the bytes are malformed or too few, the iteration ends early, with `left` above 0.
#[derive(Debug, Clone)]
pub(super) struct Runs<'a> {
    bytes: &'a [u8],
    bits: u32,
    pub(super) left: usize,
}

impl<'a> Runs<'a> {
    pub(super) fn new(bytes: &'a [u8], bits: u32, values: usize) -> Self {
        Self { bytes, bits, left: values }
    }

    fn varint(&mut self) -> Option<u32> {
        let mut value = 0_u32;
        for shift in (0..32).step_by(7) {
            let (&byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            value |= u32::from(byte & 0x7f).checked_shl(shift)?;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

impl<'a> Iterator for Runs<'a> {
    type Item = Run<'a>;

    fn next(&mut self) -> Option<Run<'a>> {
        if self.left == 0 {
            return None;
        }
        let header = self.varint()?;
        let size = (header >> 1) as usize;
        if header & 1 == 1 {
            let length = size.checked_mul(self.bits as usize)?;
            // Values are packed in groups of eight. If the last group is not full, a writer may omit its unused bytes.
            let (bytes, rest) = self.bytes.split_at(length.min(self.bytes.len()));
            let count = (size * 8).min(self.left);
            if count == 0 || bytes.len() * 8 < count * self.bits as usize {
                return None;
            }
            (self.bytes, self.left) = (rest, self.left - count);
            return Some(Run::Packed { bytes, count });
        }
        let (value, rest) = self.bytes.split_at_checked(self.bits.div_ceil(8) as usize)?;
        let value = value.iter().rev().fold(0, |sum, &byte| sum << 8 | u32::from(byte));
        let count = size.min(self.left);
        if count == 0 {
            return None;
        }
        (self.bytes, self.left) = (rest, self.left - count);
        Some(Run::Repeated { value, count })
    }
}

/// Unpacks `count` values of a packed run, starting with value number `first`.
pub(super) fn unpacked(bytes: &[u8], bits: u32, first: usize, count: usize) -> impl Iterator<Item = u32> + '_ {
    let mask = if bits == 32 { u32::MAX } else { (1 << bits) - 1 };
    (first..first + count).map(move |index| {
        let bit = index * bits as usize;
        let rest = bytes.get(bit / 8..).unwrap_or_default();
        let word = rest.first_chunk::<8>().copied().unwrap_or_else(|| {
            let mut word = [0; 8];
            rest.iter().zip(&mut word).for_each(|(from, to)| *to = *from);
            word
        });
        (u64::from_le_bytes(word) >> (bit % 8)) as u32 & mask
    })
}

/// Whether all definition levels are `level_max`, which means that no value is null.
pub(super) fn all_defined(bytes: &[u8], level_max: u32, values: usize) -> bool {
    let bits = u32::BITS - level_max.leading_zeros();
    let mut runs = Runs::new(bytes, bits, values);
    let is_highest = |run| match run {
        Run::Repeated { value, .. } => value == level_max,
        Run::Packed { bytes, count } => unpacked(bytes, bits, 0, count).all(|value| value == level_max),
    };
    runs.all(is_highest) && runs.left == 0
}

/// Whether the repetition levels of a page start a new list after every `width` values. `place` is the position of the
/// page's first value within its list. If the result is true, `place` is set to the position of the next page's first
/// value.
pub(super) fn lists_have_width(width: usize, place: &mut usize, bytes: &[u8], values: usize) -> bool {
    let mut runs = Runs::new(bytes, 1, values);
    for run in &mut runs {
        match run {
            Run::Repeated { value: 0, count } if *place == 0 && (count == 1 || width == 1) => *place = 1 % width,
            Run::Repeated { value: 1, count } if *place > 0 && *place + count <= width => {
                *place = (*place + count) % width;
            }
            Run::Repeated { .. } => return false,
            Run::Packed { bytes, count } => {
                for level in unpacked(bytes, 1, 0, count) {
                    if (level == 0) != (*place == 0) {
                        return false;
                    }
                    *place = if *place + 1 == width { 0 } else { *place + 1 };
                }
            }
        }
    }
    runs.left == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_streams_decode_as_in_the_specification() {
        // First the specification's example of bit packing (the values 0 to 7, three bits each), then a run that
        // repeats the value 4 five times.
        let stream = [0b11, 0b1000_1000, 0b1100_0110, 0b1111_1010, 5 << 1, 4];
        let mut values = Vec::new();
        for run in Runs::new(&stream, 3, 13) {
            match run {
                Run::Repeated { value, count } => values.extend(std::iter::repeat_n(value, count)),
                Run::Packed { bytes, count } => values.extend(unpacked(bytes, 3, 0, count)),
            }
        }
        assert_eq!(values, [0, 1, 2, 3, 4, 5, 6, 7, 4, 4, 4, 4, 4]);
        assert_eq!(Runs::new(&stream[..3], 3, 13).count(), 0, "a truncated stream gave a run");
    }

    #[test]
    fn values_unpack_the_same_from_any_offset() {
        let bytes: Vec<u8> = (0..96_u32).map(|byte| (byte * 151 % 256) as u8).collect();
        for bits in 0..=32_u32 {
            let count = bytes.len() * 8 / bits.max(8) as usize;
            let bit = |at: usize| u32::from(bytes[at / 8] >> (at % 8) & 1);
            let value = |index: usize| (0..bits as usize).map(|at| bit(index * bits as usize + at) << at).sum();
            let expected: Vec<u32> = (0..count).map(value).collect();
            for first in [0, 1, count / 2, count - 1] {
                let values: Vec<u32> = unpacked(&bytes, bits, first, count - first).collect();
                assert_eq!(values, expected[first..], "wrong {bits}-bit values from value {first} on");
            }
        }
    }

    #[test]
    fn only_lists_of_the_right_width_pass() {
        // The levels are 0 1 1 1 1 1 1 1 (bit-packed) and a run of four ones: one list of twelve values.
        let twelve = [0b11, 0b1111_1110, 4 << 1, 1];
        for (width, fits) in [(12, true), (11, false), (6, false), (1, false)] {
            assert_eq!(lists_have_width(width, &mut 0, &twelve, 12), fits, "wrong result for width {width}");
        }
        let mut place = 0;
        assert!(
            lists_have_width(24, &mut place, &twelve, 12) && place == 12,
            "a list that continues in the next page was rejected"
        );
        assert!(lists_have_width(1, &mut 0, &[12 << 1, 0], 12), "lists of one number were rejected");
        assert!(!lists_have_width(12, &mut 0, &twelve, 13), "too few levels were accepted");
        assert!(all_defined(&[12 << 1, 3], 3, 12) && !all_defined(&[12 << 1, 2], 3, 12));
        assert!(!all_defined(&[0b11, 0b1111_1111, 0b1111_0111], 3, 8), "a null among eight values was accepted");
    }
}
