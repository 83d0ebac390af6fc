//! Rings of polygons, in degrees of longitude and latitude.
//!
//! An edge is a straight line on a map of longitude and latitude, as RFC 7946 wants it (section 3.1.1), not a piece of
//! a great circle: a box has the sides that its corners suggest, and a border along a parallel follows the parallel.
//! Positions on an edge belong to the ring.
//!
//! - **Date line.** A ring may be cut at ±180° or not: an edge that would span more than 180° of longitude takes the
//!   short way, across the date line. A long edge must therefore have a position in between.
//! - **From -180 to 180.** Such an edge either has no length or goes around the Earth, as in a box around the tropics.
//!   It goes around the Earth if otherwise the ring would enclose nothing, or would go around a pole.
//! - **Poles.** A ring that goes around the Earth once contains the pole that is nearer to it. A ring that is cut and
//!   has edges at latitude ±90 contains the pole too.
//!
//! To test a position quickly, the edges are sorted into strips of longitude.

use super::place::GeoError;

/// The latitude of the edge that closes a ring around a pole. It lies beyond every position.
const BEYOND_POLE: f64 = 100.0;
/// Most strips of a ring.
const STRIPS_MAX: usize = 4096;
/// The strips of a ring list each edge at most this often, on average.
const LISTED_MAX: usize = 8;

/// Both ends of an edge: longitude and latitude. The longitude may lie beyond ±180.
type Edge = [[f64; 2]; 2];

/// Where a position lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingSide {
    Inside,
    OnEdge,
    Outside,
}

/// A closed ring.
#[derive(Debug, Clone)]
pub(super) struct Ring {
    edges: Vec<Edge>,
    low: [f64; 2],
    high: [f64; 2],
    /// The edges in each of equally wide strips of longitude.
    strips: Vec<Vec<u32>>,
}

impl Ring {
    /// A ring through `positions`: longitude, -180 to 180, and latitude, -90 to 90. The last must equal the first.
    pub(super) fn new(positions: &[[f64; 2]]) -> Result<Self, GeoError> {
        let (Some(first), Some(last)) = (positions.first(), positions.last()) else {
            return Err(GeoError("the ring is empty, wanted at least 4 positions".to_owned()));
        };
        if positions.len() < 4 {
            return Err(GeoError(format!("the ring has {} positions, wanted at least 4", positions.len())));
        }
        if first != last {
            return Err(GeoError(format!("the ring is not closed: it begins at {first:?} and ends at {last:?}")));
        }
        let [(around, turns_around), (short, turns_short)] = [true, false].map(|around| unwrapped(positions, around));
        let goes_around = turns_around == 0 && (turns_short != 0 || encloses_nothing(&short));
        let (corners, turns) = if goes_around { (around, 0) } else { (short, turns_short) };
        let mut edges: Vec<Edge> = corners.windows(2).map(|pair| [pair[0], pair[1]]).collect();
        match turns {
            0 if encloses_nothing(&corners) => {
                return Err(GeoError("the ring encloses no area".to_owned()));
            }
            0 => {}
            -1 | 1 => {
                let sum: f64 = edges.iter().map(|[from, to]| (from[1] + to[1]) * (to[0] - from[0])).sum();
                let pole = BEYOND_POLE.copysign(sum * f64::from(turns));
                edges.push([[corners[corners.len() - 1][0], pole], [corners[0][0], pole]]);
            }
            _ => return Err(GeoError("the ring goes around the Earth more than once".to_owned())),
        }
        Ok(Self::of_edges(edges))
    }

    fn of_edges(edges: Vec<Edge>) -> Self {
        let ends = || edges.iter().flatten();
        let low = [0, 1].map(|axis| ends().map(|end| end[axis]).fold(f64::INFINITY, f64::min));
        let high = [0, 1].map(|axis| ends().map(|end| end[axis]).fold(f64::NEG_INFINITY, f64::max));
        let mut ring = Self { strips: vec![Vec::new(); edges.len().min(STRIPS_MAX)], edges, low, high };
        let span =
            |ring: &Self, [one, other]: &Edge| ring.strip(one[0].min(other[0]))..=ring.strip(one[0].max(other[0]));
        // Long edges would be listed in very many narrow strips.
        while ring.edges.iter().map(|edge| span(&ring, edge).count()).sum::<usize>() > LISTED_MAX * ring.edges.len() {
            ring.strips.truncate(ring.strips.len() / 2);
        }
        for (number, edge) in (0..).zip(ring.edges.clone()) {
            for strip in span(&ring, &edge) {
                ring.strips[strip].push(number);
            }
        }
        ring
    }

