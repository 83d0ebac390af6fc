//! Accuracy over the distance to the nearest training photo, as SVG: one panel per threshold, one line per method.
//!
//! The plot is SVG instead of PNG, because its text needs letters that the bitmap font of the maps does not have.

use std::fmt::Write as _;

use crate::metrics::{ByDistance, DistanceBin};

/// Size of a panel with its margins, and of the area inside the axes, in pixels.
const PANEL: [f64; 2] = [330.0, 250.0];
const AREA: [f64; 2] = [270.0, 170.0];
/// Position of the upper left corner of this area in its panel.
const CORNER: [f64; 2] = [48.0, 34.0];
/// Height of the legend above the panels.
const LEGEND: f64 = 64.0;
const COLUMNS: usize = 3;
/// Colours of the methods. Colour-blind readers can tell them apart (palette of Okabe and Ito).
const COLORS: [&str; 4] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];
/// The mark of a bin with fewer rows than this is hollow, because its percentage says little.
const FEW_ROWS: usize = 10;

/// Draws the curves. `names` are the names of the methods in the legend, in the order of the curves.
pub fn distance_curves(found: &ByDistance, names: &[String]) -> String {
    let panels = found.thresholds_km.len();
    let [width, height] = [COLUMNS.min(panels) as f64, panels.div_ceil(COLUMNS) as f64];
    let [width, height] = [(width * PANEL[0]).max(2.0 * PANEL[0]), LEGEND + height * PANEL[1]];
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\" fill=\"#333\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"14\">Accuracy over the distance to the nearest training photo</text>\n"
    );
    for (at, name) in names.iter().enumerate() {
        let (x, color) = (16.0 + 190.0 * at as f64, COLORS[at % COLORS.len()]);
        let _ = writeln!(
            svg,
            "<circle cx=\"{x}\" cy=\"38\" r=\"4\" fill=\"{color}\"/><text x=\"{}\" y=\"42\">{}</text>",
            x + 9.0,
            escaped(name)
        );
    }
    let _ = writeln!(svg, "<text x=\"12\" y=\"60\" fill=\"#777\">hollow: fewer than {FEW_ROWS} photos</text>");
    for threshold in 0..panels {
        let [column, row] = [threshold % COLUMNS, threshold / COLUMNS].map(|at| at as f64);
        let [x, y] = [column * PANEL[0] + CORNER[0], LEGEND + row * PANEL[1] + CORNER[1]];
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">\n{}</g>", panel(found, threshold));
    }
    svg + "</svg>\n"
}

/// The panel of one threshold. The origin of its coordinates is the upper left corner of the area inside the axes.
fn panel(found: &ByDistance, threshold: usize) -> String {
    let [width, height] = AREA;
    let mut svg = format!(
        "<text x=\"0\" y=\"-12\" font-size=\"12\">% of photos within {} km</text>\n",
        found.thresholds_km[threshold]
    );
    let y = |percent: f64| height * (1.0 - percent / 100.0);
    for percent in [0.0, 25.0, 50.0, 75.0, 100.0] {
        let _ = writeln!(
            svg,
            "<path d=\"M0 {0}H{width}\" stroke=\"#ddd\"/><text x=\"-6\" y=\"{1}\" text-anchor=\"end\">{percent}</text>",
            y(percent),
            y(percent) + 4.0
        );
    }
    let step = width / found.bins.len() as f64;
    // Every second limit is a power of ten.
    for (at, DistanceBin { from_km, .. }) in found.bins.iter().enumerate().skip(1).step_by(2) {
        let (x, below) = (step * at as f64, height + 5.0);
        let label = if *from_km < 0.999 { format!("{:.0} m", 1000.0 * from_km) } else { format!("{from_km:.0} km") };
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {height}V{below}\" stroke=\"#333\"/><text x=\"{x:.1}\" y=\"{}\" \
             text-anchor=\"middle\" font-size=\"10\">{label}</text>",
            below + 12.0
        );
    }
    for (curve, color) in found.curves.iter().zip(COLORS.iter().cycle()) {
        let percents = curve.percent[threshold].iter().zip(&found.bins).enumerate();
        let marks: Vec<(f64, f64, bool)> = percents
            .filter_map(|(at, (percent, bin))| Some((step * (at as f64 + 0.5), y((*percent)?), bin.rows < FEW_ROWS)))
            .collect();
        let line: Vec<String> = marks.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\"/>", line.join(" "));
        for (x, y, is_hollow) in marks {
            let fill = if is_hollow { "#fff" } else { color };
            let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" stroke=\"{color}\" fill=\"{fill}\"/>");
        }
    }
    svg
}

/// Text for SVG.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_panel_has_a_line_per_method_and_bins_with_few_rows_are_hollow() {
        let nearest_km: Vec<f32> = (0..30).map(|row| if row < 20 { 0.5 } else { 50.0 + row as f32 }).collect();
        let nearest_km = [nearest_km, vec![2000.0]].concat();
        let [near, far] = [vec![0.5; 31], vec![100.0; 31]];
        let methods = [("retrieval".to_owned(), near.as_slice()), ("locdiff".to_owned(), far.as_slice())];
        let found = ByDistance::new(&nearest_km, &[1.0, 25.0, 200.0, 750.0], &methods);
        let svg = distance_curves(&found, &["A & B".to_owned(), "LocDiff".to_owned()]);
        assert_eq!(svg.matches("<polyline").count(), 8);
        assert!(svg.contains("A &amp; B") && svg.contains(">100 m<") && svg.contains(">1000 km<"), "{svg}");
        // Each of the two methods has a mark for the bin of one photo in each of the four panels.
        assert_eq!(svg.matches("fill=\"#fff\"/>").count() - 1, 8, "{svg}");
        // At 1 km, retrieval is right everywhere and LocDiff nowhere.
        assert!(
            svg.contains("cy=\"0.0\" r=\"3\" stroke=\"#0072b2\"")
                && svg.contains("cy=\"170.0\" r=\"3\" stroke=\"#e69f00\"")
        );
    }
}
