//! `shards simulate --cells`: test places are spread over all cells, and no training photo was taken at a test place or
//! in a cell that is held out.

use std::collections::{HashMap, HashSet};

use locdiff::geoclip::Geoclip;
use locdiff::simulate::{Simulation, places_of_part, simulate};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::{Place, cell_of};
use locdiff_core::protocol::{CellPart, CellSplit};

use super::simulation;
use crate::geoclip::support::folder;

const SIDE: f64 = 2.0;

fn split(held_out: f64, part: CellPart) -> CellSplit {
    CellSplit { degrees: SIDE, held_out, part }
}

fn coordinates(places: &[Place]) -> HashSet<(u64, u64)> {
    places.iter().map(|place| (place.latitude().0.to_bits(), place.longitude().0.to_bits())).collect()
}

fn cells(places: &[Place]) -> HashSet<u64> {
    places.iter().map(|place| cell_of(*place, SIDE)).collect()
}

#[test]
fn training_never_sees_test_places_or_cells_that_are_held_out() {
    let geoclip = Geoclip::open(&folder()).expect("the folder has GeoCLIP weights");
    // Every place occurs at least once, every third place twice.
    let places: Vec<Place> = geoclip.places().iter().chain(geoclip.places().iter().step_by(3)).copied().collect();
    let part = |held_out, part| places_of_part(&places, &split(held_out, part));
    let [train, thinned, held_out] =
        [CellPart::Train, CellPart::Thinned, CellPart::HeldOut].map(|name| part(0.15, name));
    let occupied = cells(&places);
    assert_eq!(
        (coordinates(&thinned).len() + coordinates(&held_out).len(), thinned.len() + held_out.len()),
        (occupied.len(), occupied.len()),
        "the test sets do not have one place per cell"
    );
    assert!(coordinates(&train).is_disjoint(&coordinates(&thinned)), "a test place is also a training place");
    let away: HashSet<u64> = cells(&held_out);
    assert!(away.is_disjoint(&cells(&train)) && away.is_disjoint(&cells(&thinned)), "a cell that is held out is used");
    let share = away.len() as f64 / occupied.len() as f64;
    // The share of n cells has a standard deviation of √(0.15 · 0.85 / n).
    let deviation = (0.15 * 0.85 / occupied.len() as f64).sqrt();
    assert!(occupied.len() > 500 && (share - 0.15).abs() < 4.0 * deviation, "{share} of the cells are held out");
    // All other rows are training rows, in their order.
    let tests = coordinates(&thinned);
    let is_other = |place: &Place| cells(&[*place]).is_disjoint(&away) && coordinates(&[*place]).is_disjoint(&tests);
    assert_eq!(train, places.iter().copied().filter(is_other).collect::<Vec<_>>());
    assert!(part(0.0, CellPart::HeldOut).is_empty() && part(0.0, CellPart::Thinned).len() == occupied.len());

    // The order of the rows does not matter. Test places are sorted neither by position nor by the density of places.
    let reversed: Vec<Place> = places.iter().rev().copied().collect();
    assert_eq!(places_of_part(&reversed, &split(0.15, CellPart::Thinned)), thinned);
    let north = |places: &[Place]| places.iter().filter(|place| place.latitude().0 > 30.0).count();
    let (first, second) = thinned.split_at(thinned.len() / 2);
    assert!(north(first).abs_diff(north(second)) * 5 < thinned.len(), "the test places are sorted by latitude");
    let mut rows: HashMap<u64, usize> = HashMap::new();
    places.iter().for_each(|place| *rows.entry(cell_of(*place, SIDE)).or_default() += 1);
    let full = |places: &[Place]| places.iter().filter(|place| rows[&cell_of(**place, SIDE)] > 10).count();
    let (first, second) = (full(first), full(second));
    assert!(first.abs_diff(second) * 2 < first + second, "{first} and {second} of the test places are in full cells");

    // Cells of almost the same size have mostly other test places.
    let other = places_of_part(&places, &CellSplit { degrees: SIDE * 1.001, ..split(0.15, CellPart::Thinned) });
    let of_full = |places: Vec<Place>| -> Vec<Place> {
        places.into_iter().filter(|place| rows[&cell_of(*place, SIDE)] > 10).collect()
    };
    let (own, other) = (coordinates(&of_full(thinned)), coordinates(&of_full(other)));
    assert!(own.intersection(&other).count() * 4 < own.len(), "the cell size does not change the test places");
}

#[test]
fn parts_are_simulated_at_their_places() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let geoclip = Geoclip::open(&folder()).expect("the folder has GeoCLIP weights");
    let make = |cells: CellSplit, rows: Option<u64>, name: &str| {
        simulate(&Simulation { cells: Some(cells), rows, ..simulation(1) }, &scratch.path().join(name))
    };
    let manifest =
        make(CellSplit { degrees: 60.0, ..split(0.5, CellPart::HeldOut) }, None, "out").expect("the options are valid");
    let places = places_of_part(geoclip.places(), &CellSplit { degrees: 60.0, ..split(0.5, CellPart::HeldOut) });
    assert_eq!(manifest.rows, places.len() as u64);
    assert!(manifest.source.contains("(held-out of cells of 60 degrees, 0.5 of them held out)"), "{}", manifest.source);
    let error = make(split(0.0, CellPart::HeldOut), None, "none").expect_err("no cell is held out");
    assert_eq!(error.exit_code(), ExitCode::Usage);
    assert!(error.to_string().contains("--part held-out has no places"), "{error}");
}
