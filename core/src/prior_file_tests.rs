//! Tests of the files of priors: every geometry, weights and widths, and the errors.

use serde_json::json;

use super::*;

fn read(bytes: &[u8]) -> Result<PlacePrior, String> {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let path = folder.path().join("prior.geojson");
    std::fs::write(&path, bytes).expect("the folder is writable");
    let text = |error: PriorError| error.to_string().replace(&format!("{}: ", path.display()), "");
    PriorFile::read(&path).map_err(text)?.prior().map_err(text)
}

fn of_geometry(geometry: &Value) -> Result<PlacePrior, String> {
    read(geometry.to_string().as_bytes())
}

fn is_in(prior: &PlacePrior, longitude: f64, latitude: f64) -> bool {
    prior.at(vector([longitude, latitude]).expect("the place is valid")).is_some()
}

#[test]
fn all_geometries_are_read_bare_or_in_features() {
    let ring = json!([[0, 0], [2, 0], [2, 2], [0, 2], [0, 0]]);
    let geometries = [
        json!({"type": "Point", "coordinates": [1, 1, 250.5]}),
        json!({"type": "MultiPoint", "coordinates": [[1, 1], [50, 1]]}),
        json!({"type": "LineString", "coordinates": [[0, 1], [2, 1]]}),
        json!({"type": "MultiLineString", "coordinates": [[[0, 1], [2, 1]], [[50, 1], [51, 1]]]}),
        json!({"type": "Polygon", "coordinates": [ring]}),
        json!({"type": "MultiPolygon", "coordinates": [[ring], [[[50, 0], [51, 0], [51, 2], [50, 0]]]]}),
    ];
    let collection = json!({"type": "GeometryCollection", "geometries": geometries});
    for geometry in geometries.iter().chain([&collection]) {
        let feature = json!({"type": "Feature", "geometry": geometry, "properties": {"name": "x", "weight": null}});
        let features = json!({"type": "FeatureCollection", "features": [feature]});
        for root in [geometry, &feature, &features] {
            let prior = of_geometry(root).expect("the file is valid");
            assert!(is_in(&prior, 1.0, 1.0) && !is_in(&prior, 30.0, 1.0), "{root}");
        }
    }
    let marked = format!("\u{feff}{}", geometries[0]);
    assert!(read(marked.as_bytes()).is_ok());
}

#[test]
fn weights_and_widths_are_read() {
    let feature = |at: f64, properties: Value| {
        let geometry = json!({"type": "Point", "coordinates": [at, 0]});
        json!({"type": "Feature", "properties": properties, "geometry": geometry})
    };
    let features =
        [feature(0.0, json!({"weight": 4})), feature(50.0, json!({"width_km": 500})), feature(90.0, json!(null))];
    let prior = of_geometry(&json!({"type": "FeatureCollection", "features": features})).expect("the file is valid");
    let log = |longitude: f64| prior.log_at(vector([longitude, 0.0]).expect("the place is valid"));
    assert_eq!((log(0.0), log(50.0)), (0.0, 0.25_f64.ln()));
    // Five degrees are 556 km.
    assert!((log(55.0) - log(50.0) + 0.618).abs() < 0.001 && log(5.0) == f64::NEG_INFINITY && log(91.0) < -17.0);
}

