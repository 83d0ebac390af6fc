//! Nearest neighbours and radius queries: a balanced k-d tree over unit vectors.
//!
//! The index is a tree rather than a grid of equal cells, because a gallery may have a thousand points in a town and
//! none in an ocean. No crate is used, because this code is short, works on unit vectors directly, and agrees with
//! [`UnitVector::distance`] to the bit.
//!
//! To decide whether a point is within a radius, the code compares the chord from the query to the point with the chord
//! of the radius. If the two chords are almost equally long ([`SLACK`]), the great-circle distance decides instead.
//!
//! Invariant: every query returns the same points as a linear scan over all points. Of several points at the same
//! distance, the point with the lowest index counts as nearest.

use super::EARTH_RADIUS_KM;
use super::place::Km;
use super::vector::UnitVector;

/// Parts of the tree with at most this many points are scanned linearly.
const LEAF: usize = 16;
/// Two chords are almost equally long if they differ by less than this fraction of the chord of the radius. Rounding
/// errors are a thousand times smaller.
const SLACK: f64 = 1e-9;
/// Absolute tolerance in Earth radii, which is added to the relative tolerance. It matters for very short chords.
const SLACK_ABSOLUTE: f64 = 1e-12;

/// An index of points on the sphere, for nearest-neighbour and radius queries.
#[derive(Debug, Clone)]
pub struct SphereIndex {
    points: Vec<UnitVector>,
    /// Positions in `points`, in tree order.
    order: Vec<u32>,
    /// The points in tree order.
    nodes: Vec<[f64; 3]>,
    /// How each part of the tree is split: the axis, and the coordinate of the split. The split of a part is stored at
    /// the index of the part's middle point.
    splits: Vec<(u8, f64)>,
}

/// A radius query: the radius, and chord lengths that classify most points without computing a great-circle distance.
struct RadiusQuery {
    query: UnitVector,
    radius: Km,
    /// Whether points at a distance of exactly the radius are inside.
    is_closed: bool,
    /// Points whose squared chord to the query is smaller than this value are inside the radius.
    surely: f64,
    /// Points whose squared chord to the query is larger than this value are outside the radius.
    maybe: f64,
}

impl RadiusQuery {
    fn new(query: UnitVector, radius: Km, is_closed: bool) -> Self {
        let angle = radius.0 / EARTH_RADIUS_KM;
        let chord = if angle >= std::f64::consts::PI { 2.0 } else { 2.0 * (0.5 * angle).sin() };
        let slack = SLACK_ABSOLUTE + SLACK * chord.abs();
        let surely = if chord > slack { (chord - slack).powi(2) } else { 0.0 };
        Self { query, radius, is_closed, surely, maybe: (chord + slack).max(0.0).powi(2) }
    }

    fn contains(&self, chord2: f64, point: UnitVector) -> bool {
        if chord2 < self.surely || chord2 > self.maybe {
            return chord2 < self.surely;
        }
        let distance = self.query.distance(point);
        distance < self.radius || (self.is_closed && distance == self.radius)
    }
}

impl SphereIndex {
    /// Builds an index. Queries return positions in `points`.
    ///
    /// # Panics
    /// If there are 2³² points or more.
    pub fn new(points: Vec<UnitVector>) -> Self {
        let count = u32::try_from(points.len()).expect("an index has fewer than 2^32 points");
        let mut order: Vec<u32> = (0..count).collect();
        let mut splits = vec![(0, 0.0); points.len()];
        split(&points, &mut order, &mut splits);
        let nodes = order.iter().map(|position| points[*position as usize].xyz()).collect();
        Self { points, order, nodes, splits }
    }

    /// The points in their original order.
    pub fn points(&self) -> &[UnitVector] {
        &self.points
    }

    /// Positions of the points that are at most `radius` away from `query`, in ascending order.
    pub fn within(&self, query: UnitVector, radius: Km) -> Vec<u32> {
        let mut found = Vec::new();
        self.visit(&RadiusQuery::new(query, radius, true), 0..self.nodes.len(), &mut |position| found.push(position));
        found.sort_unstable();
        found
    }

    /// The number of points less than `radius` away from `query`.
    pub fn count_nearer(&self, query: UnitVector, radius: Km) -> usize {
        let mut count = 0;
        self.visit(&RadiusQuery::new(query, radius, false), 0..self.nodes.len(), &mut |_| count += 1);
        count
    }

