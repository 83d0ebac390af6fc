//! Points on a spherical Earth: coordinates, unit vectors, distances, grids, nearest neighbours.
//!
//! Pure: no I/O, no random numbers. Coordinates are validated once, in [`Place::new`] and [`places`]. After that, every
//! latitude lies in [-90, 90], every longitude in [-180, 180), and every vector on the unit sphere.
//!
//! Source: standard spherical trigonometry. Distances use the two-argument arctangent of cross and dot product, which stays
//! accurate at small angles and near antipodes.

mod grid;
mod index;
mod place;
mod vector;

pub use grid::fibonacci_grid;
pub use index::SphereIndex;
pub use place::{Degrees, GeoError, Km, Place, places};
pub use vector::{TangentBasis, UnitVector};

/// Mean Earth radius (IUGG), km.
pub const EARTH_RADIUS_KM: f64 = 6371.0088;
