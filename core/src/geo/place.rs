//! Latitude and longitude with units, validated on construction.
//!
//! A longitude beyond ±180° is wrapped. A latitude out of range or a value that is not finite is an error; values are
//! never clamped. The error gives the value, the allowed range and, for columns, the row.

/// An angle, degrees.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Degrees(pub f64);

/// A length, km.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Km(pub f64);

impl Degrees {
    /// The same angle in radians.
    pub fn radians(self) -> f64 {
        self.0.to_radians()
    }

    /// The same direction, expressed as an angle in [-180, 180). The result is exact: nothing is rounded.
    pub fn wrapped(self) -> Self {
        let rest = self.0 % 360.0;
        Self(match rest {
            rest if rest >= 180.0 => rest - 360.0,
            rest if rest < -180.0 => rest + 360.0,
            rest => rest,
        })
    }
}

/// The error for numbers that do not describe a point on the sphere.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct GeoError(pub(super) String);

/// A point on Earth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    latitude: Degrees,
    longitude: Degrees,
}

impl Place {
    /// Accepts a latitude in [-90, 90] and any finite longitude, which is wrapped to [-180, 180).
    pub fn new(latitude: Degrees, longitude: Degrees) -> Result<Self, GeoError> {
        if !(-90.0..=90.0).contains(&latitude.0) {
            return Err(GeoError(format!("latitude is {}, wanted -90 to 90", latitude.0)));
        }
        if !longitude.0.is_finite() {
            return Err(GeoError(format!("longitude is {}, wanted a finite number", longitude.0)));
        }
        Ok(Self { latitude, longitude: longitude.wrapped() })
    }

    /// Latitude in [-90, 90].
    pub fn latitude(self) -> Degrees {
        self.latitude
    }

    /// Longitude in [-180, 180).
    pub fn longitude(self) -> Degrees {
        self.longitude
    }
}

/// Combines a column of latitudes and a column of longitudes into places. The error names the first bad row, counted
/// from 0.
pub fn places(latitudes: &[f64], longitudes: &[f64]) -> Result<Vec<Place>, GeoError> {
    if latitudes.len() != longitudes.len() {
        let (latitudes, longitudes) = (latitudes.len(), longitudes.len());
        return Err(GeoError(format!("got {latitudes} latitudes and {longitudes} longitudes, wanted equal numbers")));
    }
    let place = |(row, (latitude, longitude)): (usize, (&f64, &f64))| {
        Place::new(Degrees(*latitude), Degrees(*longitude)).map_err(|error| GeoError(format!("row {row}: {error}")))
    };
    latitudes.iter().zip(longitudes).enumerate().map(place).collect()
}
