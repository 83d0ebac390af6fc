//! `shards grid`: writes a gallery file with the places of a list and an even grid of points on land. No worker is
//! needed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use locdiff_core::draw::is_land;
use locdiff_core::files::Files;
use locdiff_core::geo::{EARTH_RADIUS_KM, Place, fibonacci_grid};
use locdiff_core::tables;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::verbs::paths::{geoclip_gallery, require_file, require_new};
use crate::verbs::resolve_for;

/// Writes the gallery. `coordinates` is the file with the list; `None` means GeoCLIP's gallery.
pub(super) fn run(
    spacing_km: f64,
    coordinates: Option<PathBuf>,
    out: &Path,
    overwrite: bool,
    global: &Global,
    output: Output,
) -> anyhow::Result<Value> {
    let list = match coordinates {
        Some(file) => {
            require_file("--coordinates", &file)?;
            file
        }
        None => geoclip_gallery(&resolve_for(global, &["retrieval"])?.config.retrieval.geoclip)?,
    };
    require_new("--out", out, overwrite)?;
    let (mut places, grid) = (tables::read_places(&list).map_err(LaunchError::reported)?, land_grid(spacing_km));
    let (listed, points) = (places.len(), grid.len());
    places.extend(grid);
    let mut text = String::from("lat,lon\n");
    for place in &places {
        // Six decimal places are precise to 11 cm.
        writeln!(text, "{:.6},{:.6}", place.latitude().0, place.longitude().0)?;
    }
    let files = Files::real();
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), |folder| files.create_folders(folder)).map_err(LaunchError::reported)?;
    files.write_atomically(out, text.as_bytes()).map_err(LaunchError::reported)?;
    let shown = out.display();
    output.print(&format!("{listed} places of {} and {points} points on land in {shown}", list.display()));
    Ok(json!({ "ok": true, "out": out, "places": listed, "grid_points": points }))
}

/// Points on land, each of which represents a square with sides of `spacing_km`.
fn land_grid(spacing_km: f64) -> impl ExactSizeIterator<Item = Place> {
    let area_km2 = 4.0 * std::f64::consts::PI * EARTH_RADIUS_KM * EARTH_RADIUS_KM;
    let points = fibonacci_grid((area_km2 / (spacing_km * spacing_km)).round() as usize);
    points.into_iter().map(Place::from).filter(|place| is_land(*place)).collect::<Vec<_>>().into_iter()
}
