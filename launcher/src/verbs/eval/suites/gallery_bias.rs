//! `eval --suite gallery-bias`: counts the gallery points near the true place of each test photo, and does the same for
//! an even grid with as many points. The more points are near, the more the gallery helps retrieval.
//!
//! The paper says "more than n" everywhere. But for n = 1, and for every n within 25 km, its numbers are those of "at
//! least n". The table has both.

use std::path::{Path, PathBuf};

use locdiff_core::geo::{Km, Place, SphereIndex, UnitVector, fibonacci_grid};
use locdiff_core::tables;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::supervisor::Supervisor;
use crate::terminal::{width, wrapped};
use crate::verbs::eval::table::photo_kind;
use crate::verbs::eval::truth::TestPlaces;
use crate::verbs::paths::{geoclip_gallery, require_file};
use crate::verbs::resolve_with_run;

/// The radii around a test place, km.
const RADII_KM: [f64; 2] = [1.0, 25.0];
/// Numbers of points within a radius.
const COUNTS: [usize; 4] = [1, 10, 50, 100];
/// The names of the two lists of points.
const LISTS: [&str; 2] = ["gallery", "grid"];
/// The paper's percentages for Im2GPS3k, with GeoCLIP's gallery: for each list and radius, one for each of `COUNTS`.
const PUBLISHED: [[[f64; 4]; 2]; 2] =
    [[[63.5, 32.7, 14.9, 9.78], [95.2, 75.7, 51.9, 42.0]], [[0.1, 0.0, 0.0, 0.0], [38.9, 0.0, 0.0, 0.0]]];

/// The share of test photos that have a number of points within a radius.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct BiasRow {
    points: &'static str,
    radius_km: f64,
    min_count: usize,
    source: &'static str,
    /// The share that matches the paper: at least `min_count` points if `min_count` is 1 or `radius_km` is 25, otherwise
    /// more than `min_count`.
    percent: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    percent_at_least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    percent_more_than: Option<f64>,
}

/// Counts and prints the table.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let config = resolve_with_run(global)?.config;
    let file = match config.retrieval.gallery.as_str() {
        "" => geoclip_gallery(&config.retrieval.geoclip)?,
        file => PathBuf::from(file),
    };
    require_file("retrieval.gallery", &file)?;
    let mut supervisor = Supervisor::new()?;
    let TestPlaces { truth, is_simulated } = TestPlaces::read(&config, &mut supervisor)?;
    let (photos, source) = (truth.places.len(), truth.source);
    let task_file = file.clone();
    let (gallery, rows) = supervisor.compute(move || count(&task_file, &truth.places))?;
    let title = format!(
        "points near the true places of {photos} {} of {source}; gallery: {gallery} points of {}; grid: as many points, \
         spread evenly",
        photo_kind(is_simulated),
        file.display()
    );
    output.print(&wrapped(&title, 2, width()));
    output.print(&text(&rows));
    let data = json!({ "rows": photos, "is_simulated": is_simulated, "source": source, "gallery_points": gallery });
    let rows: Vec<BiasRow> = rows.into_iter().chain(published()).collect();
    Ok(json!({ "ok": true, "data": data, "rows": rows }))
}

/// Number of gallery points in `file`, and the rows for the gallery and for the grid.
fn count(file: &Path, places: &[Place]) -> anyhow::Result<(usize, Vec<BiasRow>)> {
    let gallery = tables::read_places(file).map_err(LaunchError::reported)?;
    let gallery: Vec<UnitVector> = gallery.into_iter().map(UnitVector::from).collect();
    let points = gallery.len();
    let grid = fibonacci_grid(points);
    let rows = LISTS.into_iter().zip([gallery, grid]).flat_map(|(name, points)| rows(name, points, places));
    Ok((points, rows.collect()))
}

