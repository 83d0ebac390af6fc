//! The density of one sample at successive denoising steps: a strip of small maps, from noise to the answer.
//!
//! Each map shows √(p / peak), where p is the density at a point and peak is the highest density on the same map. A
//! quarter of the peak density is therefore drawn at half brightness. A ring marks the true place.

use tiny_skia::{Color, PathBuilder, Pixmap, PremultipliedColorU8};

use super::glyphs;
use super::png::Picture;
use super::world::{Map, canvas, picture, stroke};
use crate::geo::{Degrees, Place, UnitVector};

/// Number of grid points from west to east, 2 degrees apart. There are half as many from north to south.
const FIELD_WIDTH: usize = 180;
const FIELD_HEIGHT: usize = FIELD_WIDTH / 2;
/// Width and height of one map, and the gap between two maps, in pixels.
const MAP_WIDTH: u32 = 400;
const MAP_HEIGHT: u32 = MAP_WIDTH / 2;
const GAP: u32 = 6;
/// Maps per row.
const COLUMNS: u32 = 4;
/// Number of brightness levels. The eye cannot distinguish more, and the limit halves the file size.
const LEVELS: f32 = 64.0;
const SHORE: [u8; 4] = [0xff, 0xff, 0xff, 0x60];
const TRUTH: [u8; 4] = [0x3f, 0xff, 0xe0, 0xff];
/// Shadow under the ring and the text, which makes them stand out on both light and dark areas.
const SHADOW: [u8; 4] = [0x10, 0x10, 0x20, 0xd0];
/// Colours from zero density to the peak: matplotlib's "magma" (CC0), sampled evenly.
const SHADES: [[f32; 3]; 7] = [
    [0.0, 0.0, 4.0],
    [40.0, 17.0, 89.0],
    [101.0, 26.0, 128.0],
    [165.0, 47.0, 125.0],
    [229.0, 80.0, 100.0],
    [251.0, 155.0, 106.0],
    [252.0, 253.0, 191.0],
];

/// The density that the network predicts at one denoising step.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// The diffusion timestep.
    pub timestep: usize,
    /// Log density at each of [`field_points`], up to a constant.
    pub log_density: Vec<f32>,
}

/// The grid points of a [`Frame`]: rows from north to south, each from west to east.
pub fn field_points() -> Vec<UnitVector> {
    let step = 360.0 / FIELD_WIDTH as f64;
    let rows = (0..FIELD_HEIGHT).map(|row| 90.0 - (row as f64 + 0.5) * step);
    let point = |latitude: f64, column: usize| {
        let longitude = -180.0 + (column as f64 + 0.5) * step;
        UnitVector::from(Place::new(Degrees(latitude), Degrees(longitude)).expect("cell centres are valid coordinates"))
    };
    rows.flat_map(|latitude| (0..FIELD_WIDTH).map(move |column| point(latitude, column))).collect()
}

/// Draws one map per frame, in the order of `frames`. Values that are not finite are drawn like zero density.
///
/// # Panics
/// If there are no frames, or a frame does not have one value per point of [`field_points`].
pub fn density_strip(frames: &[Frame], truth: UnitVector) -> Picture {
    assert!(!frames.is_empty(), "there are no frames, wanted at least one");
    let count = frames.len() as u32;
    let (columns, rows) = (count.min(COLUMNS), count.div_ceil(COLUMNS));
    let (width, height) = (columns * (MAP_WIDTH + GAP) - GAP, rows * (MAP_HEIGHT + GAP) - GAP);
    let mut pixmap = canvas(width, height, [0xff, 0xff, 0xff]);
    for (index, frame) in (0..).zip(frames) {
        let left = (index % COLUMNS) * (MAP_WIDTH + GAP);
        let top = (index / COLUMNS) * (MAP_HEIGHT + GAP);
        draw_density(&mut pixmap, &frame.log_density, [left, top]);
        draw_overlay(&mut pixmap, frame.timestep, truth, [left, top]);
    }
    picture(&pixmap)
}

fn draw_density(pixmap: &mut Pixmap, log_density: &[f32], [left, top]: [u32; 2]) {
    assert_eq!(log_density.len(), FIELD_WIDTH * FIELD_HEIGHT, "a frame does not have one value per grid point");
    let peak = log_density.iter().copied().filter(|value| value.is_finite()).fold(f32::NEG_INFINITY, f32::max);
    let shade = |value: &f32| if value.is_finite() { ((value - peak) / 2.0).exp() } else { 0.0 };
    let shades: Vec<f32> = log_density.iter().map(shade).collect();
    let width = pixmap.width();
    let scale = FIELD_WIDTH as f32 / MAP_WIDTH as f32;
    for y in 0..MAP_HEIGHT {
        for x in 0..MAP_WIDTH {
            let value = interpolate(&shades, (x as f32 + 0.5) * scale - 0.5, (y as f32 + 0.5) * scale - 0.5);
            pixmap.pixels_mut()[((top + y) * width + left + x) as usize] = shade_color(value);
        }
    }
}

