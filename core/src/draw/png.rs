//! A minimal PNG encoder for eight-bit RGB. `docs/decisions/0010-pictures.md` explains why no crate is used.
//!
//! Source: PNG specification, third edition (W3C, 2025), sections 5, 9 and 11.

use std::io::Write;

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};

const SIGNATURE: [u8; 8] = [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n'];
/// Bytes per pixel.
const PIXEL_BYTES: usize = 3;
/// The end of the image header: bit depth 8, colour type 2 (RGB), compression method 0 and filter method 0 (PNG defines
/// no others), and interlace method 0 (none).
const FORMAT: [u8; 5] = [8, 2, 0, 0, 0];

/// An encoded PNG file and its size in pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// The bytes of the PNG file.
    pub png: Vec<u8>,
}

impl Picture {
    /// Encodes the pixels in `rgb`: rows from top to bottom, three bytes per pixel.
    ///
    /// # Panics
    /// If `rgb` does not hold exactly `width × height` pixels, or the picture is empty.
    pub fn new(width: u32, height: u32, rgb: &[u8]) -> Self {
        let row_bytes = width as usize * PIXEL_BYTES;
        assert!(row_bytes > 0 && rgb.len() == row_bytes * height as usize && height > 0, "not {width} x {height}");
        // Flat areas compress best without a filter, and gradients compress best as differences. Try both, and keep the
        // shorter result.
        let plain: Vec<u8> = rgb.chunks_exact(row_bytes).flat_map(|row| [&[0], row].concat()).collect();
        let candidates = [compressed(&plain), compressed(&filtered(rgb, row_bytes))];
        let data = candidates.iter().min_by_key(|data| data.len()).expect("`candidates` has two elements");
        let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
        header.extend(FORMAT);
        let png = [SIGNATURE.to_vec(), chunk(b"IHDR", &header), chunk(b"IDAT", data), chunk(b"IEND", &[])];
        Self { width, height, png: png.concat() }
    }
}

fn filtered(rgb: &[u8], row_bytes: usize) -> Vec<u8> {
    let above = std::iter::once(vec![0; row_bytes]).chain(rgb.chunks_exact(row_bytes).map(<[u8]>::to_vec));
    rgb.chunks_exact(row_bytes).zip(above).flat_map(|(row, above)| best_filter(row, &above)).collect()
}

/// Tries three filters on a row: leave it unchanged, subtract the pixels to the left, or subtract the row above.
/// Returns the result with the smallest sum of absolute values. The specification recommends this heuristic (section
/// 12.7).
fn best_filter(row: &[u8], above: &[u8]) -> Vec<u8> {
    let left = [&[0; PIXEL_BYTES][..], row].concat();
    let filter_row = |kind: u8, other: &[u8]| -> Vec<u8> {
        std::iter::once(kind).chain(row.iter().zip(other).map(|(byte, other)| byte.wrapping_sub(*other))).collect()
    };
    let filters = [filter_row(0, &vec![0; row.len()]), filter_row(1, &left), filter_row(2, above)];
    let size = |row: &Vec<u8>| row[1..].iter().map(|byte| u64::from(byte.cast_signed().unsigned_abs())).sum::<u64>();
    filters.into_iter().min_by_key(size).expect("`filters` has three elements")
}

fn compressed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.expect("writing to a Vec cannot fail")
}

fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let checked = [kind, data].concat();
    let mut crc = Crc::new();
    crc.update(&checked);
    let length = u32::try_from(data.len()).expect("a picture is smaller than 4 GiB");
    [&length.to_be_bytes(), checked.as_slice(), &crc.sum().to_be_bytes()].concat()
}
