//! The density of one sample along the denoising steps: small maps, from noise to the answer.
//!
//! Each map shows √(p / peak), the peak being its own: a quarter of it is half as light. The ring is the truth.

use tiny_skia::{Color, PathBuilder, Pixmap, PremultipliedColorU8};

use super::glyphs;
use super::png::Picture;
use super::world::{Map, canvas, picture, stroke};
use crate::geo::{Degrees, Place, UnitVector};

/// Points of a field from west to east; half as many from north to south: 2 degrees each.
const FIELD_WIDTH: usize = 180;
const FIELD_HEIGHT: usize = FIELD_WIDTH / 2;
/// Size of one map, and the space between two, pixels.
const MAP_WIDTH: u32 = 400;
const MAP_HEIGHT: u32 = MAP_WIDTH / 2;
const GAP: u32 = 6;
/// Maps side by side.
const COLUMNS: u32 = 4;
/// Steps from dark to light: as many as the eye tells apart, and a file half the size.
const LEVELS: f32 = 64.0;
const SHORE: [u8; 4] = [0xff, 0xff, 0xff, 0x60];
const TRUTH: [u8; 4] = [0x3f, 0xff, 0xe0, 0xff];
/// Behind what must be seen on light and dark.
const SHADOW: [u8; 4] = [0x10, 0x10, 0x20, 0xd0];
/// From nothing to the peak: matplotlib's "magma" (CC0) at even steps.
const SHADES: [[f32; 3]; 7] = [
    [0.0, 0.0, 4.0],
    [40.0, 17.0, 89.0],
    [101.0, 26.0, 128.0],
    [165.0, 47.0, 125.0],
    [229.0, 80.0, 100.0],
    [251.0, 155.0, 106.0],
    [252.0, 253.0, 191.0],
];

/// What the network believes at one step of a chain.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// The timestep at which it was asked.
    pub timestep: usize,
    /// Logarithms of the density at [`field_points`], up to a constant.
    pub log_density: Vec<f32>,
}

/// Where a [`Frame`] wants the density: row after row from the north, each from west to east.
pub fn field_points() -> Vec<UnitVector> {
    let step = 360.0 / FIELD_WIDTH as f64;
    let rows = (0..FIELD_HEIGHT).map(|row| 90.0 - (row as f64 + 0.5) * step);
    let point = |latitude: f64, column: usize| {
        let longitude = -180.0 + (column as f64 + 0.5) * step;
        UnitVector::from(Place::new(Degrees(latitude), Degrees(longitude)).expect("middles of cells lie on Earth"))
    };
    rows.flat_map(|latitude| (0..FIELD_WIDTH).map(move |column| point(latitude, column))).collect()
}

/// Maps of a sample, in the order of `frames`; what is not a finite number is dark.
///
/// # Panics
/// Where there is no frame, or one is not as long as [`field_points`].
pub fn density_strip(frames: &[Frame], truth: UnitVector) -> Picture {
    assert!(!frames.is_empty(), "a strip has a frame");
    let count = frames.len() as u32;
    let (columns, rows) = (count.min(COLUMNS), count.div_ceil(COLUMNS));
    let (width, height) = (columns * (MAP_WIDTH + GAP) - GAP, rows * (MAP_HEIGHT + GAP) - GAP);
    let mut pixmap = canvas(width, height, [0xff, 0xff, 0xff]);
    for (place, frame) in (0..).zip(frames) {
        let left = (place % COLUMNS) * (MAP_WIDTH + GAP);
        let top = (place / COLUMNS) * (MAP_HEIGHT + GAP);
        draw_field(&mut pixmap, &frame.log_density, [left, top]);
        draw_over(&mut pixmap, frame.timestep, truth, [left, top]);
    }
    picture(&pixmap)
}

fn draw_field(pixmap: &mut Pixmap, log_density: &[f32], [left, top]: [u32; 2]) {
    assert_eq!(log_density.len(), FIELD_WIDTH * FIELD_HEIGHT, "a value for every point");
    let peak = log_density.iter().copied().filter(|value| value.is_finite()).fold(f32::NEG_INFINITY, f32::max);
    let shade = |value: &f32| if value.is_finite() { ((value - peak) / 2.0).exp() } else { 0.0 };
    let shades: Vec<f32> = log_density.iter().map(shade).collect();
    let width = pixmap.width();
    let scale = FIELD_WIDTH as f32 / MAP_WIDTH as f32;
    for y in 0..MAP_HEIGHT {
        for x in 0..MAP_WIDTH {
            let value = between(&shades, (x as f32 + 0.5) * scale - 0.5, (y as f32 + 0.5) * scale - 0.5);
            pixmap.pixels_mut()[((top + y) * width + left + x) as usize] = colored(value);
        }
    }
}

