//! `bench shdd`: one worker measures the speed of the spherical harmonics. It times the fast and the scalar
//! implementation on one core. If the worker has a GPU, it also times the implementation for GPUs.
//!
//! For one degree of the harmonics (see `LIMIT`), the fast implementation has a limit on the time per location. The
//! table and the JSON result say whether the measured time is within this limit. A time over the limit is not an error,
//! because machines differ and may be busy. It is an error if the implementations give different values.

use locdiff_core::protocol::{Job, ShddRow};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::refuse;
use crate::output::Output;
use crate::verbs::{plan, run_gang};

/// The only degree with a time limit, and this limit in microseconds per location. The limit applies to the fast
/// implementation on one core.
const LIMIT: (u32, f64) = (47, 3.0);

/// The time limit at `degree`, in microseconds per location. `None` if the degree has no limit.
fn limit_us(degree: u32) -> Option<f64> {
    (degree == LIMIT.0).then_some(LIMIT.1)
}

/// Measures and prints the table. Fails if the implementations give different values.
pub(in crate::verbs) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let world = world.first_worker_only(resolved.config.train.threads());
    let rows: Vec<ShddRow> = run_gang(&resolved, &world, Job::BenchShdd)?.first()?;
    output.print(&format!(
        "{:>6} {:>6} {:>9} {:>9} {:>9} {:>7}  us per location",
        "degree", "dims", "fast", "scalar", "GPU", "limit"
    ));
    rows.iter().for_each(|row| output.print(&line(row)));
    if let Some(ShddRow { degree, .. }) = rows.iter().find(|row| !row.ok) {
        refuse!(WorkerFailed, "the implementations give different values at degree {degree}; this is a bug");
    }
    Ok(json!({ "ok": true, "rows": rows.iter().map(with_limit).collect::<Vec<_>>() }))
}

/// One row of the printed table.
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
        "{:>6} {:>6} {:>9.3} {:>9.3} {gpu:>9} {limit:>7}  {values}{time}",
        row.degree, row.dims, row.us_per_location, row.us_per_location_scalar
    )
}

/// One row of the JSON result: the worker's measurements, `limit_us`, and `within_limit`. The two limit fields are null
/// if the degree has no limit.
fn with_limit(row: &ShddRow) -> Value {
    let (mut value, limit_us) = (json!(row), limit_us(row.degree));
    value["limit_us"] = json!(limit_us);
    value["within_limit"] = json!(limit_us.map(|limit| row.us_per_location <= limit));
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(degree: u32, us_per_location: f64) -> ShddRow {
        let (us_per_location_scalar, us_per_location_gpu) = (9.0, None);
        ShddRow { degree, dims: 1, us_per_location, us_per_location_scalar, us_per_location_gpu, ok: true }
    }

    #[test]
    fn rows_tell_whether_the_time_limit_is_met() {
        for (degree, us, limit, within, ending) in [
            (47, 3.0, json!(3.0), json!(true), "3.0  equal, within the limit"),
            (47, 3.001, json!(3.0), json!(false), "3.0  equal, OVER THE LIMIT"),
            (95, 30.0, Value::Null, Value::Null, "-  equal"),
        ] {
            let value = with_limit(&row(degree, us));
            assert_eq!((&value["limit_us"], &value["within_limit"]), (&limit, &within), "{value}");
            assert_eq!(value["us_per_location"], us);
            assert!(line(&row(degree, us)).ends_with(ending), "{}", line(&row(degree, us)));
        }
    }
}