fn rows(name: &'static str, points: Vec<UnitVector>, places: &[Place]) -> Vec<BiasRow> {
    let index = SphereIndex::new(points);
    let of_radius = |radius_km: f64| {
        let near = |place: &Place| index.within(UnitVector::from(*place), Km(radius_km)).len();
        let near: Vec<usize> = places.iter().map(near).collect();
        let percent = |is_counted: &dyn Fn(usize) -> bool| {
            100.0 * near.iter().filter(|near| is_counted(**near)).count() as f64 / near.len() as f64
        };
        COUNTS.map(|count| {
            let (at_least, more) = (percent(&|near| near >= count), percent(&|near| near > count));
            BiasRow {
                points: name,
                radius_km,
                min_count: count,
                source: "computed",
                percent: if is_at_least(radius_km, count) { at_least } else { more },
                percent_at_least: Some(at_least),
                percent_more_than: Some(more),
            }
        })
    };
    RADII_KM.into_iter().flat_map(of_radius).collect()
}

/// Whether the paper's number is the share with at least `count` points.
fn is_at_least(radius_km: f64, count: usize) -> bool {
    count == 1 || radius_km > RADII_KM[0]
}

/// The paper's rows, in the order of the computed rows.
fn published() -> Vec<BiasRow> {
    let mut rows = Vec::new();
    for (points, of_list) in LISTS.into_iter().zip(PUBLISHED) {
        for (radius_km, percents) in RADII_KM.into_iter().zip(of_list) {
            rows.extend(COUNTS.into_iter().zip(percents).map(|(min_count, percent)| BiasRow {
                points,
                radius_km,
                min_count,
                source: "published",
                percent,
                percent_at_least: None,
                percent_more_than: None,
            }));
        }
    }
    rows
}

fn text(rows: &[BiasRow]) -> String {
    let head = COUNTS.map(|count| format!("{count:>8}")).concat();
    let mut lines = vec![format!("{:<8}{:>6}  {:<9}{head}", "points", "within", "% with")];
    let mut push = |row: &BiasRow, what: &str, percents: Vec<f64>| {
        let percents: String = percents.into_iter().map(|percent| format!("{percent:>8.2}")).collect();
        lines.push(format!("{:<8}{:>3} km  {what:<9}{percents}", row.points, row.radius_km));
    };
    for (same, paper) in rows.chunks_exact(COUNTS.len()).zip(published().chunks_exact(COUNTS.len())) {
        push(&same[0], "at least", same.iter().filter_map(|row| row.percent_at_least).collect());
        push(&same[0], "more than", same.iter().filter_map(|row| row.percent_more_than).collect());
        push(&same[0], "published", paper.iter().map(|row| row.percent).collect());
    }
    lines.push("published: by the paper, for Im2GPS3k and GeoCLIP's gallery".to_owned());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use locdiff_core::geo::Degrees;

    use super::*;

    /// Of three places, one has 11 points within 1 km, one has 10, and one has none within 25 km.
    #[test]
    fn both_ways_of_counting_differ_by_the_places_with_exactly_that_many_points() {
        let place = |longitude: f64| Place::new(Degrees(0.0), Degrees(longitude)).expect("the place is valid");
        let places = [place(0.0), place(10.0), place(20.0)];
        let around = |place: Place, count: u32| {
            let point = UnitVector::from(place);
            (0..count).map(move |at| point.displace(Degrees(f64::from(at)), Km(0.5)).expect("it is finite"))
        };
        let points = around(places[0], 11).chain(around(places[1], 10)).collect();
        let rows = rows("gallery", points, &places);
        let of_ten: Vec<&BiasRow> = rows.iter().filter(|row| row.min_count == 10).collect();
        let thirds = |row: &BiasRow| {
            [row.percent, row.percent_at_least.expect("computed"), row.percent_more_than.expect("computed")]
                .map(|percent| (percent * 3.0 / 100.0).round() as u32)
        };
        assert_eq!(of_ten.iter().map(|row| thirds(row)).collect::<Vec<_>>(), [[1, 2, 1], [2, 2, 1]]);
        assert_eq!(thirds(&rows[0]), [2, 2, 2]);
        assert_eq!(published().len(), 2 * rows.len());
    }
}
