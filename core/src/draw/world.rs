//! The equirectangular projection, land, and lines that cross the 180th meridian.
//!
//! Invariant: longitudes along a line continue beyond ±180° instead of jumping. A line that leaves the map on one side
//! is drawn a second time, shifted by 360°, so that it enters the map on the other side.

use std::sync::LazyLock;

use tiny_skia::{FillRule, Paint, Path, PathBuilder, Pixmap, Stroke, Transform};

use super::png::Picture;
use crate::geo::{Place, UnitVector};

/// Outlines of land as closed rings of (longitude, latitude) in degrees.
static LAND: LazyLock<Vec<Vec<[f64; 2]>>> = LazyLock::new(|| rings(include_str!("coastline.txt")));
/// For each band of one degree of latitude, from south to north: the edges of the outlines that touch the band.
static EDGES: LazyLock<Vec<Vec<[[f64; 2]; 2]>>> = LazyLock::new(|| {
    let mut bands = vec![Vec::new(); 181];
    for ring in LAND.iter() {
        for (from, to) in ring.iter().zip(ring.iter().cycle().skip(1)) {
            let (south, north) = (from[1].min(to[1]), from[1].max(to[1]));
            bands[band(south)..=band(north)].iter_mut().for_each(|edges| edges.push([*from, *to]));
        }
    }
    bands
});
/// Angle between successive points of a drawn great circle, in radians: about 2 degrees.
const ARC_STEP: f64 = 0.035;

fn rings(text: &str) -> Vec<Vec<[f64; 2]>> {
    let number = |text: &str| text.parse::<f64>().expect("coastline.txt holds numbers") / 100.0;
    let point = |text: &str| {
        let (longitude, latitude) = text.split_once(',').expect("coastline.txt holds pairs");
        [number(longitude), number(latitude)]
    };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().map(point).collect()).collect()
}

/// The outlines of land as closed rings of (longitude, latitude) in degrees. Longitudes continue beyond ±180° where a
/// ring crosses that meridian.
pub fn land_outlines() -> &'static [Vec<[f64; 2]>] {
    &LAND
}

/// The band of [`EDGES`] that a latitude is in.
fn band(latitude: f64) -> usize {
    (latitude + 90.0) as usize
}

/// Whether a place is on land, by Natural Earth's outlines at 1:110 million. These are coarse: the shore may be tens of
/// km off, small islands are missing, and lakes count as land.
pub fn is_land(place: Place) -> bool {
    let (latitude, longitude) = (place.latitude().0, place.longitude().0);
    // A place is on land if a line from it to the east crosses an odd number of shores. Outlines that cross the 180th
    // meridian have longitudes beyond ±180°, so each outline is also tried a full turn farther east and west.
    let is_crossed = |[from, to]: &&[[f64; 2]; 2]| (from[1] > latitude) != (to[1] > latitude);
    let crossings = EDGES[band(latitude)].iter().filter(is_crossed).map(|[from, to]| {
        let shore = from[0] + (latitude - from[1]) / (to[1] - from[1]) * (to[0] - from[0]);
        [-360.0, 0.0, 360.0].into_iter().filter(|turn| shore + turn > longitude).count()
    });
    crossings.sum::<usize>() % 2 == 1
}

/// The rectangle of a map within a picture, in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Map {
    pub(super) left: f32,
    pub(super) top: f32,
    pub(super) width: f32,
    pub(super) height: f32,
}

impl Map {
    /// The position of a point in the picture, in pixels.
    pub(super) fn pixel(&self, point: UnitVector) -> [f32; 2] {
        let place = Place::from(point);
        self.at([place.longitude().0, place.latitude().0])
    }

    fn at(&self, [longitude, latitude]: [f64; 2]) -> [f32; 2] {
        let (east, south) = ((longitude + 180.0) / 360.0, (90.0 - latitude) / 180.0);
        [self.left + east as f32 * self.width, self.top + south as f32 * self.height]
    }

    /// The outlines of land. Land that crosses the 180th meridian appears on both sides of the map.
    pub(super) fn land(&self) -> Option<Path> {
        let mut builder = PathBuilder::new();
        for ring in LAND.iter() {
            self.on_both_sides(&mut builder, ring, true);
        }
        builder.finish()
    }

    /// The shorter great-circle arc between two points. An arc that crosses the 180th meridian appears on both sides of
    /// the map.
    pub(super) fn great_circle(&self, from: UnitVector, to: UnitVector) -> Option<Path> {
        let mut builder = PathBuilder::new();
        self.on_both_sides(&mut builder, &unwrapped(&arc(from, to)), false);
        builder.finish()
    }

    fn on_both_sides(&self, builder: &mut PathBuilder, points: &[[f64; 2]], is_ring: bool) {
        let (west, east) =
            points.iter().fold((0.0_f64, 0.0_f64), |(west, east), point| (west.min(point[0]), east.max(point[0])));
        for turn in [-360.0, 0.0, 360.0] {
            let is_seen = turn == 0.0 || (turn > 0.0 && west < -180.0) || (turn < 0.0 && east > 180.0);
            let mut shifted = points.iter().map(|[longitude, latitude]| self.at([longitude + turn, *latitude]));
            let Some([x, y]) = shifted.next().filter(|_| is_seen) else { continue };
            builder.move_to(x, y);
            shifted.for_each(|[x, y]| builder.line_to(x, y));
            if is_ring {
                builder.close();
            }
        }
    }
}

