//! Test of `eval --suite perturbation` from the command line to the results table, with the real launcher and real
//! workers.

use locdiff_core::exit_code::ExitCode;

use crate::stage::{Stage, Worker};

/// Mean Earth radius (IUGG), km.
const EARTH_RADIUS_KM: f64 = 6371.0088;

/// The mean drift according to the theory, km: sqrt(pi / 2) * 0.1 * R / sqrt(L (L + 1)^2 (L + 2) / (16 pi)), where R is
/// the radius of the Earth and L is `degree`. The worker has its own implementation.
fn theory_km(degree: f64) -> f64 {
    let curvature = degree * (degree + 1.0) * (degree + 1.0) * (degree + 2.0) / (16.0 * std::f64::consts::PI);
    (std::f64::consts::PI / 2.0).sqrt() * 0.1 * EARTH_RADIUS_KM / curvature.sqrt()
}

#[test]
fn perturbation_drift_matches_theory() {
    let ran = Stage::new(Worker::Real).run("--workers 2 --device cpu --json eval --suite perturbation");
    ran.exits_with(ExitCode::Success);
    let json = ran.json();
    let rows = json["rows"].as_array().expect("the result has rows");
    let computed: Vec<_> = rows.iter().filter(|row| row["source"] == "computed").collect();
    let degrees: Vec<u64> = computed.iter().filter_map(|row| row["degree"].as_u64()).collect();
    assert_eq!(degrees, [23, 47, 63, 95], "{json}");
    for row in computed {
        assert!(row["points"].as_u64().is_some_and(|points| points >= 10_000), "{row}");
        assert!(row["searched"].as_u64().is_some_and(|searched| searched > 0), "{row}");
        let want = theory_km(row["degree"].as_f64().expect("the row has a degree"));
        let drift = row["drift_km"].as_f64().expect("the row has `drift_km`");
        // The standard deviation of a Rayleigh variable is 0.523 of its mean. So the standard error of the mean of
        // 10,000 points is 0.5 %.
        assert!((drift / want - 1.0).abs() < 0.03, "the drift is not within 3 % of the theory, {want} km: {row}");
        assert!((row["theory_km"].as_f64().expect("the row has `theory_km`") / want - 1.0).abs() < 1e-9, "{row}");
    }
    let published = rows.iter().find(|row| row["source"] == "published").expect("the table has the paper's figure");
    assert_eq!((published["degree"].as_u64(), published["drift_km"].as_f64()), (Some(47), Some(5.3)));
}