    /// The strip of a longitude between `low` and `high`.
    fn strip(&self, longitude: f64) -> usize {
        let share = (longitude - self.low[0]) / (self.high[0] - self.low[0]);
        ((share * self.strips.len() as f64) as usize).min(self.strips.len() - 1)
    }

    /// The multiples of 360° that move some longitude between `low` and `high` into the range of the ring.
    fn turns(&self, low: f64, high: f64) -> impl Iterator<Item = f64> + use<> {
        let (first, last) = ((self.low[0] - high) / 360.0, (self.high[0] - low) / 360.0);
        (first.ceil() as i32..=last.floor() as i32).map(|turn| 360.0 * f64::from(turn))
    }

    /// Where a longitude and a latitude lie.
    pub(super) fn side(&self, [longitude, latitude]: [f64; 2]) -> RingSide {
        for turn in self.turns(longitude, longitude) {
            match self.side_on_map([longitude + turn, latitude]) {
                RingSide::Outside => {}
                found => return found,
            }
        }
        RingSide::Outside
    }

    /// Counts the edges that a ray to the north crosses. Of the two ends of an edge, the western one belongs to it.
    fn side_on_map(&self, [x, y]: [f64; 2]) -> RingSide {
        if !(self.low[0]..=self.high[0]).contains(&x) || !(self.low[1]..=self.high[1]).contains(&y) {
            return RingSide::Outside;
        }
        let mut is_inside = false;
        for number in &self.strips[self.strip(x)] {
            let [from, to] = self.edges[*number as usize];
            let is_vertical = from[0] == to[0] && from[0] == x && (y - from[1]) * (y - to[1]) <= 0.0;
            if is_vertical || from == [x, y] || to == [x, y] {
                return RingSide::OnEdge;
            }
            if (from[0] <= x) == (to[0] <= x) {
                continue;
            }
            let edge = from[1] + (x - from[0]) / (to[0] - from[0]) * (to[1] - from[1]);
            if edge == y {
                return RingSide::OnEdge;
            }
            is_inside ^= edge > y;
        }
        if is_inside { RingSide::Inside } else { RingSide::Outside }
    }

    /// Whether an edge touches the rectangle from `low` to `high`.
    pub(super) fn meets(&self, low: [f64; 2], high: [f64; 2]) -> bool {
        self.turns(low[0], high[0]).any(|turn| {
            let (low, high) = ([low[0] + turn, low[1]], [high[0] + turn, high[1]]);
            let strips = self.strip(low[0].max(self.low[0]))..=self.strip(high[0].min(self.high[0]));
            let mut edges = self.strips[strips].iter().flatten();
            edges.any(|number| edge_meets(self.edges[*number as usize], low, high))
        })
    }
}

/// Whether a part of the edge lies in the rectangle (Liang and Barsky's clipping).
fn edge_meets([from, to]: Edge, low: [f64; 2], high: [f64; 2]) -> bool {
    let (mut first, mut last) = (0.0_f64, 1.0_f64);
    for axis in 0..2 {
        let (start, step) = (from[axis], to[axis] - from[axis]);
        if step == 0.0 && !(low[axis]..=high[axis]).contains(&start) {
            return false;
        }
        if step != 0.0 {
            let [one, other] = [low[axis], high[axis]].map(|bound| (bound - start) / step);
            (first, last) = (first.max(one.min(other)), last.min(one.max(other)));
        }
    }
    first <= last
}

/// The corners of a ring with longitudes that do not jump at the date line, and how often the ring goes around the
/// Earth. `around` says whether an edge between -180 and 180 goes around the Earth; otherwise it has no length.
fn unwrapped(positions: &[[f64; 2]], around: bool) -> (Vec<[f64; 2]>, i32) {
    let (mut corners, mut turns) = (vec![positions[0]], 0);
    for pair in positions.windows(2) {
        let step = pair[1][0] - pair[0][0];
        if step.abs() > 180.0 && !(around && step.abs() == 360.0) {
            turns -= if step > 0.0 { 1 } else { -1 };
        }
        corners.push([pair[1][0] + 360.0 * f64::from(turns), pair[1][1]]);
    }
    (corners, turns)
}

/// Whether the corners, the last of which is the first, lie on one line or cover each area as often clockwise as
/// counterclockwise.
fn encloses_nothing(corners: &[[f64; 2]]) -> bool {
    let [x, y] = corners[0];
    let twice = |pair: &[[f64; 2]]| (pair[0][0] - x) * (pair[1][1] - y) - (pair[1][0] - x) * (pair[0][1] - y);
    corners.windows(2).map(twice).sum::<f64>() == 0.0
}
