//! Tests of priors: polygons with the date line and poles, distances to lines, and the cells that fill features.

use proptest::prelude::*;

use super::*;
use crate::geo::{EARTH_RADIUS_KM, fibonacci_grid};

fn place(longitude: f64, latitude: f64) -> Place {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid")
}

fn vector(longitude: f64, latitude: f64) -> UnitVector {
    place(longitude, latitude).into()
}

fn closed(mut ring: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    ring.extend(ring.first().copied());
    ring
}

fn polygon(rings: &[&[[f64; 2]]]) -> Polygon {
    let rings: Vec<Vec<[f64; 2]>> = rings.iter().map(|ring| closed(ring.to_vec())).collect();
    Polygon::new(&rings).expect("the polygon is valid")
}

fn of_polygon(weight: f64, polygon: Polygon) -> PriorFeature {
    PriorFeature::new(weight, 10.0, vec![polygon], &[]).expect("the feature is valid")
}

fn of_lines(weight: f64, width_km: f64, lines: &[Vec<UnitVector>]) -> PriorFeature {
    PriorFeature::new(weight, width_km, Vec::new(), lines).expect("the lines are valid")
}

/// A box with positions along its sides, so that no edge is long.
fn rectangle(west: f64, south: f64, east: f64, north: f64) -> Vec<[f64; 2]> {
    vec![[west, south], [east, south], [east, north], [west, north]]
}

#[test]
fn edges_belong_to_a_polygon_and_holes_do_not() {
    let (outer, hole) = (rectangle(0.0, 0.0, 10.0, 8.0), rectangle(2.0, 2.0, 4.0, 4.0));
    let with_hole = polygon(&[&outer, &hole]);
    let inside = [(1.0, 1.0), (0.0, 0.0), (10.0, 8.0), (5.0, 0.0), (10.0, 3.0), (0.0, 3.0), (2.0, 3.0), (3.0, 4.0)];
    for (longitude, latitude) in inside {
        assert!(with_hole.contains(place(longitude, latitude)), "{longitude}, {latitude}");
    }
    for (longitude, latitude) in [(3.0, 3.0), (-0.001, 1.0), (10.001, 1.0), (5.0, 8.001), (5.0, -0.001), (-170.0, 1.0)]
    {
        assert!(!with_hole.contains(place(longitude, latitude)), "{longitude}, {latitude}");
    }
}

#[test]
fn edges_are_straight_in_degrees() {
    // The great circle between the northern corners passes 56.3 degrees north.
    let wide = polygon(&[&rectangle(-60.0, 40.0, 60.0, 50.0)]);
    assert!(wide.contains(place(0.0, 49.9)) && !wide.contains(place(0.0, 50.1)));
}

#[test]
fn rings_that_cross_the_date_line_equal_cut_ones() {
    let uncut = polygon(&[&rectangle(170.0, -20.0, -165.0, 15.0)]);
    let halves = [rectangle(170.0, -20.0, 180.0, 15.0), rectangle(-180.0, -20.0, -165.0, 15.0)];
    let halves = halves.map(|half| polygon(&[&half]));
    // The ring names the date line by both of its longitudes.
    let touching = polygon(&[&[
        [170.0, -20.0],
        [180.0, -20.0],
        [-180.0, -20.0],
        [-165.0, -20.0],
        [-165.0, 15.0],
        [-180.0, 15.0],
        [180.0, 15.0],
        [170.0, 15.0],
    ]]);
    let hole = polygon(&[&rectangle(170.0, -20.0, -165.0, 15.0), &rectangle(178.0, 0.0, -178.0, 5.0)]);
    let mut inside = 0;
    for point in fibonacci_grid(5000) {
        let place = Place::from(point);
        let wanted = halves.iter().any(|half| half.contains(place));
        assert_eq!((uncut.contains(place), touching.contains(place)), (wanted, wanted), "{place:?}");
        let (longitude, latitude) = (place.longitude().0, place.latitude().0);
        let is_in_hole = longitude.abs() > 178.0 && (0.0..5.0).contains(&latitude);
        assert_eq!(hole.contains(place), wanted && !is_in_hole, "{place:?}");
        inside += usize::from(wanted);
    }
    assert!(inside > 90, "{inside} points are inside");
    assert!(uncut.contains(place(180.0, 0.0)) && uncut.contains(place(-180.0, 15.0)));
}