#[test]
fn every_error_names_feature_field_value_and_what_is_wanted() {
    let point = |coordinates: Value| json!({"type": "Point", "coordinates": coordinates});
    let ring = |ring: Value| json!({"type": "Polygon", "coordinates": [ring]});
    let feature = |geometry: Value, properties: Value| {
        let good = json!({"type": "Feature", "geometry": point(json!([1, 2])), "properties": {}});
        let bad = json!({"type": "Feature", "geometry": geometry, "properties": properties});
        json!({"type": "FeatureCollection", "features": [good, bad]})
    };
    let square = json!([[0, 0], [1, 0], [1, 1], [0, 0]]);
    let cases = [
        (json!([1]), "the file is [1], wanted a GeoJSON object"),
        (json!({"features": []}), "type is missing; wanted a FeatureCollection, a Feature or a geometry"),
        (json!({"type": 3}), "type is 3, wanted a string"),
        (json!({"type": "FeatureCollection"}), "features is missing, wanted a list"),
        (json!({"type": "FeatureCollection", "features": []}), "features is an empty list, wanted at least 1"),
        (json!({"type": "FeatureCollection", "features": [7]}), "feature 0: the feature is 7, wanted a Geo"),
        (json!({"type": "Circle"}), "feature 0: geometry.coordinates is missing, wanted a list"),
        (json!({"type": "Circle", "coordinates": [1, 2]}), "0: geometry.type is \"Circle\", wanted Point, Multi"),
        (feature(json!(null), json!({})), "feature 1: geometry is null, wanted a GeoJSON object"),
        (feature(point(json!([1, 2])), json!([])), "feature 1: properties is an empty list, wanted an object"),
        (feature(point(json!([1, 2])), json!({"weight": 0})), "1: properties.weight is 0, wanted a number above 0"),
        (feature(point(json!([1, 2])), json!({"weight": "2"})), "properties.weight is \"2\", wanted a number"),
        (feature(point(json!([1, 2])), json!({"width_km": -1.5})), "properties.width_km is -1.5, wanted a number"),
        (feature(point(json!([1, 2])), json!({"width_km": 1e6})), "above 0, at most 20000"),
        (feature(ring(square), json!({"width_km": 5})), "feature 1: properties.width_km is for points and lines"),
        (point(json!([1])), "geometry.coordinates is [1], wanted [longitude, latitude]"),
        (point(json!([1, "2"])), "geometry.coordinates[1] is \"2\", wanted a number"),
        (point(json!([1, null])), "geometry.coordinates[1] is null, wanted a number"),
        (point(json!([190, 2])), "geometry.coordinates: longitude is 190, wanted -180 to 180"),
        (point(json!([35.6, 139.7])), "latitude is 139.7, wanted -90 to 90; GeoJSON has the lon"),
        (point(json!([200, 139.7])), "longitude is 200, wanted -180 to 180"),
        (json!({"type": "LineString", "coordinates": [[1, 2]]}), "geometry.coordinates has 1 position, wanted at"),
        (json!({"type": "LineString", "coordinates": [[0, 0], [180, 0]]}), "a line joins two antipodes"),
        (json!({"type": "MultiPoint", "coordinates": []}), "geometry.coordinates is an empty list"),
        (ring(json!([[0, 0], [1, 0], [0, 0]])), "geometry.coordinates: ring 0: the ring has 3 positions"),
        (ring(json!([[0, 0], [1, 0], [1, 1], [0, 1]])), "ring 0: the ring is not closed"),
        (ring(json!([[0, 0], [1, 0], [1, 95], [0, 0]])), "geometry.coordinates[0][2]: latitude is 95, wanted"),
        (
            json!({"type": "GeometryCollection", "geometries": [{"type": "Point"}]}),
            "geometry.geometries[0].coordinates",
        ),
    ];
    for (root, words) in cases {
        let error = of_geometry(&root).expect_err("the file is not valid");
        assert!(error.contains(words), "{root}: {error}, wanted {words}");
    }
    assert_eq!(read(b"").expect_err("the file is empty"), "the file is empty, wanted GeoJSON");
    assert!(read(b"{\"type\": NaN}").expect_err("NaN is not JSON").starts_with("not valid JSON: "));
    assert!(read(b"\xff\xfe").expect_err("this is not UTF-8").starts_with("not valid JSON: "));
    assert!(read(&vec![b' '; BYTES_MAX as usize + 1]).expect_err("too long").contains("larger than 16777216 bytes"));
    assert!(read(&b"[".repeat(100_000)).expect_err("too deep").contains("recursion limit"));
    let error = PriorFile::read(Path::new("/nothing/here")).expect_err("there is no such file");
    assert_eq!(error.exit_code(), ExitCode::Io);
}
