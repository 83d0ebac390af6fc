//! A prior: what is known about a place before anything is measured. It consists of features with weights.
//!
//! In a polygon, the prior is the weight of its feature. At the distance d from a point or line, it is the weight times
//! exp(-(d / width)² / 2), and 0 from six widths on. Where several features overlap, the largest value counts. Outside
//! all features, it is 0. Only ratios of weights matter: they are divided by the largest.
//!
//! [`PlacePrior::even_cells`] fills a feature of any size, from a garden to an ocean, with HEALPix cells. It starts
//! with the cells of order 0 and divides those that may touch the feature.

use super::healpix::Healpix;
use super::place::{Degrees, GeoError, Km, Place};
use super::ring::{Ring, RingSide};
use super::track::Track;
use super::vector::UnitVector;

/// Number of widths from which on the prior around points and lines is 0.
const WIDTHS: f64 = 6.0;
/// Within one width of a point or line, the logarithm is at most this far below its maximum.
const NEAR: f64 = 0.5;
/// Cells around points and lines are at most this many widths apart, if there are not too many of them.
const WIDTHS_APART: f64 = 1.5;
/// The largest order of cells that a feature is filled with: a cell is 0.4 m wide.
const ORDER_MAX: u32 = 24;
/// With more cells than this, a feature gets no smaller ones.
const CELLS_MAX: usize = 1 << 16;
/// Added to the rectangle around a cell, degrees, so that rounding loses no edge.
const SLACK_DEGREES: f64 = 1e-9;

/// A polygon with holes.
#[derive(Debug, Clone)]
pub struct Polygon {
    outer: Ring,
    holes: Vec<Ring>,
}

impl Polygon {
    /// A polygon of rings, each a list of longitudes (-180 to 180) and latitudes (-90 to 90). The first ring is the
    /// outer one, and the others are holes. The error says which ring is wrong.
    pub fn new(rings: &[Vec<[f64; 2]>]) -> Result<Self, GeoError> {
        let of = |(number, ring): (usize, &Vec<[f64; 2]>)| {
            Ring::new(ring).map_err(|GeoError(error)| GeoError(format!("ring {number}: {error}")))
        };
        let mut rings = rings.iter().enumerate().map(of).collect::<Result<Vec<Ring>, GeoError>>()?.into_iter();
        let Some(outer) = rings.next() else {
            return Err(GeoError("the polygon has no rings, wanted at least 1".to_owned()));
        };
        Ok(Self { outer, holes: rings.collect() })
    }

    /// Whether a place lies in the polygon or on its edge. Edges are straight on a map of longitude and latitude.
    pub fn contains(&self, place: Place) -> bool {
        let at = [place.longitude().0, place.latitude().0];
        self.outer.side(at) != RingSide::Outside && !self.holes.iter().any(|hole| hole.side(at) == RingSide::Inside)
    }

    /// False only if no place within `radius` (radians) of `place` lies in the polygon.
    fn may_touch(&self, place: Place, radius: f64) -> bool {
        let (at, reach) = ([place.longitude().0, place.latitude().0], radius.to_degrees() + SLACK_DEGREES);
        let (low, high) = (at[1] - reach, at[1] + reach);
        // Near a pole, the cap has all longitudes.
        let across = if low <= -90.0 || high >= 90.0 {
            180.0
        } else {
            (radius.sin() / place.latitude().radians().cos()).min(1.0).asin().to_degrees() + SLACK_DEGREES
        };
        let (low, high) = ([at[0] - across, low], [at[0] + across, high]);
        self.contains(place) || std::iter::once(&self.outer).chain(&self.holes).any(|ring| ring.meets(low, high))
    }
}

/// A part of a prior.
#[derive(Debug, Clone)]
pub struct PriorFeature {
    weight: f64,
    /// Logarithm of the weight, divided by the largest weight of the prior.
    log_weight: f64,
    width_km: f64,
    polygons: Vec<Polygon>,
    track: Option<Track>,
}

impl PriorFeature {
    /// A feature of polygons, and of lines, each a list of points; a list of one point is that point. `weight` and
    /// `width_km` are finite and above 0.
    pub fn new(
        weight: f64,
        width_km: f64,
        polygons: Vec<Polygon>,
        lines: &[Vec<UnitVector>],
    ) -> Result<Self, GeoError> {
        let track = if lines.is_empty() { None } else { Some(Track::new(lines, width_km)?) };
        Ok(Self { weight, log_weight: 0.0, width_km, polygons, track })
    }

