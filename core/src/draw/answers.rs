//! A map of predictions: a line from each true place to the predicted place, coloured by the error.
//!
//! The dark end of a line is the truth, the coloured end is the answer. The colour changes at errors of 25, 200, 750
//! and 2500 km. The legend below the map lists the colours.

use tiny_skia::{Color, PathBuilder, Pixmap, Rect};

use super::glyphs;
use super::png::Picture;
use super::world::{Map, canvas, fill, picture, stroke};
use crate::geo::UnitVector;

const WIDTH: u32 = 1280;
const MAP_HEIGHT: u32 = WIDTH / 2;
const LEGEND_HEIGHT: u32 = 40;
const SEA: [u8; 3] = [0xf6, 0xf9, 0xfc];
const LAND: [u8; 4] = [0xd3, 0xd8, 0xdc, 0xff];
const SHORE: [u8; 4] = [0xb4, 0xba, 0xc0, 0xff];
const TRUTH: [u8; 4] = [0x26, 0x2b, 0x33, 0xff];
const TEXT: [u8; 3] = [0x40, 0x46, 0x50];
/// For each range of errors: its upper limit (km), its label in the legend, and its colour (RGB). The last range has no
/// limit.
const COLORS: [(f64, &str, [u8; 3]); 5] = [
    (25.0, "<25 km", [0x00, 0x68, 0x37]),
    (200.0, "<200 km", [0x31, 0xa3, 0x54]),
    (750.0, "<750 km", [0xe6, 0xa8, 0x00]),
    (2500.0, "<2500 km", [0xf0, 0x6c, 0x1c]),
    (f64::INFINITY, ">2500 km", [0xc2, 0x1f, 0x3a]),
];

/// The largest number of answers worth drawing. More answers would hide each other.
pub const ANSWERS_MAX: usize = 300;

/// The true and the predicted place of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    /// The true place.
    pub truth: UnitVector,
    /// The predicted place.
    pub answer: UnitVector,
}

impl Answer {
    fn error_km(&self) -> f64 {
        self.truth.distance(self.answer).0
    }

    fn color(&self) -> [u8; 3] {
        let error_km = self.error_km();
        COLORS.iter().find(|(below_km, ..)| error_km < *below_km).map_or(COLORS[4].2, |(_, _, color)| *color)
    }
}

/// Draws a map of answers. Answers with small errors are drawn over answers with large errors.
pub fn answers_map(answers: &[Answer]) -> Picture {
    let map = Map { left: 0.0, top: 0.0, width: WIDTH as f32, height: MAP_HEIGHT as f32 };
    let mut pixmap = canvas(WIDTH, MAP_HEIGHT + LEGEND_HEIGHT, SEA);
    if let Some(land) = map.land() {
        fill(&mut pixmap, &land, LAND);
        stroke(&mut pixmap, &land, 0.7, SHORE);
    }
    let mut sorted = answers.to_vec();
    sorted.sort_by(|one, other| other.error_km().total_cmp(&one.error_km()));
    for answer in &sorted {
        let [red, green, blue] = answer.color();
        if let Some(line) = map.great_circle(answer.truth, answer.answer) {
            stroke(&mut pixmap, &line, 1.3, [red, green, blue, 0xa0]);
        }
    }
    for answer in &sorted {
        let [red, green, blue] = answer.color();
        dot(&mut pixmap, map.pixel(answer.answer), 2.8, [red, green, blue, 0xff]);
        dot(&mut pixmap, map.pixel(answer.truth), 2.0, TRUTH);
    }
    draw_legend(&mut pixmap);
    picture(&pixmap)
}

fn dot(pixmap: &mut Pixmap, [x, y]: [f32; 2], radius: f32, color: [u8; 4]) {
    if let Some(circle) = PathBuilder::from_circle(x, y, radius) {
        fill(pixmap, &circle, color);
    }
}

fn draw_legend(pixmap: &mut Pixmap) {
    let (dot_pixels, box_width, step) = (2.0, 28.0, WIDTH as f32 / COLORS.len() as f32);
    let middle = MAP_HEIGHT as f32 + LEGEND_HEIGHT as f32 / 2.0;
    let strip = Rect::from_xywh(0.0, MAP_HEIGHT as f32, WIDTH as f32, LEGEND_HEIGHT as f32);
    if let Some(strip) = strip {
        fill(pixmap, &PathBuilder::from_rect(strip), [0xff, 0xff, 0xff, 0xff]);
    }
    for (index, (_, label, [red, green, blue])) in COLORS.iter().enumerate() {
        let entry_width = box_width + 10.0 + glyphs::width(label, dot_pixels);
        let left = step * index as f32 + (step - entry_width) / 2.0;
        if let Some(sample) = Rect::from_xywh(left.round(), middle - 7.0, box_width, 14.0) {
            fill(pixmap, &PathBuilder::from_rect(sample), [*red, *green, *blue, 0xff]);
        }
        let corner = [(left + box_width + 10.0).round(), (middle - glyphs::HEIGHT * dot_pixels / 2.0).round()];
        glyphs::write(pixmap, label, corner, dot_pixels, Color::from_rgba8(TEXT[0], TEXT[1], TEXT[2], 255));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::{Degrees, Place};

    fn point(latitude: f64, longitude: f64) -> UnitVector {
        Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are in range").into()
    }

    #[test]
    fn colours_change_at_the_accuracy_thresholds() {
        let truth = point(10.0, 20.0);
        for (thresholds, distance_km) in
            [(0, 24.9), (1, 25.1), (1, 199.0), (2, 201.0), (3, 751.0), (4, 2501.0), (4, 19_000.0)]
        {
            let answer = truth.displace(Degrees(30.0), crate::geo::Km(distance_km)).expect("both numbers are finite");
            assert_eq!(Answer { truth, answer }.color(), COLORS[thresholds].2, "{distance_km} km");
        }
    }

    #[test]
    fn drawing_is_deterministic_and_zero_answers_still_give_a_map() {
        let answers = [Answer { truth: point(50.0, 10.0), answer: point(-30.0, 140.0) }];
        assert_eq!(answers_map(&answers), answers_map(&answers));
        assert_ne!(answers_map(&answers).png, answers_map(&[]).png);
        assert_eq!((answers_map(&[]).width, answers_map(&[]).height), (1280, 680));
    }
}