#[test]
fn rings_around_the_earth_and_around_poles_contain_what_they_should() {
    let world = polygon(&[&rectangle(-180.0, -90.0, 180.0, 90.0)]);
    let tropics = polygon(&[&rectangle(-180.0, -23.0, 180.0, 23.0)]);
    let tropics_with_more_corners =
        polygon(&[&[[-180.0, -23.0], [180.0, -23.0], [180.0, 23.0], [0.0, 23.0], [-180.0, 23.0]]]);
    let ring = |latitude: f64| -> Vec<[f64; 2]> { (-9..9).map(|step| [f64::from(step) * 20.0, latitude]).collect() };
    let mut backwards = ring(-60.0);
    backwards.reverse();
    let caps = [polygon(&[&ring(66.0)]), polygon(&[&ring(-60.0)]), polygon(&[&backwards])];
    // As GeoJSON files have Antarctica: cut at the date line, with edges along the pole.
    let mut cut = ring(-60.0);
    cut.extend([[180.0, -60.0], [180.0, -90.0], [-180.0, -90.0]]);
    let cut = polygon(&[&cut]);
    for point in fibonacci_grid(3000).into_iter().chain([UnitVector::NORTH_POLE, UnitVector::SOUTH_POLE]) {
        let place = Place::from(point);
        let latitude = place.latitude().0;
        assert!(world.contains(place), "{place:?}");
        assert_eq!(tropics.contains(place), latitude.abs() <= 23.0, "{place:?}");
        assert_eq!(tropics_with_more_corners.contains(place), latitude.abs() <= 23.0, "{place:?}");
        let found: Vec<bool> = caps.iter().chain([&cut]).map(|cap| cap.contains(place)).collect();
        assert_eq!(found, [latitude > 66.0, latitude < -60.0, latitude < -60.0, latitude < -60.0], "{place:?}");
    }
    assert!(world.contains(place(-180.0, 10.0)) && world.contains(place(180.0, -90.0)));
    let with_hole = polygon(&[&rectangle(-180.0, 0.0, 180.0, 90.0), &ring(66.0)]);
    assert!(with_hole.contains(place(-180.0, 65.0)) && !with_hole.contains(place(-180.0, 67.0)));
    assert!(!with_hole.contains(UnitVector::NORTH_POLE.into()));
}

