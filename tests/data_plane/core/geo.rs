//! Geometry on the sphere: distances, displacements, grids and the point index.

use locdiff_core::geo::{
    Degrees, EARTH_RADIUS_KM, GeoError, Healpix, Km, Place, SphereIndex, UnitVector, fibonacci_grid, places,
};
use proptest::prelude::*;

/// Tolerance for distances: one micrometre. Each operation rounds by about 1e-16, which is 0.6 nm on the Earth, and
/// computing a distance takes several operations.
const ROUNDING_KM: f64 = 1e-9;

fn place(latitude: f64, longitude: f64) -> Place {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid")
}

fn any_place() -> impl Strategy<Value = Place> {
    let latitude = prop_oneof![8 => -90.0..=90.0, 1 => Just(90.0), 1 => Just(-90.0), 1 => 89.999_999..=90.0];
    let longitude = prop_oneof![8 => -180.0..180.0, 1 => Just(-180.0), 1 => 179.999_999..180.0];
    (latitude, longitude).prop_map(|(latitude, longitude)| place(latitude, longitude))
}

fn any_point() -> impl Strategy<Value = UnitVector> {
    any_place().prop_map(UnitVector::from)
}

proptest! {
    #[test]
    fn geo_place_round_trips_through_a_vector(there in any_place()) {
        let back = Place::from(UnitVector::from(there));
        prop_assert!(there.distance(back).0 <= ROUNDING_KM, "{there:?} became {back:?}");
        prop_assert!((back.latitude().0 - there.latitude().0).abs() < 1e-13 * 180.0);
        prop_assert!((-180.0..180.0).contains(&back.longitude().0));
    }

    #[test]
    fn geo_vectors_have_unit_length(point in any_point(), bearing in -720.0..720.0, distance in 0.0..50_000.0) {
        for point in [point, point.displace(Degrees(bearing), Km(distance)).expect("the numbers are finite")] {
            prop_assert!((point.dot(point) - 1.0).abs() < 1e-15);
        }
    }

    #[test]
    fn geo_longitude_wraps_by_whole_turns(latitude in -90.0..=90.0, longitude in -180.0..180.0, turns in -1000_i32..1000) {
        // With the turns added, the longitude is up to 360,000 degrees, so f64 rounds it by up to 360,000 * 1.1e-16
        // degrees.
        let wrapped: f64 = place(latitude, longitude + 360.0 * f64::from(turns)).longitude().0;
        let difference = f64::abs(wrapped - longitude);
        prop_assert!(difference < 1e-10 || (difference - 360.0).abs() < 1e-10);
        prop_assert!((-180.0..180.0).contains(&wrapped));
        prop_assert_eq!(place(latitude, longitude).longitude().0, longitude);
    }

    #[test]
    fn geo_any_finite_longitude_is_accepted(longitude in any::<f64>().prop_filter("finite", |value| value.is_finite())) {
        prop_assert!((-180.0..180.0).contains(&place(0.0, longitude).longitude().0));
    }

    #[test]
    fn geo_distances_obey_the_triangle_inequality(a in any_point(), b in any_point(), c in any_point()) {
        prop_assert_eq!(a.distance(b), b.distance(a));
        prop_assert_eq!(a.distance(a).0, 0.0);
        prop_assert!(a.distance(c).0 <= a.distance(b).0 + b.distance(c).0 + ROUNDING_KM);
        prop_assert!(a.distance(b).0 <= std::f64::consts::PI * EARTH_RADIUS_KM);
    }

    #[test]
    fn geo_displacement_covers_the_given_distance(point in any_point(), bearing in 0.0..360.0, exponent in -6.0..4.3) {
        // The distance is between 1 mm and 20,000 km.
        let distance = 10.0_f64.powf(exponent);
        let there = point.displace(Degrees(bearing), Km(distance)).expect("the numbers are finite");
        let covered = point.distance(there).0;
        prop_assert!((covered - distance).abs() <= ROUNDING_KM, "the point is {covered} km away, wanted {distance} km");
    }

    #[test]
    fn geo_antipodes_are_half_a_turn_apart(point in any_point(), bearing in 0.0..360.0) {
        let half = std::f64::consts::PI * EARTH_RADIUS_KM;
        prop_assert!((point.distance(point.antipode()).0 - half).abs() <= ROUNDING_KM);
        // The point is one metre from the antipode, where an arccosine would lose half of its digits.
        let near = point.antipode().displace(Degrees(bearing), Km(0.001)).expect("the numbers are finite");
        prop_assert!((half - point.distance(near).0 - 0.001).abs() <= ROUNDING_KM);
    }
}

#[test]
fn geo_known_distances_are_reproduced() {
    // Three pairs of places are one degree apart: along a meridian, across the date line, and across the north pole.
    let degree = EARTH_RADIUS_KM.to_radians();
    assert!((place(10.0, 20.0).distance(place(11.0, 20.0)).0 - degree).abs() < ROUNDING_KM);
    assert!((place(0.0, 179.5).distance(place(0.0, -179.5)).0 - degree).abs() < ROUNDING_KM);
    assert!((place(89.5, 10.0).distance(place(89.5, -170.0)).0 - degree).abs() < ROUNDING_KM);
}

