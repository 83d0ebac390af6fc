//! TFRecord framing. A record consists of the length of the data (u64), the masked CRC of the length (u32), the data,
//! and the masked CRC of the data (u32). All numbers are little-endian.
//!
//! A file may end in the middle of a record, because its writer was killed or because the machine crashed before the
//! end of the record reached the disk. After a crash of the machine, the file may hold zeros instead of the end of the
//! record. A record without an end and a record with zeros at the end are both [`Next::Torn`]. Any other record with a
//! wrong checksum is [`Next::Damaged`].

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

/// Size of the length and its CRC at the start of a record.
pub(super) const HEADER_BYTES: usize = 12;
/// Size of the CRC at the end of a record. It is the CRC of the data.
const FOOTER_BYTES: u64 = 4;
/// `crc32c::kMaskDelta`. CRCs are masked because a CRC over data that contains CRCs would be weak.
const MASK_DELTA: u32 = 0xa282_ead8;

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// The header of a record: the length and its CRC.
pub(super) fn header(length: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&length.to_le_bytes());
    bytes[8..].copy_from_slice(&masked_crc(&length.to_le_bytes()).to_le_bytes());
    bytes
}

/// Frames `data` as a whole record.
pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let mut bytes = header(data.len() as u64).to_vec();
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(&masked_crc(data).to_le_bytes());
    bytes
}

/// What the reader found at its position.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The data of a record.
    Record(Vec<u8>),
    /// The file ends here.
    End,
    /// The rest of the file is an incomplete record.
    Torn,
    /// The record is damaged. Holds the reason.
    Damaged(&'static str),
}

/// Reads the records of a file in order.
pub(super) struct RecordReader {
    input: BufReader<File>,
    offset: u64,
    length: u64,
}

impl RecordReader {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self { input: BufReader::new(file), offset: 0, length })
    }

    /// Offset of the next record in the file.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads the next record. After a result other than [`Next::Record`], do not call this function again.
    pub(super) fn next(&mut self) -> io::Result<Next> {
        let left = self.length - self.offset;
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
            return self.torn_or("the length of a record does not match its checksum", HEADER_BYTES as u64);
        }
        let Some(bytes) = data_bytes.checked_add(HEADER_BYTES as u64 + FOOTER_BYTES).filter(|bytes| *bytes <= left)
        else {
            return Ok(Next::Torn);
        };
        // `data_bytes` is less than the length of the rest of the file, so a forged length cannot cause a huge
        // allocation.
        let mut data = vec![0; data_bytes as usize];
        self.input.read_exact(&mut data)?;
        let mut footer = [0; FOOTER_BYTES as usize];
        self.input.read_exact(&mut footer)?;
        if u32::from_le_bytes(footer) != masked_crc(&data) {
            return self.torn_or("a record does not match its checksum", bytes);
        }
        self.offset += bytes;
        Ok(Next::Record(data))
    }

    /// Classifies a record or header of `bytes` bytes whose checksum is wrong. If its last byte and all later bytes of
    /// the file are zeros, it is torn. Otherwise it is damaged.
    fn torn_or(&mut self, damage: &'static str, bytes: u64) -> io::Result<Next> {
        self.input.seek(SeekFrom::Start(self.offset + bytes - 1))?;
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
