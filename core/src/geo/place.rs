//! Latitude and longitude with units, checked at the door.
//!
//! Nothing is clamped: what is not a point on Earth is an error that says what it got, what it wanted and in which row.

use super::vector::UnitVector;

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

    /// The same direction in [-180, 180). Exact: no step of it rounds.
    pub fn wrapped(self) -> Self {
        let rest = self.0 % 360.0;
        Self(match rest {
            rest if rest >= 180.0 => rest - 360.0,
            rest if rest < -180.0 => rest + 360.0,
            rest => rest,
        })
    }
}

impl std::fmt::Display for Degrees {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}°", self.0)
    }
}

impl std::fmt::Display for Km {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} km", self.0)
    }
}

/// Coordinates or vectors that are no point on the sphere.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GeoError {
    /// A latitude that is not a number or beyond a pole.
    #[error("latitude is {0}, wanted -90 to 90")]
    Latitude(f64),
    /// A longitude that is not a finite number.
    #[error("longitude is {0}, wanted a finite number")]
    Longitude(f64),
    /// A vector without a direction.
    #[error("vector is {0:?}, wanted finite numbers, not all zero")]
    Direction([f64; 3]),
    /// A height that no point of the unit sphere has.
    #[error("height is {0}, wanted -1 to 1")]
    Height(f64),
    /// An angle that is not a finite number.
    #[error("angle is {0} rad, wanted a finite number")]
    Angle(f64),
    /// A way along a great circle that has no end.
    #[error("tangent is {0:?}, wanted finite numbers and a finite length")]
    Tangent([f64; 3]),
    /// A bearing or a distance that is not a finite number.
    #[error("bearing is {bearing}, distance {distance}, wanted finite numbers")]
    Displacement {
        /// The direction asked for.
        bearing: Degrees,
        /// How far.
        distance: Km,
    },
    /// One of many is wrong.
    #[error("row {row}: {error}")]
    Row {
        /// Which, from 0.
        row: usize,
        /// What is wrong with it.
        error: Box<GeoError>,
    },
    /// Two columns of different lengths.
    #[error("{latitudes} latitudes but {longitudes} longitudes")]
    Lengths {
        /// Length of the one.
        latitudes: usize,
        /// Length of the other.
        longitudes: usize,
    },
}

/// A point on Earth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    latitude: Degrees,
    longitude: Degrees,
}

impl Place {
    /// A latitude in [-90, 90] and any finite longitude, which is wrapped to [-180, 180).
    pub fn new(latitude: Degrees, longitude: Degrees) -> Result<Self, GeoError> {
        if !(-90.0..=90.0).contains(&latitude.0) {
            return Err(GeoError::Latitude(latitude.0));
        }
        if !longitude.0.is_finite() {
            return Err(GeoError::Longitude(longitude.0));
        }
        Ok(Self { latitude, longitude: longitude.wrapped() })
    }

    /// In [-90, 90].
    pub fn latitude(self) -> Degrees {
        self.latitude
    }

    /// In [-180, 180).
    pub fn longitude(self) -> Degrees {
        self.longitude
    }

    /// Great-circle distance.
    pub fn distance(self, other: Self) -> Km {
        UnitVector::from(self).distance(UnitVector::from(other))
    }

    /// The place at `distance` along the great circle that leaves at `bearing`, clockwise from north.
    pub fn displace(self, bearing: Degrees, distance: Km) -> Result<Self, GeoError> {
        Ok(UnitVector::from(self).displace(bearing, distance)?.into())
    }
}

/// Two columns as places; the first bad row is named, from 0.
pub fn places(latitudes: &[f64], longitudes: &[f64]) -> Result<Vec<Place>, GeoError> {
    if latitudes.len() != longitudes.len() {
        return Err(GeoError::Lengths { latitudes: latitudes.len(), longitudes: longitudes.len() });
    }
    let pairs = latitudes.iter().zip(longitudes).enumerate();
    pairs
        .map(|(row, (latitude, longitude))| {
            Place::new(Degrees(*latitude), Degrees(*longitude))
                .map_err(|error| GeoError::Row { row, error: Box::new(error) })
        })
        .collect()
}
