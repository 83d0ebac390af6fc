//! Reads a prior from a GeoJSON file (RFC 7946): what is known already about the places of photos.
//!
//! The file is a FeatureCollection, a Feature, or a geometry of any type. A feature may have the properties `weight`
//! and, for points and lines, `width_km`; other properties are ignored. An error names the file, the feature (counted
//! from 0) and the field.

use std::fs::File;
use std::hash::Hasher as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use twox_hash::XxHash3_64;

use crate::exit_code::{ExitCode, FailureKind, HasExitCode};
use crate::geo::{Degrees, Place, PlacePrior, Polygon, PriorFeature, UnitVector, check_position};
use crate::text;

/// Files with more bytes are refused. The values of a file take up to about 15 times its size in memory.
pub const BYTES_MAX: u64 = 16 << 20;
/// `width_km` of points and lines that have none.
pub const WIDTH_KM: f64 = 10.0;
/// The largest `width_km`: half of the Earth's circumference, rounded.
const WIDTH_KM_MAX: f64 = 20_000.0;
/// Most features of a file. At each place, the prior is the largest over all features.
const FEATURES_MAX: usize = 1000;

const GEOMETRIES: &str = "Point, MultiPoint, LineString, MultiLineString, Polygon, MultiPolygon or GeometryCollection";

/// A file that is not a prior.
#[derive(Debug, thiserror::Error)]
pub enum PriorError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// The file has the wrong contents.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The feature, the field, and what is wrong.
        reason: String,
    },
}

impl HasExitCode for PriorError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Io { .. } => ExitCode::Io,
            Self::Content { .. } => ExitCode::BadData,
        }
    }

    fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Io { error, .. } => FailureKind::of_io(error),
            Self::Content { .. } => FailureKind::Final,
        }
    }
}

/// The bytes of the file of a prior.
#[derive(Debug)]
pub struct PriorFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl PriorFile {
    /// Reads the file `path`, which may be a pipe.
    pub fn read(path: &Path) -> Result<Self, PriorError> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut bytes));
        read.map_err(|error| PriorError::Io { path: path.to_owned(), error })?;
        let file = Self { path: path.to_owned(), bytes };
        match file.bytes.len() as u64 {
            0 => Err(file.error("the file is empty, wanted GeoJSON")),
            length if length > BYTES_MAX => {
                Err(file.error(format!("the file is larger than {BYTES_MAX} bytes; simplify its shapes")))
            }
            _ => Ok(file),
        }
    }

    /// The contents of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A checksum of the contents.
    pub fn xxh3(&self) -> String {
        let mut hash = XxHash3_64::new();
        hash.write(&self.bytes);
        format!("{:016x}", hash.finish())
    }

    /// The prior in the file.
    pub fn prior(&self) -> Result<PlacePrior, PriorError> {
        let json = self.bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&self.bytes);
        let root = serde_json::from_slice(json).map_err(|error| self.error(format!("not valid JSON: {error}")))?;
        features(&root).map(PlacePrior::new).map_err(|reason| self.error(reason))
    }

    fn error(&self, reason: impl Into<String>) -> PriorError {
        PriorError::Content { path: self.path.clone(), reason: reason.into() }
    }
}

/// The shapes of a feature.
#[derive(Default)]
struct Shapes {
    polygons: Vec<Polygon>,
    lines: Vec<Vec<UnitVector>>,
}

fn features(root: &Value) -> Result<Vec<PriorFeature>, String> {
    let object = object(root, "the file")?;
    let in_feature = |number: usize, error: String| format!("feature {number}: {error}");
    match type_of(object, "")? {
        "FeatureCollection" => {
            let found = list(object, "features", "features")?;
            if found.len() > FEATURES_MAX {
                let count = found.len();
                return Err(format!(
                    "features has {count} entries, wanted at most {FEATURES_MAX}; put points into one MultiPoint, and \
                     lines into one MultiLineString"
                ));
            }
            let of = |(number, value)| feature(value).map_err(|error| in_feature(number, error));
            found.iter().enumerate().map(of).collect()
        }
        "Feature" => Ok(vec![feature(root).map_err(|error| in_feature(0, error))?]),
        _ => {
            let mut shapes = Shapes::default();
            add_geometry(root, "geometry", &mut shapes).map_err(|error| in_feature(0, error))?;
            Ok(vec![prior_feature(None, shapes).map_err(|error| in_feature(0, error))?])
        }
    }
}