/// Points along the shorter great-circle arc from `from` to `to`, including both. Between antipodes the arc is
/// arbitrary.
fn arc(from: UnitVector, to: UnitVector) -> Vec<UnitVector> {
    let angle = from.angle(to);
    let steps = (angle / ARC_STEP).ceil().max(1.0) as usize;
    let (start, end, sine) = (from.xyz(), to.xyz(), angle.sin());
    let between = |step: usize| {
        let passed = step as f64 / steps as f64;
        let weights = [((1.0 - passed) * angle).sin() / sine, (passed * angle).sin() / sine];
        UnitVector::new(std::array::from_fn(|axis| weights[0] * start[axis] + weights[1] * end[axis])).ok()
    };
    let inner = (1..steps).filter_map(between);
    std::iter::once(from).chain(inner).chain([to]).collect()
}

/// Converts points to (longitude, latitude) with longitudes that continue beyond ±180° instead of jumping.
fn unwrapped(points: &[UnitVector]) -> Vec<[f64; 2]> {
    let mut found: Vec<[f64; 2]> = Vec::with_capacity(points.len());
    for point in points {
        let place = Place::from(*point);
        let longitude = place.longitude().0;
        let turns = found.last().map_or(0.0, |last| ((last[0] - longitude) / 360.0).round());
        found.push([longitude + 360.0 * turns, place.latitude().0]);
    }
    found
}

pub(super) fn fill(pixmap: &mut Pixmap, path: &Path, [red, green, blue, alpha]: [u8; 4]) {
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, alpha);
    pixmap.fill_path(path, &paint, FillRule::EvenOdd, Transform::identity(), None);
}

pub(super) fn stroke(pixmap: &mut Pixmap, path: &Path, width: f32, [red, green, blue, alpha]: [u8; 4]) {
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, alpha);
    pixmap.stroke_path(path, &paint, &Stroke { width, ..Stroke::default() }, Transform::identity(), None);
}

/// A new pixmap filled with one colour.
pub(super) fn canvas(width: u32, height: u32, [red, green, blue]: [u8; 3]) -> Pixmap {
    let mut pixmap = Pixmap::new(width, height).expect("the size is not zero");
    pixmap.fill(tiny_skia::Color::from_rgba8(red, green, blue, 255));
    pixmap
}

/// Encodes a pixmap as PNG. The pixmap must have no transparent pixels.
pub(super) fn picture(pixmap: &Pixmap) -> Picture {
    let rgb: Vec<u8> = pixmap.data().chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
    Picture::new(pixmap.width(), pixmap.height(), &rgb)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::Degrees;

    fn point(latitude: f64, longitude: f64) -> UnitVector {
        Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are in range").into()
    }

    #[test]
    fn an_arc_across_the_180th_meridian_does_not_jump() {
        let line = unwrapped(&arc(point(10.0, 170.0), point(-20.0, -150.0)));
        assert!(line.windows(2).all(|pair| (pair[1][0] - pair[0][0]).abs() < 5.0), "a longitude jumps: {line:?}");
        assert!((line.last().expect("a line has points")[0] - 210.0).abs() < 1e-9, "wrong end: {line:?}");
    }

    #[test]
    fn an_arc_connects_any_two_points() {
        let north = UnitVector::NORTH_POLE;
        for (from, to) in [(north, north), (north, UnitVector::SOUTH_POLE), (point(0.0, 0.0), point(0.0, 180.0))] {
            let points = arc(from, to);
            assert_eq!((points[0], points[points.len() - 1]), (from, to));
        }
    }

    #[test]
    fn known_places_are_land_or_sea() {
        let map = Map { left: 0.0, top: 0.0, width: 720.0, height: 360.0 };
        let mut pixmap = canvas(720, 360, [0, 0, 0]);
        fill(&mut pixmap, &map.land().expect("the map contains land"), [255, 255, 255, 255]);
        let is_drawn_as_land = |latitude: f64, longitude: f64| {
            let [x, y] = map.pixel(point(latitude, longitude));
            pixmap.pixel(x as u32, y as u32).expect("the pixel is on the map").red() > 128
        };
        for (latitude, longitude) in
            [(48.0, 10.0), (-25.0, 135.0), (66.0, -175.0), (67.0, 179.0), (-85.0, 0.0), (-89.0, 120.0), (40.0, -100.0)]
        {
            assert!(is_drawn_as_land(latitude, longitude), "{latitude}, {longitude} is drawn as sea");
            assert!(is_land(point(latitude, longitude).into()), "{latitude}, {longitude} counts as sea");
        }
        for (latitude, longitude) in [(0.0, -30.0), (0.0, 179.0), (40.0, 180.0), (-60.0, 0.0), (30.0, -150.0)] {
            assert!(!is_drawn_as_land(latitude, longitude), "{latitude}, {longitude} is drawn as land");
            assert!(!is_land(point(latitude, longitude).into()), "{latitude}, {longitude} counts as land");
        }
        let land = pixmap.pixels().chunks_exact(720).enumerate().map(|(row, pixels)| {
            let weight = ((90.0 - (row as f64 + 0.5) / 2.0).to_radians()).cos() / 720.0;
            weight * pixels.iter().filter(|pixel| pixel.red() > 128).count() as f64
        });
        // About 29 % of the Earth is land. The Caspian Sea, which the map draws as land, adds less than 0.1 %.
        let share = land.sum::<f64>() * 0.5_f64.to_radians() / 2.0;
        assert!((share - 0.29).abs() < 0.01, "the share of land is {share}, wanted 0.29");
        let grid = crate::geo::fibonacci_grid(10_000);
        let share = grid.iter().filter(|point| is_land(Place::from(**point))).count() as f64 / 10_000.0;
        assert!((share - 0.29).abs() < 0.01, "the share of land in an even grid is {share}, wanted 0.29");
    }
}
