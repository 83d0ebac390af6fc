//! How often radii hold the true place, as SVG: all photos, and photos with similar radii. A dashed line shows the
//! promised share, and vertical lines are 95 % intervals.

use std::fmt::Write as _;

use super::curves::escaped;
use crate::calibration::LEVELS;
use crate::metrics::{CalibrationCheck, RadiusShare};

/// Size of the plot, and of the area inside the axes, in pixels.
const SIZE: [f64; 2] = [660.0, 330.0];
const AREA: [f64; 2] = [590.0, 200.0];
/// Position of the upper left corner of this area.
const CORNER: [f64; 2] = [48.0, 70.0];
/// Colours of the 50 % and the 90 % radius.
const COLORS: [&str; 2] = ["#0072b2", "#e69f00"];

/// Draws the plot. `method` is the name of the method whose answers have the radii.
pub fn calibration_plot(checked: &CalibrationCheck, method: &str) -> String {
    let ([width, height], [x, y]) = (SIZE, CORNER);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\" fill=\"#333\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"14\">% of true places within the radius: {}</text>\n",
        escaped(method)
    );
    for (at, (level, color)) in LEVELS.iter().zip(COLORS).enumerate() {
        let x = 16.0 + 190.0 * at as f64;
        let _ = writeln!(
            svg,
            "<circle cx=\"{x}\" cy=\"40\" r=\"4\" fill=\"{color}\"/><text x=\"{}\" y=\"44\">{:.0} % radius</text>",
            x + 9.0,
            100.0 * level
        );
    }
    let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">\n{}</g>\n</svg>", area(checked));
    svg
}

/// The area inside the axes, with its labels. The origin of its coordinates is its upper left corner.
fn area(checked: &CalibrationCheck) -> String {
    let [width, height] = AREA;
    let y = |share: f64| height * (1.0 - share);
    let mut svg = String::new();
    for percent in [0.0, 25.0, 50.0, 75.0, 100.0] {
        let at = y(percent / 100.0);
        let _ = writeln!(
            svg,
            "<path d=\"M0 {at:.1}H{width}\" stroke=\"#ddd\"/><text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{percent}</text>",
            at + 4.0
        );
    }
    for (level, color) in LEVELS.iter().zip(COLORS) {
        let at = y(*level);
        let _ = writeln!(svg, "<path d=\"M0 {at:.1}H{width}\" stroke=\"{color}\" stroke-dasharray=\"5 4\"/>");
    }
    let label = |from: f64, to: f64| [format!("{from:.0} to"), format!("{to:.0} km")];
    let mut groups: Vec<([String; 2], &[RadiusShare])> = vec![(["all".to_owned(), "photos".to_owned()], &checked.rows)];
    let fifths = checked.fifths.iter();
    groups.extend(fifths.map(|fifth| (label(fifth.from_radius_90_km, fifth.to_radius_90_km), &*fifth.rows)));
    let step = width / groups.len() as f64;
    for (at, (lines, rows)) in groups.iter().enumerate() {
        let middle = step * (at as f64 + 0.5);
        for (line, text) in lines.iter().enumerate() {
            let below = height + 17.0 + 13.0 * line as f64;
            let _ = writeln!(svg, "<text x=\"{middle:.1}\" y=\"{below}\" text-anchor=\"middle\">{text}</text>");
        }
        for ((row, color), offset) in rows.iter().zip(COLORS).zip([-8.0, 8.0]) {
            let (x, [share, lo, hi]) = (middle + offset, [row.share, row.lo, row.hi].map(y));
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {lo:.1}V{hi:.1}\" stroke=\"{color}\" stroke-width=\"2\"/>\
                 <circle cx=\"{x:.1}\" cy=\"{share:.1}\" r=\"4\" fill=\"{color}\"/>"
            );
        }
    }
    let _ = writeln!(
        svg,
        "<path d=\"M{step:.1} 0V{height}\" stroke=\"#bbb\"/><text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">photos by \
         their 90 % radius, a fifth of all photos each</text>",
        (width + step) / 2.0,
        height + 50.0
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::RadiusGroup;

    #[test]
    fn each_group_has_a_mark_per_level_at_its_share() {
        let rows = |share: f64| {
            let row = |level: f64| RadiusShare { level, share, lo: share - 0.1, hi: share + 0.1 };
            LEVELS.map(row).to_vec()
        };
        let fifth = |at: usize| RadiusGroup {
            photos: 7,
            from_radius_90_km: 100.0 * at as f64,
            to_radius_90_km: 100.0 * (at + 1) as f64,
            rows: rows(0.5),
        };
        let checked = CalibrationCheck {
            rows: rows(0.25),
            fifths: (0..5).map(fifth).collect(),
            median_radius_90_km: 1.0,
            constant_radius_90_km: 2.0,
            nll: None,
        };
        let svg = calibration_plot(&checked, "A < B");
        // Two marks in the legend, two for all photos, and two in each fifth.
        assert_eq!(svg.matches("<circle").count(), 14);
        assert_eq!(svg.matches("cy=\"150.0\"").count(), 2, "{svg}");
        assert_eq!(svg.matches("cy=\"100.0\"").count(), 10, "{svg}");
        assert!(svg.contains("A &lt; B") && svg.contains(">300 to<") && svg.contains(">400 km<"), "{svg}");
    }
}