/// Bilinear; round the Earth from west to east, clamped at the poles.
fn between(shades: &[f32], x: f32, y: f32) -> f32 {
    let (west, north) = (x.floor(), y.floor());
    let (east_share, south_share) = (x - west, y - north);
    let at = |column: f32, row: f32| {
        let column = (column as i64).rem_euclid(FIELD_WIDTH as i64) as usize;
        shades[row.clamp(0.0, FIELD_HEIGHT as f32 - 1.0) as usize * FIELD_WIDTH + column]
    };
    let along = |row: f32| at(west, row) * (1.0 - east_share) + at(west + 1.0, row) * east_share;
    along(north) * (1.0 - south_share) + along(north + 1.0) * south_share
}

fn colored(value: f32) -> PremultipliedColorU8 {
    let level = (value.clamp(0.0, 1.0) * LEVELS).round() / LEVELS;
    let place = level * (SHADES.len() - 1) as f32;
    let below = (place as usize).min(SHADES.len() - 2);
    let share = place - below as f32;
    let [red, green, blue] = std::array::from_fn(|channel| {
        (SHADES[below][channel] * (1.0 - share) + SHADES[below + 1][channel] * share).round() as u8
    });
    PremultipliedColorU8::from_rgba(red, green, blue, 255).expect("no colour is above an opaque alpha")
}

/// Shores, the truth and the timestep. A picture of its own, so that nothing reaches into the next map.
fn draw_over(pixmap: &mut Pixmap, timestep: usize, truth: UnitVector, [left, top]: [u32; 2]) {
    let map = Map { left: 0.0, top: 0.0, width: MAP_WIDTH as f32, height: MAP_HEIGHT as f32 };
    let mut over = Pixmap::new(MAP_WIDTH, MAP_HEIGHT).expect("sizes are constants above 0");
    if let Some(land) = map.land() {
        stroke(&mut over, &land, 0.8, SHORE);
    }
    let [x, y] = map.pixel(truth);
    if let Some(ring) = PathBuilder::from_circle(x, y, 7.0) {
        stroke(&mut over, &ring, 3.6, SHADOW);
        stroke(&mut over, &ring, 1.6, TRUTH);
    }
    let words = format!("t={timestep}");
    let [red, green, blue, alpha] = SHADOW;
    glyphs::write(&mut over, &words, [8.0, 8.0], 2.0, Color::from_rgba8(red, green, blue, alpha));
    glyphs::write(&mut over, &words, [6.0, 6.0], 2.0, Color::WHITE);
    let paint = tiny_skia::PixmapPaint::default();
    let place = tiny_skia::Transform::identity();
    pixmap.draw_pixmap(left.cast_signed(), top.cast_signed(), over.as_ref(), &paint, place, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn light_is_where_the_density_is_high() {
        let points = field_points();
        let peak = points[20 * FIELD_WIDTH + 33];
        let mut log_density: Vec<f32> = points.iter().map(|point| -30.0 * point.angle(peak) as f32).collect();
        log_density[0] = f32::NAN;
        let mut pixmap = canvas(MAP_WIDTH, MAP_HEIGHT, [0, 0, 0]);
        draw_field(&mut pixmap, &log_density, [0, 0]);
        let at = |column: f32, row: f32| {
            let scale = MAP_WIDTH as f32 / FIELD_WIDTH as f32;
            let pixel = pixmap.pixel((column * scale) as u32, (row * scale) as u32).expect("on the map");
            [pixel.red(), pixel.green(), pixel.blue()].map(u32::from).iter().sum::<u32>()
        };
        assert!(at(33.5, 20.5) > 600, "{}", at(33.5, 20.5));
        assert!(at(36.5, 20.5) < at(34.5, 20.5) && at(34.5, 20.5) < at(33.5, 20.5));
        assert_eq!((at(0.2, 0.2), at(120.0, 70.0)), (4, 4));
    }

    #[test]
    fn the_field_goes_round_the_earth() {
        let points = field_points();
        assert_eq!(points.len(), FIELD_WIDTH * FIELD_HEIGHT);
        let shades: Vec<f32> = (0..points.len()).map(|index| (index % FIELD_WIDTH == 0) as u8 as f32).collect();
        assert_eq!(between(&shades, -0.5, 10.0), between(&shades, FIELD_WIDTH as f32 - 0.5, 10.0));
        assert_eq!(between(&shades, -0.5, 10.0), 0.5);
    }

    #[test]
    fn maps_stand_four_in_a_row() {
        let frame = Frame { timestep: 7, log_density: vec![0.0; FIELD_WIDTH * FIELD_HEIGHT] };
        let size = |count: usize| {
            let picture = density_strip(&vec![frame.clone(); count], UnitVector::NORTH_POLE);
            (picture.width, picture.height)
        };
        assert_eq!([1, 4, 5, 8].map(size), [(400, 200), (1618, 200), (1618, 406), (1618, 406)]);
    }
}
