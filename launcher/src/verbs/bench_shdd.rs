//! `bench shdd`: spherical harmonics in one worker, the fast form beside the scalar one, on one core.
//!
//! The time of one location has a limit, which is printed beside it and said to be kept or not. A time over it is no failure of
//! the command: machines differ and are busy. Values that differ are.

use locdiff_core::protocol::{Job, ShddRow};
use serde_json::{Value, json};

use super::{resolve, run_gang};
use crate::cli::Global;
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::World;

/// The degree that has a limit, and the most that the fast form may take there for one location on one core, microseconds.
const LIMIT: (u32, f64) = (47, 3.0);

/// The most that a location may take at `degree`, microseconds.
fn limit_us(degree: u32) -> Option<f64> {
    (degree == LIMIT.0).then_some(LIMIT.1)
}

/// Measures, prints the table, and fails where the forms differ.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let inventory = gpus::inventory();
    let resolved = resolve(global, &inventory)?;
    let mut world = World::plan(&resolved.config, &inventory)?;
    world.places.truncate(1);
    world.places.iter_mut().for_each(|place| place.world = 1);
    let found = run_gang(&resolved, &world, Job::BenchShdd, true)?;
    let first = found.results.into_iter().next().unwrap_or_default();
    let rows: Vec<ShddRow> = serde_json::from_value(first)?;
    output.people(&format!(
        "{:>6} {:>6} {:>10} {:>10} {:>10} {:>7}  us per location",
        "degree", "dims", "fast", "scalar", "GPU", "limit"
    ));
    rows.iter().for_each(|row| output.people(&line(row)));
    if let Some(wrong) = rows.iter().find(|row| !row.ok) {
        let text = format!("the forms of the harmonics differ at degree {}", wrong.degree);
        return Err(LaunchError::WorkerFailed(text).into());
    }
    let rows: Vec<Value> = rows.iter().map(json).collect::<Result<_, _>>()?;
    Ok(json!({ "ok": true, "rows": rows }))
}

/// A row for people.
fn line(row: &ShddRow) -> String {
    let or_dash = |us: Option<f64>, digits: usize| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.digits$}"));
    let (gpu, limit) = (or_dash(row.us_per_location_gpu, 4), or_dash(limit_us(row.degree), 1));
    let values = if row.ok { "equal" } else { "DIFFERENT" };
    let time = match limit_us(row.degree) {
        Some(limit) if row.us_per_location <= limit => ", within the limit",
        Some(_) => ", OVER THE LIMIT",
        None => "",
    };
    format!(
        "{:>6} {:>6} {:>10.3} {:>10.3} {gpu:>10} {limit:>7}  {values}{time}",
        row.degree, row.dims, row.us_per_location, row.us_per_location_scalar
    )
}

/// A row for programs: what the worker measured, and the limit (null where there is none).
fn json(row: &ShddRow) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(row)?;
    value["limit_us"] = json!(limit_us(row.degree));
    value["within_limit"] = json!(limit_us(row.degree).map(|limit| row.us_per_location <= limit));
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(degree: u32, us_per_location: f64) -> ShddRow {
        let (us_per_location_scalar, us_per_location_gpu) = (9.0, None);
        ShddRow { degree, dims: 1, us_per_location, us_per_location_scalar, us_per_location_gpu, ok: true }
    }

    #[test]
    fn harmonics_over_their_limit_are_said_to_be() {
        for (degree, us, limit, within, said) in [
            (47, 3.0, json!(3.0), json!(true), "3.0  equal, within the limit"),
            (47, 3.001, json!(3.0), json!(false), "3.0  equal, OVER THE LIMIT"),
            (95, 30.0, Value::Null, Value::Null, "-  equal"),
        ] {
            let value = json(&row(degree, us)).expect("plain");
            assert_eq!((&value["limit_us"], &value["within_limit"]), (&limit, &within), "{value}");
            assert_eq!(value["us_per_location"], us);
            assert!(line(&row(degree, us)).ends_with(said), "{}", line(&row(degree, us)));
        }
    }
}
