//! `shards inspect`: summarizes a data set, as text or JSON.

use locdiff_core::config::ShardsConfig;
use locdiff_core::protocol::Inspection;

use super::blocks::{BlockRows, Blocks, Dataset};
use super::error::ShardsError;
use super::survey::Survey;

/// Width and height of the map, in characters.
const MAP_COLUMNS: usize = 72;
const MAP_LINES: usize = 24;

/// Characters of the map, from no photos to the largest number of photos, on a logarithmic scale.
const SHADES: &[u8] = b" .:-=+*#%@";

/// Summarizes a data set. Reads all coordinates. Also reads all embeddings if there is no manifest with their
/// statistics, or if `config` skips bad rows. Skipped rows are reported in `skipped_rows` and `skipped`. The map and
/// the ranges of coordinates do not include skipped rows.
pub fn inspect(dataset: &Dataset, config: &ShardsConfig) -> Result<Inspection, ShardsError> {
    let Survey { mask, statistics, .. } = Survey::begin(dataset, config)?;
    let statistics = statistics.expect("`Survey::begin` always returns statistics");
    let mut counts = vec![0_u64; MAP_COLUMNS * MAP_LINES];
    let mut read = BlockRows::default();
    let empty_range = (f64::INFINITY, f64::NEG_INFINITY);
    let (mut latitude_range, mut longitude_range) = (empty_range, empty_range);
    for block in 0..dataset.block_rows().len() as u32 {
        dataset.read_usable_coordinates(&mask, block, &mut read)?;
        let places = read.latitudes.iter().zip(&read.longitudes);
        // A row without coordinates has NaN.
        for (latitude, longitude) in places.filter(|(latitude, _)| !latitude.is_nan()) {
            latitude_range = widened(latitude_range, &[*latitude]);
            longitude_range = widened(longitude_range, &[*longitude]);
            counts[cell(*latitude, *longitude)] += 1;
        }
    }
    let rows = dataset.block_rows();
    let manifest = dataset.manifest();
    Ok(Inspection {
        rows: dataset.rows(),
        rows_with_coordinates: dataset.rows_with_coordinates(),
        skipped_rows: mask.count(),
        skipped: mask.describe(dataset),
        files: dataset.file_count(),
        row_groups: rows.len(),
        row_group_rows: (rows.iter().copied().min().unwrap_or(0), rows.iter().copied().max().unwrap_or(0)),
        columns: dataset.column_names(),
        width: dataset.width(),
        views: dataset.stored_views(),
        manifest: manifest.is_some(),
        fingerprint: format!("{:016x}", dataset.fingerprint()),
        source: manifest.map(|manifest| manifest.source.clone()),
        image_head: manifest.map(|manifest| manifest.image_head),
        latitudes: latitude_range,
        longitudes: longitude_range,
        means: widened(empty_range, &statistics.mean),
        standard_deviations: widened(empty_range, &statistics.standard_deviation),
        statistics,
        map: draw(&counts),
    })
}

fn widened(range: (f64, f64), values: &[f64]) -> (f64, f64) {
    values.iter().fold(range, |(low, high), &value| (low.min(value), high.max(value)))
}

fn cell(latitude: f64, longitude: f64) -> usize {
    let line = ((90.0 - latitude) / 180.0 * MAP_LINES as f64) as usize;
    let column = ((longitude + 180.0) / 360.0 * MAP_COLUMNS as f64) as usize;
    line.min(MAP_LINES - 1) * MAP_COLUMNS + column.min(MAP_COLUMNS - 1)
}

fn draw(counts: &[u64]) -> Vec<String> {
    let most = counts.iter().copied().max().unwrap_or(0);
    let shade = |&count: &u64| match count {
        0 => ' ',
        // The scale is logarithmic because some places have a thousand times more photos than others.
        _ => {
            let part = ((count + 1) as f64).ln() / ((most + 1) as f64).ln();
            SHADES[((part * (SHADES.len() - 1) as f64).ceil() as usize).clamp(1, SHADES.len() - 1)] as char
        }
    };
    counts.chunks(MAP_COLUMNS).map(|line| line.iter().map(shade).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_appear_at_their_position_on_the_map() {
        let mut counts = vec![0; MAP_COLUMNS * MAP_LINES];
        counts[cell(90.0, -180.0)] += 1;
        counts[cell(-90.0, 180.0)] += 1000;
        let map = draw(&counts);
        assert_eq!((map.len(), map[0].len()), (MAP_LINES, MAP_COLUMNS));
        assert!(
            map[0].starts_with('.') || map[0].starts_with(':'),
            "the cell with one photo does not have a light shade: {:?}",
            map[0]
        );
        assert!(map[MAP_LINES - 1].ends_with('@'), "the cell with the most photos does not have the darkest shade");
        assert_eq!(cell(0.0, 0.0), MAP_LINES / 2 * MAP_COLUMNS + MAP_COLUMNS / 2);
    }
}