/// Bilinear interpolation that wraps around in longitude and is clamped at the poles.
fn interpolate(shades: &[f32], x: f32, y: f32) -> f32 {
    let (west, north) = (x.floor(), y.floor());
    let (east_share, south_share) = (x - west, y - north);
    let at = |column: f32, row: f32| {
        let column = (column as i64).rem_euclid(FIELD_WIDTH as i64) as usize;
        shades[row.clamp(0.0, FIELD_HEIGHT as f32 - 1.0) as usize * FIELD_WIDTH + column]
    };
    let along = |row: f32| at(west, row) * (1.0 - east_share) + at(west + 1.0, row) * east_share;
    along(north) * (1.0 - south_share) + along(north + 1.0) * south_share
}

fn shade_color(value: f32) -> PremultipliedColorU8 {
    let level = (value.clamp(0.0, 1.0) * LEVELS).round() / LEVELS;
    let position = level * (SHADES.len() - 1) as f32;
    let below = (position as usize).min(SHADES.len() - 2);
    let share = position - below as f32;
    let [red, green, blue] = std::array::from_fn(|channel| {
        (SHADES[below][channel] * (1.0 - share) + SHADES[below + 1][channel] * share).round() as u8
    });
    PremultipliedColorU8::from_rgba(red, green, blue, 255).expect("with opaque alpha every colour is valid")
}

/// Draws coastlines, the true place and the timestep. They are drawn on a separate pixmap first, so that nothing spills
/// into the next map.
fn draw_overlay(pixmap: &mut Pixmap, timestep: usize, truth: UnitVector, [left, top]: [u32; 2]) {
    let map = Map { left: 0.0, top: 0.0, width: MAP_WIDTH as f32, height: MAP_HEIGHT as f32 };
    let mut overlay = Pixmap::new(MAP_WIDTH, MAP_HEIGHT).expect("the size is a positive constant");
    if let Some(land) = map.land() {
        stroke(&mut overlay, &land, 0.8, SHORE);
    }
    let [x, y] = map.pixel(truth);
    if let Some(ring) = PathBuilder::from_circle(x, y, 7.0) {
        stroke(&mut overlay, &ring, 3.6, SHADOW);
        stroke(&mut overlay, &ring, 1.6, TRUTH);
    }
    let label = format!("t={timestep}");
    let [red, green, blue, alpha] = SHADOW;
    glyphs::write(&mut overlay, &label, [8.0, 8.0], 2.0, Color::from_rgba8(red, green, blue, alpha));
    glyphs::write(&mut overlay, &label, [6.0, 6.0], 2.0, Color::WHITE);
    let paint = tiny_skia::PixmapPaint::default();
    let transform = tiny_skia::Transform::identity();
    pixmap.draw_pixmap(left.cast_signed(), top.cast_signed(), overlay.as_ref(), &paint, transform, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_are_bright_where_the_density_is_high() {
        let points = field_points();
        let peak = points[20 * FIELD_WIDTH + 33];
        let mut log_density: Vec<f32> = points.iter().map(|point| -30.0 * point.angle(peak) as f32).collect();
        log_density[0] = f32::NAN;
        let mut pixmap = canvas(MAP_WIDTH, MAP_HEIGHT, [0, 0, 0]);
        draw_density(&mut pixmap, &log_density, [0, 0]);
        let at = |column: f32, row: f32| {
            let scale = MAP_WIDTH as f32 / FIELD_WIDTH as f32;
            let pixel = pixmap.pixel((column * scale) as u32, (row * scale) as u32).expect("the pixel is on the map");
            [pixel.red(), pixel.green(), pixel.blue()].map(u32::from).iter().sum::<u32>()
        };
        assert!(at(33.5, 20.5) > 600, "{}", at(33.5, 20.5));
        assert!(at(36.5, 20.5) < at(34.5, 20.5) && at(34.5, 20.5) < at(33.5, 20.5));
        assert_eq!((at(0.2, 0.2), at(120.0, 70.0)), (4, 4));
    }

    #[test]
    fn the_grid_wraps_around_in_longitude() {
        let points = field_points();
        assert_eq!(points.len(), FIELD_WIDTH * FIELD_HEIGHT);
        let shades: Vec<f32> = (0..points.len()).map(|index| (index % FIELD_WIDTH == 0) as u8 as f32).collect();
        assert_eq!(interpolate(&shades, -0.5, 10.0), interpolate(&shades, FIELD_WIDTH as f32 - 0.5, 10.0));
        assert_eq!(interpolate(&shades, -0.5, 10.0), 0.5);
    }

    #[test]
    fn maps_are_laid_out_four_per_row() {
        let frame = Frame { timestep: 7, log_density: vec![0.0; FIELD_WIDTH * FIELD_HEIGHT] };
        let size = |count: usize| {
            let picture = density_strip(&vec![frame.clone(); count], UnitVector::NORTH_POLE);
            (picture.width, picture.height)
        };
        assert_eq!([1, 4, 5, 8].map(size), [(400, 200), (1618, 200), (1618, 406), (1618, 406)]);
    }
}