fn feature(value: &Value) -> Result<PriorFeature, String> {
    let object = object(value, "the feature")?;
    match type_of(object, "")? {
        "Feature" => {}
        other => return Err(format!("type is \"{}\", wanted \"Feature\"", text::shown(other))),
    }
    let properties = match object.get("properties") {
        None | Some(Value::Null) => None,
        Some(Value::Object(properties)) => Some(properties),
        Some(other) => return Err(format!("properties is {}, wanted an object", shown(other))),
    };
    let mut shapes = Shapes::default();
    add_geometry(object.get("geometry").unwrap_or(&Value::Null), "geometry", &mut shapes)?;
    prior_feature(properties, shapes)
}

fn prior_feature(properties: Option<&Map<String, Value>>, shapes: Shapes) -> Result<PriorFeature, String> {
    let property = |name: &str, most: f64| match properties.and_then(|properties| properties.get(name)) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64().filter(|number| *number > 0.0 && *number <= most) {
            Some(number) => Ok(Some(number)),
            None if most < f64::MAX => {
                Err(format!("properties.{name} is {}, wanted a number above 0, at most {most}", shown(value)))
            }
            None => Err(format!("properties.{name} is {}, wanted a number above 0", shown(value))),
        },
    };
    let (weight, width_km) = (property("weight", f64::MAX)?, property("width_km", WIDTH_KM_MAX)?);
    if width_km.is_some() && shapes.lines.is_empty() {
        return Err("properties.width_km is for points and lines, but the feature has only polygons; remove it".into());
    }
    let (weight, width_km) = (weight.unwrap_or(1.0), width_km.unwrap_or(WIDTH_KM));
    PriorFeature::new(weight, width_km, shapes.polygons, &shapes.lines)
        .map_err(|error| format!("geometry.coordinates: {error}"))
}

/// Adds the shapes of a geometry. `field` is its name in error messages.
fn add_geometry(value: &Value, field: &str, shapes: &mut Shapes) -> Result<(), String> {
    let object = object(value, field)?;
    let kind = type_of(object, &format!("{field}."))?;
    if kind == "GeometryCollection" {
        let name = format!("{field}.geometries");
        let members = list(object, "geometries", &name)?.iter().enumerate();
        return members.into_iter().try_for_each(|(at, member)| add_geometry(member, &format!("{name}[{at}]"), shapes));
    }
    let name = format!("{field}.coordinates");
    let Some(coordinates) = object.get("coordinates") else { return Err(format!("{name} is missing, wanted a list")) };
    let is_line = |(name, value): (String, &Value)| line(value, &name);
    let is_polygon = |(name, value): (String, &Value)| polygon(value, &name);
    match kind {
        "Point" => shapes.lines.push(vec![vector(position(coordinates, &name)?)?]),
        "MultiPoint" => {
            for (name, value) in members(coordinates, &name)? {
                shapes.lines.push(vec![vector(position(value, &name)?)?]);
            }
        }
        "LineString" => shapes.lines.push(line(coordinates, &name)?),
        "MultiLineString" => {
            shapes.lines.extend(members(coordinates, &name)?.map(is_line).collect::<Result<Vec<_>, _>>()?);
        }
        "Polygon" => shapes.polygons.push(polygon(coordinates, &name)?),
        "MultiPolygon" => {
            shapes.polygons.extend(members(coordinates, &name)?.map(is_polygon).collect::<Result<Vec<_>, _>>()?);
        }
        other => return Err(format!("{field}.type is \"{}\", wanted {GEOMETRIES}", text::shown(other))),
    }
    Ok(())
}