#[test]
fn geo_bearing_is_clockwise_from_north() {
    let start = UnitVector::from(place(0.0, 0.0));
    let close = |got: Result<UnitVector, GeoError>, latitude: f64, longitude: f64| {
        let got = Place::from(got.expect("the numbers are finite"));
        assert!(
            got.distance(place(latitude, longitude)).0 < ROUNDING_KM,
            "displaced to {got:?}, wanted {latitude}, {longitude}"
        );
    };
    let degree = Km(EARTH_RADIUS_KM.to_radians());
    close(start.displace(Degrees(0.0), degree), 1.0, 0.0);
    close(start.displace(Degrees(90.0), degree), 0.0, 1.0);
    close(start.displace(Degrees(180.0), degree), -1.0, 0.0);
    close(start.displace(Degrees(270.0), degree), 0.0, -1.0);
}

#[test]
fn geo_poles_are_exact_at_any_longitude() {
    for longitude in [-180.0, 0.0, 37.0, 179.0] {
        assert_eq!(UnitVector::from(place(90.0, longitude)).distance(UnitVector::NORTH_POLE).0, 0.0);
        assert_eq!(UnitVector::from(place(-90.0, longitude)).distance(UnitVector::SOUTH_POLE).0, 0.0);
    }
    assert_eq!(Place::from(UnitVector::NORTH_POLE).latitude().0, 90.0);
}

#[test]
fn geo_bad_coordinates_name_their_row() {
    let mut latitudes = vec![0.0; 20];
    latitudes[17] = 91.0;
    let error = places(&latitudes, &[0.0; 20]).expect_err("the latitude is not valid");
    assert_eq!(error.to_string(), "row 17: latitude is 91, wanted -90 to 90");
    let error = places(&[0.0, 1.0], &[f64::NAN, 0.0]).expect_err("the longitude is NaN");
    assert_eq!(error.to_string(), "row 0: longitude is NaN, wanted a finite number");
    for bad in [f64::NAN, f64::INFINITY, -90.000_000_1] {
        let error = Place::new(Degrees(bad), Degrees(0.0)).expect_err("the latitude is not valid");
        assert_eq!(error.to_string(), format!("latitude is {bad}, wanted -90 to 90"));
    }
    assert!(places(&[0.0], &[f64::NEG_INFINITY]).is_err());
    assert_eq!(
        places(&[0.0], &[]).expect_err("the lengths differ").to_string(),
        "got 1 latitudes and 0 longitudes, wanted equal numbers"
    );
    assert!(UnitVector::new([0.0; 3]).is_err() && UnitVector::new([f64::NAN, 1.0, 0.0]).is_err());
}

#[test]
fn geo_non_finite_or_out_of_range_input_is_an_error() {
    let text = |result: Result<UnitVector, GeoError>| result.expect_err("the input is not valid").to_string();
    let above = 1.0 + f64::EPSILON;
    assert_eq!(text(UnitVector::from_height(above, 0.0)), format!("height is {above}, wanted -1 to 1"));
    assert_eq!(text(UnitVector::from_height(f64::NAN, 0.0)), "height is NaN, wanted -1 to 1");
    assert_eq!(text(UnitVector::from_height(0.5, f64::INFINITY)), "angle is inf rad, wanted a finite number");
    let point = UnitVector::from_height(-1.0, 2.0).expect("the height is in range");
    assert_eq!(point.distance(UnitVector::SOUTH_POLE).0, 0.0);
    // The last tangent is finite, but its squared length overflows.
    for tangent in [[f64::NAN, 0.0, 0.0], [0.0, f64::INFINITY, 0.0], [1e200, 0.0, 0.0]] {
        assert!(text(point.walk(tangent)).starts_with("tangent is ["), "wrong error for the tangent {tangent:?}");
    }
    for (bearing, distance) in [(f64::NAN, 1.0), (0.0, f64::NAN), (0.0, f64::INFINITY)] {
        let error = text(point.displace(Degrees(bearing), Km(distance)));
        assert_eq!(error, format!("bearing is {bearing}° and distance is {distance} km, wanted finite numbers"));
    }
}

#[test]
fn geo_vectors_of_any_length_have_a_direction() {
    for scale in [1e-310, 1e-200, 1.0, 1e200, 1e308] {
        let [x, y, z] = UnitVector::new([0.0, scale, -scale]).expect("the vector is not zero").xyz();
        let half = std::f64::consts::FRAC_1_SQRT_2;
        assert!(
            x == 0.0 && (y - half).abs() < 1e-15 && (z + half).abs() < 1e-15,
            "wrong direction [{x}, {y}, {z}] of the vector [0, {scale:e}, -{scale:e}]"
        );
    }
}

