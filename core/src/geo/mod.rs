//! Points on a spherical Earth: coordinates, unit vectors, distances, cells, grids, nearest neighbours and priors.
//!
//! The code is pure: it has no I/O and no random numbers. Coordinates are validated when a [`Place`] is constructed,
//! and vectors when a [`UnitVector`] is constructed. The latitude of a `Place` always lies in [-90, 90] and its
//! longitude in [-180, 180), and the length of a `UnitVector` is always 1 up to rounding.
//!
//! Source: standard spherical trigonometry. Distances use the two-argument arctangent of cross product and dot product,
//! which is accurate at small angles and near antipodes.

mod grid;
mod healpix;
mod index;
mod place;
mod prior;
mod ring;
mod track;
mod vector;

pub use grid::{CELL_DEGREES_RANGE, cell_of, fibonacci_grid};
pub use healpix::{Healpix, order_and_cell, unique_cell};
pub use index::SphereIndex;
pub use place::{Degrees, GeoError, Km, Place, places};
pub use prior::{FeatureCells, PlacePrior, Polygon, PriorFeature, PriorValue, check_position};
pub use vector::{TangentBasis, UnitVector};

/// Mean Earth radius (IUGG), km.
pub const EARTH_RADIUS_KM: f64 = 6371.0088;