fn polygon(value: &Value, name: &str) -> Result<Polygon, String> {
    let rings: Vec<Vec<[f64; 2]>> =
        members(value, name)?.map(|(name, value)| positions(value, &name)).collect::<Result<_, _>>()?;
    Polygon::new(&rings).map_err(|error| format!("{name}: {error}"))
}

fn line(value: &Value, name: &str) -> Result<Vec<UnitVector>, String> {
    let found = positions(value, name)?;
    if found.len() < 2 {
        return Err(format!("{name} has 1 position, wanted at least 2"));
    }
    found.into_iter().map(vector).collect()
}

fn positions(value: &Value, name: &str) -> Result<Vec<[f64; 2]>, String> {
    members(value, name)?.map(|(name, value)| position(value, &name)).collect()
}

/// A longitude and a latitude. A third number, the altitude, is ignored.
fn position(value: &Value, name: &str) -> Result<[f64; 2], String> {
    let numbers = match value {
        Value::Array(numbers) if numbers.len() >= 2 => numbers,
        other => return Err(format!("{name} is {}, wanted [longitude, latitude]", shown(other))),
    };
    let number = |at: usize| {
        let found = numbers[at].as_f64().filter(|number| number.is_finite());
        found.ok_or_else(|| format!("{name}[{at}] is {}, wanted a number", shown(&numbers[at])))
    };
    let (longitude, latitude) = (number(0)?, number(1)?);
    check_position(longitude, latitude).map_err(|error| {
        let is_swapped = check_position(latitude, longitude).is_ok();
        let advice = if is_swapped { "; GeoJSON has the longitude first: are the two swapped?" } else { "" };
        format!("{name}: {error}{advice}")
    })?;
    Ok([longitude, latitude])
}

fn vector([longitude, latitude]: [f64; 2]) -> Result<UnitVector, String> {
    Place::new(Degrees(latitude), Degrees(longitude)).map(UnitVector::from).map_err(|error| error.to_string())
}

fn object<'a>(value: &'a Value, name: &str) -> Result<&'a Map<String, Value>, String> {
    value.as_object().ok_or_else(|| format!("{name} is {}, wanted a GeoJSON object", shown(value)))
}

fn type_of<'a>(object: &'a Map<String, Value>, prefix: &str) -> Result<&'a str, String> {
    match object.get("type") {
        Some(Value::String(kind)) => Ok(kind),
        Some(other) => Err(format!("{prefix}type is {}, wanted a string", shown(other))),
        None => Err(format!("{prefix}type is missing; wanted a FeatureCollection, a Feature or a geometry")),
    }
}

/// The list `key` of an object, which must not be empty. `name` is its name in error messages.
fn list<'a>(object: &'a Map<String, Value>, key: &str, name: &str) -> Result<&'a [Value], String> {
    match object.get(key) {
        Some(value) => elements(value, name),
        None => Err(format!("{name} is missing, wanted a list")),
    }
}

fn elements<'a>(value: &'a Value, name: &str) -> Result<&'a [Value], String> {
    match value {
        Value::Array(found) if found.is_empty() => Err(format!("{name} is an empty list, wanted at least 1 element")),
        Value::Array(found) => Ok(found),
        other => Err(format!("{name} is {}, wanted a list", shown(other))),
    }
}

/// The elements of a list, with their names in error messages.
fn members<'a>(value: &'a Value, name: &str) -> Result<impl Iterator<Item = (String, &'a Value)>, String> {
    let found = elements(value, name)?;
    Ok(found.iter().enumerate().map(move |(at, value)| (format!("{name}[{at}]"), value)))
}

/// A value as it is shown in an error message.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(found) if found.is_empty() => "an empty list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => text::shown(&other.to_string()),
    }
}

#[cfg(test)]
#[path = "prior_file_tests.rs"]
mod tests;