    /// Logarithm of the value of the feature at a place.
    fn log_at(&self, point: UnitVector, place: Place) -> f64 {
        if self.polygons.iter().any(|polygon| polygon.contains(place)) {
            return self.log_weight;
        }
        let widths = self.track.as_ref().map_or(f64::INFINITY, |track| track.distance(point).0 / self.width_km);
        if widths < WIDTHS { self.log_weight - 0.5 * widths * widths } else { f64::NEG_INFINITY }
    }

    /// Whether a point lies in a polygon, or within one width of a point or line.
    fn is_near(&self, point: UnitVector) -> bool {
        self.log_at(point, point.into()) >= self.log_weight - NEAR
    }

    /// False only if the feature is 0 everywhere within `radius` (radians) of `point`.
    fn may_touch(&self, point: UnitVector, radius: f64) -> bool {
        let reach = Km(radius * super::EARTH_RADIUS_KM + WIDTHS * self.width_km);
        self.track.as_ref().is_some_and(|track| track.distance(point) <= reach)
            || self.polygons.iter().any(|polygon| polygon.may_touch(point.into(), radius))
    }
}

/// HEALPix cells of one order whose centres lie in a feature, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureCells {
    /// The cells of this order.
    pub grid: Healpix,
    /// Their numbers in the nested scheme.
    pub cells: Vec<u64>,
}

/// The prior at a point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PriorValue {
    /// The feature with the largest value at the point. Of equals, the first.
    pub feature: usize,
    /// Logarithm of the value, at most 0.
    pub log: f64,
    /// Whether the point lies in a polygon of the feature, or within one width of its points and lines.
    pub is_near: bool,
}

/// A prior over places.
#[derive(Debug, Clone)]
pub struct PlacePrior {
    features: Vec<PriorFeature>,
}

impl PlacePrior {
    /// A prior of some features.
    pub fn new(mut features: Vec<PriorFeature>) -> Self {
        let most = features.iter().map(|feature| feature.weight).fold(0.0, f64::max);
        for feature in &mut features {
            feature.log_weight = (feature.weight / most).max(f64::MIN_POSITIVE).ln();
        }
        Self { features }
    }

    /// Number of features.
    pub fn features(&self) -> usize {
        self.features.len()
    }

    /// The prior at a point. `None` where it is 0.
    pub fn at(&self, point: UnitVector) -> Option<PriorValue> {
        let (place, mut best) = (Place::from(point), None);
        for (number, feature) in self.features.iter().enumerate() {
            let least = best.map_or(f64::NEG_INFINITY, |best: PriorValue| best.log);
            if feature.log_weight > least {
                let log = feature.log_at(point, place);
                let is_near = log >= feature.log_weight - NEAR;
                best = if log > least { Some(PriorValue { feature: number, log, is_near }) } else { best };
            }
        }
        best
    }

    /// Logarithm of the prior at a point, at most 0; negative infinity where the prior is 0.
    pub fn log_at(&self, point: UnitVector) -> f64 {
        self.at(point).map_or(f64::NEG_INFINITY, |value| value.log)
    }

    /// The cells whose centres lie in a feature. They have the smallest order that is at least `order_min`, and has at
    /// least `count_min` centres in the polygons or within one width of points and lines. `None` if there is no such
    /// centre, because the feature is too narrow.
    pub fn even_cells(&self, feature: usize, order_min: u32, count_min: usize) -> Option<FeatureCells> {
        let feature = &self.features[feature];
        let mut open: Vec<u64> = (0..12).collect();
        for order in 0..=ORDER_MAX {
            let grid = Healpix::new(order);
            open.retain(|cell| feature.may_touch(grid.centre(*cell), grid.radius()));
            let is_last = order == ORDER_MAX || open.len() > CELLS_MAX;
            let is_fine = feature.track.is_none() || grid.cell_km2().sqrt() <= WIDTHS_APART * feature.width_km;
            let near = || open.iter().filter(|cell| feature.is_near(grid.centre(**cell))).count();
            if order >= order_min && (is_last || is_fine && near() >= count_min) {
                let is_inside = |cell: &u64| {
                    let centre = grid.centre(*cell);
                    feature.log_at(centre, centre.into()) > f64::NEG_INFINITY
                };
                open.retain(is_inside);
                return (!open.is_empty()).then_some(FeatureCells { grid, cells: open });
            }
            open = open.into_iter().flat_map(|cell| 4 * cell..4 * cell + 4).collect();
        }
        None
    }
}

/// Checks a longitude and a latitude, degrees.
pub fn check_position(longitude: f64, latitude: f64) -> Result<(), GeoError> {
    if !(-180.0..=180.0).contains(&longitude) {
        return Err(GeoError(format!("longitude is {longitude}, wanted -180 to 180")));
    }
    Place::new(Degrees(latitude), Degrees(longitude)).map(drop)
}

#[cfg(test)]
#[path = "prior_tests.rs"]
mod tests;
