//! `eval --suite perturbation`: adds noise to the codes (spherical harmonics) of points and measures how far the noise
//! moves the mode of each code. The table also has the value that the paper publishes.
//!
//! The workers measure blocks of points. The launcher adds up the blocks in a fixed order, so the table does not depend
//! on the number of workers.

use locdiff_core::protocol::{Job, PerturbationBlock};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::refuse;
use crate::output::Output;
use crate::supervisor::GangResult;
use crate::verbs::{plan, run_repeatable};

/// Number of points per degree. With this many points, the standard error of the mean is 0.5 %.
const POINTS: u32 = 10_000;
/// The degrees of the codes to measure. The table has one row for each degree.
const DEGREES: [u32; 4] = [23, 47, 63, 95];
/// The degree for which the paper publishes a mean drift, and this drift in km.
const PUBLISHED: (u32, f64) = (47, 5.3);
/// Largest accepted relative difference between the measured mean drift and the theory.
const TOLERANCE: f64 = 0.03;

/// One row of the table, computed from all blocks of one degree.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct DegreeRow {
    degree: u32,
    source: &'static str,
    drift_km: f64,
    theory_km: f64,
    standard_error_km: f64,
    drift_km_max: f64,
    points: u32,
    searched: u32,
}

impl DegreeRow {
    fn is_near_theory(&self) -> bool {
        (self.drift_km / self.theory_km - 1.0).abs() <= TOLERANCE
    }
}

/// Measures and prints the table. Fails if the measurement lacks a degree or points of a degree, or if a mean drift
/// differs from the theory by more than [`TOLERANCE`].
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let found: GangResult<Vec<PerturbationBlock>> =
        run_repeatable(&resolved, &world, &Job::Perturbation { points: POINTS })?;
    let rows = rows(found.results.into_iter().flatten().collect());
    print_table(&rows, output);
    let degrees: Vec<u32> = rows.iter().map(|row| row.degree).collect();
    if degrees != DEGREES {
        refuse!(WorkerFailed, "the measured degrees are {degrees:?}, wanted {DEGREES:?}; this is a bug");
    }
    if let Some(row) = rows.iter().find(|row| !row.is_near_theory() || row.points != POINTS) {
        refuse!(
            WorkerFailed,
            "degree {}: mean drift is {:.3} km over {} points, wanted {:.3} km (within {} %) over {POINTS} points; \
             this is a bug",
            row.degree,
            row.drift_km,
            row.points,
            row.theory_km,
            TOLERANCE * 100.0
        );
    }
    let mut json_rows: Vec<Value> = rows.iter().map(|row| json!(row)).collect();
    json_rows.push(json!({ "degree": PUBLISHED.0, "source": "published", "drift_km": PUBLISHED.1 }));
    Ok(json!({ "ok": true, "rows": json_rows }))
}

/// One row per degree, in order of degree.
fn rows(mut blocks: Vec<PerturbationBlock>) -> Vec<DegreeRow> {
    blocks.sort_by_key(|block| (block.degree, block.block));
    blocks.chunk_by(|one, next| one.degree == next.degree).map(row).collect()
}

fn row(blocks: &[PerturbationBlock]) -> DegreeRow {
    let points: u32 = blocks.iter().map(|block| block.points).sum();
    let count = f64::from(points.max(1));
    let mean = blocks.iter().map(|block| block.drift_km_sum).sum::<f64>() / count;
    let square = blocks.iter().map(|block| block.drift_km2_sum).sum::<f64>() / count;
    DegreeRow {
        degree: blocks[0].degree,
        source: "computed",
        points,
        drift_km: mean,
        standard_error_km: ((square - mean * mean).max(0.0) / count).sqrt(),
        drift_km_max: blocks.iter().map(|block| block.drift_km_max).fold(0.0, f64::max),
        theory_km: blocks[0].theory_km,
        searched: blocks.iter().map(|block| block.searched).sum(),
    }
}

fn print_table(rows: &[DegreeRow], output: Output) {
    output.print(
        "mean drift of the mode, after noise of variance 0.01\nis added to the unscaled codes of uniform points",
    );
    output.print(&format!(
        "{:>6} {:>10} {:>8} {:>10} {:>9} {:>7} {:>9}  source",
        "degree", "drift km", "+- km", "theory km", "most km", "points", "searched"
    ));
    for row in rows {
        output.print(&format!(
            "{:>6} {:>10.3} {:>8.3} {:>10.3} {:>9.2} {:>7} {:>9}  computed",
            row.degree, row.drift_km, row.standard_error_km, row.theory_km, row.drift_km_max, row.points, row.searched
        ));
    }
    let (degree, drift_km) = PUBLISHED;
    output.print(&format!("{degree:>6} {drift_km:>10.3} {:>47}  published", ""));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(degree: u32, block: u32, drift_km: f64) -> PerturbationBlock {
        PerturbationBlock {
            degree,
            block,
            points: 2,
            drift_km_sum: 2.0 * drift_km,
            drift_km2_sum: 2.0 * drift_km * drift_km,
            drift_km_max: drift_km,
            theory_km: 2.0,
            searched: 1,
        }
    }

    #[test]
    fn order_of_perturbation_blocks_does_not_matter() {
        let blocks = vec![block(47, 1, 3.0), block(23, 0, 5.0), block(47, 0, 1.0)];
        let found = rows(blocks.clone());
        assert_eq!(found, rows(blocks.into_iter().rev().collect()));
        assert_eq!(found.iter().map(|row| row.degree).collect::<Vec<_>>(), [23, 47]);
        let last = &found[1];
        assert_eq!((last.points, last.searched, last.drift_km, last.drift_km_max), (4, 2, 2.0, 3.0));
        assert!((last.standard_error_km - 0.5).abs() < 1e-12, "{}", last.standard_error_km);
        assert!(last.is_near_theory() && !found[0].is_near_theory());
    }
}
