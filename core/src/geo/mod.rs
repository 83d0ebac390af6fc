//! Points on the Earth as a sphere: coordinates, unit vectors, distances, grids, what is near.
//!
//! Pure: no I/O, no random numbers of its own. Coordinates are checked where they enter ([`Place::new`],
//! [`places`]); behind that every latitude lies in [-90, 90], every longitude in [-180, 180), every vector on the
//! unit sphere. Source: great circles as in any text on spherical trigonometry; distances by the two-argument
//! arctangent of cross and dot product, which loses no digits at small angles or near antipodes.

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