#[test]
fn rings_without_an_inside_are_refused() {
    let error = |ring: &[[f64; 2]]| Polygon::new(&[ring.to_vec()]).expect_err("the ring is bad").to_string();
    assert_eq!(error(&[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), "ring 0: the ring has 3 positions, wanted at least 4");
    let unclosed = error(&[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]);
    assert_eq!(unclosed, "ring 0: the ring is not closed: it begins at [0.0, 0.0] and ends at [0.0, 1.0]");
    assert_eq!(error(&closed(vec![[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])), "ring 0: the ring encloses no area");
    let twice: Vec<[f64; 2]> = (0..12).map(|step| [f64::from(step % 6) * 60.0 - 180.0, f64::from(step)]).collect();
    assert_eq!(error(&closed(twice)), "ring 0: the ring goes around the Earth more than once");
    assert_eq!(error(&[]), "ring 0: the ring is empty, wanted at least 4 positions");
    assert!(Polygon::new(&[]).is_err());
}

/// Directions and distances of the corners of a ring around a place, degrees.
fn star() -> impl Strategy<Value = Vec<[f64; 2]>> {
    prop::collection::vec(2.0..20.0_f64, 3..40).prop_map(|lengths| {
        let step = 360.0 / lengths.len() as f64;
        let corner = |(at, length): (usize, f64)| {
            let (sine, cosine) = (at as f64 * step).to_radians().sin_cos();
            [length * cosine, length * sine]
        };
        lengths.into_iter().enumerate().map(corner).collect()
    })
}

fn wrapped(longitude: f64) -> f64 {
    Degrees(longitude).wrapped().0
}

proptest! {
    #[test]
    fn moving_a_ring_along_its_parallel_moves_its_inside(
        corners in star(),
        latitude in -60.0..60.0_f64,
        centre in -180.0..180.0_f64,
        x in -22.0..22.0_f64,
        y in -22.0..22.0_f64,
    ) {
        let at = |longitude: f64| -> Vec<[f64; 2]> {
            corners.iter().map(|[x, y]| [wrapped(longitude + x), latitude + y]).collect()
        };
        let (fixed, moved) = (polygon(&[&at(0.0)]), polygon(&[&at(centre)]));
        let (one, other) = (place(x, latitude + y), place(wrapped(centre + x), latitude + y));
        // Near an edge, rounding decides.
        let is_near_edge = fixed.outer.meets([x - 1e-9, latitude + y - 1e-9], [x + 1e-9, latitude + y + 1e-9]);
        prop_assert!(is_near_edge || fixed.contains(one) == moved.contains(other));
        // The winding number, as a definition that does not count crossings.
        let turn: f64 = corners.iter().zip(corners.iter().cycle().skip(1)).map(|(from, to)| {
            let [one, other] = [from, to].map(|corner| (corner[1] - y).atan2(corner[0] - x).to_degrees());
            wrapped(other - one)
        }).sum();
        prop_assert!(is_near_edge || fixed.contains(one) == (turn.abs() > 180.0), "{turn}");
    }

    #[test]
    fn caps_that_may_touch_a_polygon_are_never_missed(
        corners in star(),
        latitude in -70.0..70.0_f64,
        bearing in 0.0..360.0_f64,
        km in 0.0..5000.0_f64,
        share in 0.0..1.0_f64,
    ) {
        let moved = |[x, y]: &[f64; 2]| [wrapped(x + 170.0), (y + latitude).clamp(-89.0, 89.0)];
        let ring: Vec<[f64; 2]> = corners.iter().map(moved).collect();
        // A corner of the polygon lies within the cap.
        let [x, y] = ring[(share * ring.len() as f64) as usize % ring.len()];
        let corner = vector(x, y);
        let Ok(found) = Polygon::new(&[closed(ring)]) else { return Ok(()) };
        let centre = corner.displace(Degrees(bearing), Km(km)).expect("the displacement is finite");
        prop_assert!(found.may_touch(centre.into(), (km + 1e-3) / EARTH_RADIUS_KM));
    }

    #[test]
    fn distances_to_lines_equal_those_to_very_many_points_of_them(
        ends in prop::collection::vec((-180.0..180.0_f64, -90.0..90.0_f64), 1..5),
        x in -180.0..180.0_f64,
        y in -90.0..90.0_f64,
        piece_km in 1.0..30_000.0_f64,
    ) {
        let line: Vec<UnitVector> = ends.iter().map(|(x, y)| vector(*x, *y)).collect();
        let (track, point) = (Track::new(std::slice::from_ref(&line), piece_km).expect("no antipodes"), vector(x, y));
        let mut wanted = line[0].distance(point).0;
        for pair in line.windows(2) {
            for step in 0..=1000 {
                let share = f64::from(step) / 1000.0;
                let on = std::array::from_fn(|axis| (1.0 - share) * pair[0].xyz()[axis] + share * pair[1].xyz()[axis]);
                wanted = wanted.min(UnitVector::new(on).expect("no antipodes").distance(point).0);
            }
        }
        let found = track.distance(point).0;
        // The points are up to some 100 km apart, where the ends are nearly antipodes.
        prop_assert!(found <= wanted + 1e-6, "{found}, wanted at most {wanted}");
        let longest = line.windows(2).map(|pair| pair[0].distance(pair[1]).0).fold(0.0, f64::max);
        prop_assert!(longest > 18_000.0 || found >= wanted - longest / 100.0 - 1e-6, "{found}, wanted {wanted}");
    }
}

#[test]
fn lines_fall_off_with_the_distance_and_end_after_six_widths() {
    let prior = PlacePrior::new(vec![of_lines(3.0, 100.0, &[vec![vector(0.0, 0.0), vector(20.0, 0.0)]])]);
    let log_at =
        |km: f64| prior.log_at(vector(10.0, 0.0).displace(Degrees(0.0), Km(km)).expect("the displacement is finite"));
    for (km, wanted) in [(0.0, 0.0), (100.0, -0.5), (250.0, -3.125), (599.0, -17.940_05)] {
        assert!((log_at(km) - wanted).abs() < 1e-5, "{km} km: {}", log_at(km));
    }
    assert_eq!(log_at(601.0), f64::NEG_INFINITY);
    // A line between places on both sides of the date line crosses it.
    let prior = PlacePrior::new(vec![of_lines(1.0, 50.0, &[vec![vector(179.0, 10.0), vector(-179.0, 10.0)]])]);
    assert!(prior.log_at(vector(180.0, 10.0)) > -0.001 && prior.at(vector(0.0, 10.0)).is_none());
    let antipodes = [vec![vector(0.0, 0.0), vector(180.0, 0.0)]];
    let error = PriorFeature::new(1.0, 10.0, Vec::new(), &antipodes).expect_err("the way is not known").to_string();
    assert!(error.contains("antipodes"), "{error}");
}

#[test]
fn largest_value_counts_and_only_ratios_of_weights_matter() {
    let features = |factor: f64| {
        let country = of_polygon(0.5 * factor, polygon(&[&rectangle(0.0, 40.0, 10.0, 50.0)]));
        let city = of_lines(2.0 * factor, 20.0, &[vec![vector(5.0, 45.0)]]);
        PlacePrior::new(vec![country, city])
    };
    let (one, other) = (features(1.0), features(4.0));
    let [city, edge, country] = [(5.0, 45.0), (5.0, 45.4), (9.0, 41.0)].map(|(x, y)| vector(x, y));
    assert_eq!(one.at(city), Some(PriorValue { feature: 1, log: 0.0, is_near: true }));
    assert_eq!(one.at(country), Some(PriorValue { feature: 0, log: 0.25_f64.ln(), is_near: true }));
    // 44 km from the city, its value is 2 e^-2.5, which is less than that of the country.
    assert_eq!(one.at(edge).map(|value| value.feature), Some(0));
    for point in [city, edge, country] {
        assert_eq!(one.at(point), other.at(point));
    }
    assert_eq!(one.at(vector(20.0, 45.0)), None);
}

#[test]
fn features_of_any_size_and_shape_are_filled_evenly() {
    let features = [
        of_polygon(1.0, polygon(&[&rectangle(-180.0, -90.0, 180.0, 90.0)])),
        of_polygon(1.0, polygon(&[&rectangle(-10.0, 30.0, 40.0, 60.0)])),
        of_polygon(1.0, polygon(&[&rectangle(179.9999, 10.0, -179.9999, 10.0001)])),
        of_polygon(1.0, polygon(&[&rectangle(33.3, 0.0, 33.31, 20.0)])),
        of_polygon(1.0, polygon(&[&[[0.0, 90.0], [90.0, 89.99], [-170.0, 89.99]]])),
        of_lines(1.0, 0.01, &[vec![vector(12.0, 42.0)]]),
        of_lines(1.0, 10.0, &[vec![vector(0.0, 10.0), vector(30.0, 20.0)], vec![vector(-180.0, 0.0)]]),
        of_lines(1.0, 3000.0, &[vec![vector(-70.0, -33.0)]]),
    ];
    // The areas, km²; unknown for lines, which fall off.
    let areas = [5.1e8, 1.3e7, 0.022 * 0.011, 2438.0, 0.0, 0.0, 0.0, 0.0];
    let prior = PlacePrior::new(features.to_vec());
    for (feature, area) in areas.into_iter().enumerate() {
        let FeatureCells { grid, cells } = prior.even_cells(feature, 4, 64).expect("the feature has room");
        assert!(grid.order() >= 4 && cells.is_sorted());
        let centres: Vec<UnitVector> = cells.iter().map(|cell| grid.centre(*cell)).collect();
        assert!(centres.iter().all(|centre| features[feature].log_at(*centre, (*centre).into()).is_finite()));
        let near = centres.iter().filter(|centre| features[feature].is_near(**centre)).count();
        assert!(near >= 64 && cells.len() < 20_000, "feature {feature}: {near} of {} cells", cells.len());
        let found = cells.len() as f64 * grid.cell_km2();
        // Few centres have their longitude in a narrow strip from south to north, because many lie on one meridian.
        let allowed = if feature == 3 { 0.5 } else { 0.2 };
        assert!(area == 0.0 || (found / area - 1.0).abs() < allowed, "feature {feature}: {found} km², wanted {area}");
    }
    let sliver = of_polygon(1.0, polygon(&[&rectangle(33.3, 0.0, 33.300_001, 20.0)]));
    assert_eq!(PlacePrior::new(vec![sliver]).even_cells(0, 4, 64), None, "the feature is 11 cm wide");
    // No cell in a feature is missed.
    let all = Healpix::new(5);
    for feature in [1, 6, 7] {
        let wanted: Vec<u64> = (0..all.cells())
            .filter(|cell| features[feature].log_at(all.centre(*cell), all.centre(*cell).into()).is_finite())
            .collect();
        let fine = prior.even_cells(feature, 5, 0).expect("the feature has room");
        if fine.grid == all {
            assert_eq!(fine.cells, wanted);
        } else {
            assert!(feature == 6, "feature {feature} has cells of order {}", fine.grid.order());
        }
    }
}