#[test]
fn geo_grids_are_even() {
    assert!(fibonacci_grid(0).is_empty());
    assert_eq!(fibonacci_grid(1).len(), 1);
    for count in [21_000, 1_000_000] {
        let grid = fibonacci_grid(count);
        assert_eq!(grid.len(), count);
        // The vectors of an even grid nearly cancel each other, so each component of their sum is small.
        let sum: [f64; 3] = std::array::from_fn(|axis| grid.iter().map(|point| point.xyz()[axis]).sum());
        assert!(
            sum.iter().all(|sum| sum.abs() < 1.0),
            "the vectors of {count} points sum to {sum:?}, wanted less than 1 per component"
        );
    }
    // If every point had a square cell of the same area, neighbours would be one side of a square apart. The nearest
    // neighbour of a grid point may be 0.8 to 1.2 sides away.
    let grid = fibonacci_grid(2_000);
    let side_km = EARTH_RADIUS_KM * (4.0 * std::f64::consts::PI / 2_000.0).sqrt();
    for (index, point) in grid.iter().enumerate() {
        let others = grid.iter().enumerate().filter(|(other, _)| *other != index);
        let nearest = others.map(|(_, other)| point.distance(*other).0).fold(f64::INFINITY, f64::min);
        assert!(
            (0.8..1.2).contains(&(nearest / side_km)),
            "the nearest neighbour of point {index} is {nearest} km away, wanted 0.8 to 1.2 times {side_km} km"
        );
    }
}

/// Clusters of points. The centre of each cluster occurs twice, so that two points have the same distance from any
/// query.
fn any_crowd() -> impl Strategy<Value = Vec<UnitVector>> {
    proptest::collection::vec((any_point(), proptest::collection::vec((0.0..360.0, 0.0..300.0), 0..8)), 1..60).prop_map(
        |spots| {
            let around = |(spot, moves): (UnitVector, Vec<(f64, f64)>)| {
                let moved = moves
                    .into_iter()
                    .map(move |(bearing, km)| spot.displace(Degrees(bearing), Km(km)).expect("the numbers are finite"));
                moved.chain([spot, spot]).collect::<Vec<_>>()
            };
            spots.into_iter().flat_map(around).collect()
        },
    )
}

proptest! {
    #[test]
    fn geo_index_agrees_with_a_linear_scan(
        crowd in any_crowd(), elsewhere in any_point(), pick in any::<prop::sample::Index>(), radius in 0.0..25_000.0_f64,
        count in 0_usize..12
    ) {
        let index = SphereIndex::new(crowd.clone());
        prop_assert_eq!(index.points(), &crowd[..]);
        let tie = crowd[pick.index(crowd.len())];
        for query in [elsewhere, crowd[0]] {
            // The radii are the exact distance from the query to a point, a random radius, zero, and a negative radius.
            for radius in [query.distance(tie), Km(radius), Km(0.0), Km(-1.0)] {
                let scan = |holds: &dyn Fn(Km) -> bool| -> Vec<u32> {
                    (0_u32..).zip(&crowd).filter(|(_, point)| holds(query.distance(**point))).map(|(at, _)| at).collect()
                };
                prop_assert_eq!(index.within(query, radius), scan(&|distance| distance <= radius));
                prop_assert_eq!(index.count_nearer(query, radius), scan(&|distance| distance < radius).len());
            }
            let mut sorted: Vec<f64> = crowd.iter().map(|point| query.distance(*point).0).collect();
            sorted.sort_by(f64::total_cmp);
            let nearest = index.nearest_many(query, count);
            prop_assert_eq!(nearest.len(), count.min(crowd.len()));
            for ((at, distance), want) in nearest.iter().zip(&sorted) {
                prop_assert_eq!(*distance, query.distance(crowd[*at as usize]));
                // Near the antipode of the query, chords that differ by rounding belong to distances that differ by
                // decimetres.
                let tolerance = if *want > 19_900.0 { 0.001 } else { ROUNDING_KM };
                prop_assert!((distance.0 - want).abs() <= tolerance);
            }
            let first = index.nearest(query).expect("the index has points").0;
            let same = crowd.iter().position(|point| *point == crowd[first as usize]);
            let same = same.expect("`crowd` contains the point");
            prop_assert_eq!(same as u32, first, "the index did not return the first of several equal points");
        }
    }
}

#[test]
fn geo_empty_index_finds_nothing() {
    let index = SphereIndex::new(Vec::new());
    assert!(index.within(UnitVector::NORTH_POLE, Km(30_000.0)).is_empty());
    assert_eq!((index.nearest(UnitVector::NORTH_POLE), index.count_nearer(UnitVector::NORTH_POLE, Km(1.0))), (None, 0));
}

#[test]
fn geo_cells_equal_those_of_healpy() {
    let text = include_str!("../../golden/healpix.csv");
    let mut compared = 0;
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [order, cell] = [0, 1].map(|at| cells[at].parse::<u64>().expect("the golden file has integers"));
        let [latitude, longitude] = [2, 3].map(|at| cells[at].parse::<f64>().expect("the golden file has numbers"));
        let (grid, point) = (Healpix::new(order as u32), UnitVector::from(place(latitude, longitude)));
        assert_eq!(grid.cell_of(point), cell, "{line}");
        if cells[4] == "1" {
            assert!(grid.centre(cell).distance(point).0 < ROUNDING_KM, "{line}");
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared}");
}
