//! How well the calibration of a run holds on the test photos: as text and as JSON.

use std::fmt::Write as _;

use locdiff_core::calibration::Calibration;
use locdiff_core::metrics::{
    Bootstrap, CalibrationCheck, CheckedPhoto, Interval, NamedIntervals, PlaceGroups, RadiusShare, even_nll,
};
use locdiff_core::protocol::LocatedRow;
use serde_json::{Value, json};

use super::gather::Gather;
use super::score::MethodScore;
use crate::terminal::{TableColumn, table, wrapped};

/// The radii and the errors of the last method, and the likelihood of each true place.
pub(super) fn photos(calibration: &Calibration, gather: &Gather, found: &[MethodScore]) -> Vec<CheckedPhoto> {
    let errors_km = found.last().map_or(&[][..], |scored| &scored.errors_km);
    let photo = |(row, error_km): (&LocatedRow, &f64)| CheckedPhoto {
        radii_km: calibration.radii_km(row.spread_km),
        error_km: *error_km,
        nll: row.density.log_at_truth.first().map(|log| -log),
    };
    gather.rows().zip(errors_km).map(photo).collect()
}

/// Checks the photos. `None` if there are too few.
pub(super) fn check(
    photos: &[CheckedPhoto],
    places: &PlaceGroups,
    seed: u64,
) -> anyhow::Result<Option<CalibrationCheck>> {
    Ok(CalibrationCheck::new(photos, places, &Bootstrap { seed, ..Bootstrap::default() })?)
}

/// The likelihood as JSON; `None` without densities.
pub(super) fn likelihood(checked: &CalibrationCheck, temperature: Option<f64>) -> Option<Value> {
    let mut object = json!(NamedIntervals(vec![("nll".to_owned(), checked.nll?)]));
    object["even_nll"] = json!(even_nll());
    object["temperature"] = json!(temperature);
    Some(object)
}

/// A range of distances.
fn range(from_km: f64, to_km: f64) -> String {
    let digits = if to_km < 100.0 { 1 } else { 0 };
    format!("{from_km:.digits$}-{to_km:.digits$} km")
}

/// The calibration as a table, at most `width` columns wide, and the likelihood. `method` is the name of the method
/// whose answers have the radii.
pub(super) fn text(checked: &CalibrationCheck, method: &str, width: usize) -> String {
    let mut names = vec!["all photos".to_owned()];
    let fifths = checked.fifths.iter();
    names.extend(fifths.map(|fifth| format!("90 % radius {}", range(fifth.from_radius_90_km, fifth.to_radius_90_km))));
    let groups: Vec<&[RadiusShare]> =
        std::iter::once(&*checked.rows).chain(checked.fifths.iter().map(|fifth| &*fifth.rows)).collect();
    let column = |heading: &str, level: usize, cell: fn(&RadiusShare) -> String| TableColumn {
        heading: heading.to_owned(),
        cells: groups.iter().map(|rows| cell(&rows[level])).collect(),
    };
    let share = |row: &RadiusShare| format!("{:.1}", 100.0 * row.share);
    let bounds = |row: &RadiusShare| format!("{:.1}-{:.1}", 100.0 * row.lo, 100.0 * row.hi);
    let columns = [
        column("50 % radius", 0, share),
        column("interval", 0, bounds),
        column("90 % radius", 1, share),
        column("interval", 1, bounds),
    ];
    let mut text = format!("\n{}", table("% of true places within", &names, &columns, width));
    let radii = format!(
        "radii of {method}: the median 90 % radius is {:.0} km; one radius for all photos would be {:.0} km",
        checked.median_radius_90_km, checked.constant_radius_90_km,
    );
    let _ = writeln!(text, "{}", wrapped(&radii, 2, width));
    if let Some(Interval { value, lo, hi }) = checked.nll {
        let line = format!(
            "negative log-likelihood of the true places under the density of the samples: {value:.2} nats per km² (95 % \
             interval {lo:.2}-{hi:.2}); an even density over the Earth has {:.2}",
            even_nll(),
        );
        let _ = writeln!(text, "{}", wrapped(&line, 2, width));
    }
    text
}
