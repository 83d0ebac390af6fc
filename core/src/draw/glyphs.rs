//! A tiny bitmap font of five by seven dots. It has only the characters that labels on maps need.

use tiny_skia::{Color, Paint, Pixmap, Rect, Transform};

/// The dots of each character: seven rows from top to bottom, with five bits per row. The highest bit is the leftmost
/// dot.
const GLYPHS: [(char, [u8; 7]); 16] = [
    ('0', [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110]),
    ('1', [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110]),
    ('2', [0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111]),
    ('3', [0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110]),
    ('4', [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010]),
    ('5', [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110]),
    ('6', [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110]),
    ('7', [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000]),
    ('8', [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110]),
    ('9', [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100]),
    ('k', [0b10000, 0b10000, 0b10010, 0b10100, 0b11000, 0b10100, 0b10010]),
    ('m', [0b00000, 0b00000, 0b11010, 0b10101, 0b10101, 0b10101, 0b10101]),
    ('t', [0b01000, 0b01000, 0b11100, 0b01000, 0b01000, 0b01001, 0b00110]),
    ('=', [0b00000, 0b00000, 0b11111, 0b00000, 0b11111, 0b00000, 0b00000]),
    ('<', [0b00010, 0b00100, 0b01000, 0b10000, 0b01000, 0b00100, 0b00010]),
    ('>', [0b01000, 0b00100, 0b00010, 0b00001, 0b00010, 0b00100, 0b01000]),
];
/// Distance from one character to the next, in dots.
const ADVANCE: f32 = 6.0;
/// Height of a character in dots.
pub(super) const HEIGHT: f32 = 7.0;

/// Writes `text` with its upper left corner at (x, y). Each dot is `dot` pixels wide. Unknown characters are left
/// blank.
pub(super) fn write(pixmap: &mut Pixmap, text: &str, [x, y]: [f32; 2], dot: f32, color: Color) {
    let mut paint = Paint { anti_alias: false, ..Paint::default() };
    paint.set_color(color);
    for (index, letter) in text.chars().enumerate() {
        let Some((_, rows)) = GLYPHS.iter().find(|(glyph, _)| *glyph == letter) else { continue };
        let dots = (0..7).flat_map(|row| (0..5).map(move |column| (row, column)));
        for (row, column) in dots.filter(|(row, column)| rows[*row] >> (4 - column) & 1 == 1) {
            let left = x + dot * (index as f32 * ADVANCE + column as f32);
            if let Some(rect) = Rect::from_xywh(left, y + dot * row as f32, dot, dot) {
                pixmap.fill_rect(rect, &paint, Transform::identity(), None);
            }
        }
    }
}

/// Width of `text` in pixels, if each dot is `dot` pixels wide.
pub(super) fn width(text: &str, dot: f32) -> f32 {
    text.chars().count() as f32 * ADVANCE * dot
}