    /// The position of the nearest point and its distance; `None` if the index is empty.
    pub fn nearest(&self, query: UnitVector) -> Option<(u32, Km)> {
        self.nearest_many(query, 1).first().copied()
    }

    /// Positions and distances of the `count` nearest points, nearest first. The list is shorter if the index holds
    /// fewer points. Points near the antipode of `query` may be in another order if their distances differ by less than
    /// a metre.
    pub fn nearest_many(&self, query: UnitVector, count: usize) -> Vec<(u32, Km)> {
        let mut best = Vec::with_capacity(count + 1);
        if count > 0 {
            self.search(query.xyz(), count, 0..self.nodes.len(), &mut best);
        }
        best.iter().map(|(_, position)| (*position, query.distance(self.points[*position as usize]))).collect()
    }

    fn visit(&self, reach: &RadiusQuery, part: std::ops::Range<usize>, found: &mut impl FnMut(u32)) {
        if part.len() <= LEAF {
            for node in part {
                let position = self.order[node];
                if reach.contains(chord2(self.nodes[node], reach.query.xyz()), self.points[position as usize]) {
                    found(position);
                }
            }
            return;
        }
        let middle = part.start + part.len() / 2;
        let (axis, value) = self.splits[middle];
        let gap = reach.query.xyz()[usize::from(axis)] - value;
        if gap <= 0.0 || gap * gap <= reach.maybe {
            self.visit(reach, part.start..middle, found);
        }
        if gap >= 0.0 || gap * gap <= reach.maybe {
            self.visit(reach, middle..part.end, found);
        }
    }

    /// Collects the `count` smallest pairs of (chord², position) in `best`, in ascending order.
    fn search(&self, query: [f64; 3], count: usize, part: std::ops::Range<usize>, best: &mut Vec<(f64, u32)>) {
        if part.len() <= LEAF {
            for node in part {
                let candidate = (chord2(self.nodes[node], query), self.order[node]);
                let place = best.partition_point(|other| is_before(*other, candidate));
                if place < count {
                    best.insert(place, candidate);
                    best.truncate(count);
                }
            }
            return;
        }
        let middle = part.start + part.len() / 2;
        let (axis, value) = self.splits[middle];
        let gap = query[usize::from(axis)] - value;
        let (below, above) = (part.start..middle, middle..part.end);
        let (near, far) = if gap < 0.0 { (below, above) } else { (above, below) };
        self.search(query, count, near, best);
        // `<=` rather than `<`: the far part may hold a point at the same distance as the worst point of `best`. This
        // point must replace the worst point if it has a lower position.
        if best.len() < count || best.last().is_some_and(|worst| gap * gap <= worst.0) {
            self.search(query, count, far, best);
        }
    }
}

fn is_before(one: (f64, u32), other: (f64, u32)) -> bool {
    one.0 < other.0 || (one.0 == other.0 && one.1 < other.1)
}

fn chord2(a: [f64; 3], b: [f64; 3]) -> f64 {
    (a[0] - b[0]).powi(2) + (a[1] - b[1]).powi(2) + (a[2] - b[2]).powi(2)
}

/// Partitions the points in `order` at the median along the longest side of their bounding box, then recurses into both
/// halves.
fn split(points: &[UnitVector], order: &mut [u32], splits: &mut [(u8, f64)]) {
    if order.len() <= LEAF {
        return;
    }
    let (mut low, mut high) = ([f64::MAX; 3], [f64::MIN; 3]);
    for position in order.iter() {
        for (axis, value) in points[*position as usize].xyz().into_iter().enumerate() {
            low[axis] = low[axis].min(value);
            high[axis] = high[axis].max(value);
        }
    }
    let side = |axis: usize| high[axis] - low[axis];
    let axis = (1..3).fold(0, |longest, axis| if side(axis) > side(longest) { axis } else { longest });
    let middle = order.len() / 2;
    let key = |position: &u32| points[*position as usize].xyz()[axis];
    order.select_nth_unstable_by(middle, |a, b| key(a).total_cmp(&key(b)).then(a.cmp(b)));
    splits[middle] = (axis as u8, key(&order[middle]));
    let (lower, upper) = order.split_at_mut(middle);
    let (lower_splits, upper_splits) = splits.split_at_mut(middle);
    split(points, lower, lower_splits);
    // `splits[middle]`, which was set above, is the first element of `upper_splits`. The call below does not overwrite
    // it, because the upper half stores its own splits at later positions.
    split(points, upper, upper_splits);
}
