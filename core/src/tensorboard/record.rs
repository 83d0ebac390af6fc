//! TFRecord framing: length (u64), its masked CRC, data, its masked CRC; all little-endian.
//!
//! A file may end anywhere: its writer may have been killed in the middle of a record, or the machine may have gone down with
//! the end of the file not yet on the disk, which then reads as zeros. That is a [`Next::Torn`] record. Bytes that are wrong
//! while whole ones follow are damage.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

/// Length and its CRC.
pub(super) const HEADER_BYTES: usize = 12;
/// CRC of the data.
const FOOTER_BYTES: u64 = 4;
/// `crc32c::kMaskDelta`: a CRC of data that holds CRCs would otherwise be weak.
const MASK_DELTA: u32 = 0xa282_ead8;

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// The first bytes of a record.
pub(super) fn header(length: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&length.to_le_bytes());
    bytes[8..].copy_from_slice(&masked_crc(&length.to_le_bytes()).to_le_bytes());
    bytes
}

/// A whole record.
pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let mut bytes = header(data.len() as u64).to_vec();
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(&masked_crc(data).to_le_bytes());
    bytes
}

/// What lies at the reader's place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A record's data.
    Record(Vec<u8>),
    /// The file ends here.
    End,
    /// The rest of the file is a record that was not written to its end.
    Torn,
    /// Damage, and what it is.
    Damaged(&'static str),
}

/// Reads records one after the other.
pub(super) struct Reader {
    input: BufReader<File>,
    place: u64,
    length: u64,
}

impl Reader {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self { input: BufReader::new(file), place: 0, length })
    }

    /// Where the next record begins.
    pub(super) fn place(&self) -> u64 {
        self.place
    }

    /// Reads on. Only after a record is there anything to read.
    pub(super) fn next(&mut self) -> io::Result<Next> {
        let left = self.length - self.place;
        if left == 0 {
            return Ok(Next::End);
        }
        if left < HEADER_BYTES as u64 {
            return Ok(Next::Torn);
        }
        let mut found = [0; HEADER_BYTES];
        self.input.read_exact(&mut found)?;
        let [a, b, c, d, e, f, g, h, ..] = found;
        let data_bytes = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        if found != header(data_bytes) {
            return self.torn_or("the length of a record does not fit its checksum", HEADER_BYTES as u64);
        }
        let Some(bytes) = data_bytes.checked_add(HEADER_BYTES as u64 + FOOTER_BYTES).filter(|bytes| *bytes <= left)
        else {
            return Ok(Next::Torn);
        };
        // No more than the file has: a hostile length allocates nothing.
        let mut data = vec![0; data_bytes as usize];
        self.input.read_exact(&mut data)?;
        let mut footer = [0; FOOTER_BYTES as usize];
        self.input.read_exact(&mut footer)?;
        if u32::from_le_bytes(footer) != masked_crc(&data) {
            return self.torn_or("a record does not fit its checksum", bytes);
        }
        self.place += bytes;
        Ok(Next::Record(data))
    }

    /// A record or header of `bytes` is wrong: torn where its last byte and all behind it are zeros.
    fn torn_or(&mut self, damage: &'static str, bytes: u64) -> io::Result<Next> {
        self.input.seek(SeekFrom::Start(self.place + bytes - 1))?;
        let mut block = [0; 1 << 16];
        loop {
            match self.input.read(&mut block)? {
                0 => return Ok(Next::Torn),
                count if block[..count].iter().any(|byte| *byte != 0) => return Ok(Next::Damaged(damage)),
                _ => {}
            }
        }
    }
}
