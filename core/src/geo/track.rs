//! Points and lines, and the distance to the nearest of them. Lines are pieces of great circles.
//!
//! Lines are cut into pieces, and an index of the middles of the pieces finds the nearest one: if the nearest middle is
//! at the distance d, the middle of the nearest piece is at most half a piece farther away.

use super::EARTH_RADIUS_KM;
use super::index::SphereIndex;
use super::place::{GeoError, Km};
use super::vector::{UnitVector, cross};

/// Lines are cut into at most about this many pieces, besides those that they have already.
const PIECES_MAX: f64 = 1e5;
/// Added to radii of searches, so that rounding loses no piece.
const SLACK_KM: f64 = 1e-6;

/// Points and lines.
#[derive(Debug, Clone)]
pub(super) struct Track {
    pieces: Vec<[UnitVector; 2]>,
    middles: SphereIndex,
    /// Half the length of the longest piece, km.
    half_km: f64,
}

impl Track {
    /// The lines through the points of each list. A list of one point is that point. `piece_km` is a good length of
    /// pieces. Fails if a line joins antipodes, because it could go anywhere.
    pub(super) fn new(lines: &[Vec<UnitVector>], piece_km: f64) -> Result<Self, GeoError> {
        let segments = lines.iter().flat_map(|line| line.windows(2)).map(|pair| [pair[0], pair[1]]);
        let points = lines.iter().filter(|line| line.len() == 1).map(|line| [line[0]; 2]);
        let segments: Vec<[UnitVector; 2]> = segments.chain(points).collect();
        let total_km: f64 = segments.iter().map(|[from, to]| from.distance(*to).0).sum();
        let longest_km = piece_km.max(total_km / PIECES_MAX);
        let mut pieces = Vec::with_capacity(segments.len());
        for [from, to] in segments {
            cut([from, to], longest_km, &mut pieces)?;
        }
        let middle = |[from, to]: &[UnitVector; 2]| {
            UnitVector::new(std::array::from_fn(|axis| from.xyz()[axis] + to.xyz()[axis])).unwrap_or(*from)
        };
        let middles = SphereIndex::new(pieces.iter().map(middle).collect());
        let half_km = pieces.iter().map(|[from, to]| from.distance(*to).0 / 2.0).fold(0.0, f64::max);
        Ok(Self { pieces, middles, half_km })
    }

    /// The distance to the nearest point or line.
    pub(super) fn distance(&self, point: UnitVector) -> Km {
        let Some((_, nearest)) = self.middles.nearest(point) else { return Km(f64::INFINITY) };
        let reach = Km(nearest.0 + self.half_km + SLACK_KM);
        let near = self.middles.within(point, reach);
        let km = near.iter().map(|at| distance_to_piece(point, self.pieces[*at as usize]));
        Km(km.fold(nearest.0, f64::min))
    }
}

/// Cuts a line into equal pieces that are not longer than `longest_km`.
fn cut([from, to]: [UnitVector; 2], longest_km: f64, pieces: &mut Vec<[UnitVector; 2]>) -> Result<(), GeoError> {
    let angle = from.angle(to);
    let count = (angle * EARTH_RADIUS_KM / longest_km).ceil().max(1.0);
    if count == 1.0 {
        pieces.push([from, to]);
        return Ok(());
    }
    let along: [f64; 3] = std::array::from_fn(|axis| to.xyz()[axis] - from.dot(to) * from.xyz()[axis]);
    let length = along.iter().map(|value| value * value).sum::<f64>().sqrt();
    if length < 1e-9 {
        return Err(GeoError(
            "a line joins two antipodes, so its way is unknown; add a position in between".to_owned(),
        ));
    }
    let mut last = from;
    for step in 1..=count as u64 {
        let share = angle * step as f64 / count / length;
        let next = if step == count as u64 { to } else { from.walk(along.map(|value| share * value))? };
        pieces.push([last, next]);
        last = next;
    }
    Ok(())
}

/// The distance to the piece of the great circle between two points that are not antipodes, km.
fn distance_to_piece(point: UnitVector, [from, to]: [UnitVector; 2]) -> f64 {
    let ends = from.distance(point).0.min(to.distance(point).0);
    let normal = cross(from.xyz(), to.xyz());
    let along = |vector: [f64; 3]| vector.iter().zip(point.xyz()).map(|(one, other)| one * other).sum::<f64>();
    let length = normal.iter().map(|value| value * value).sum::<f64>().sqrt();
    // The point of the great circle that is nearest lies between the ends.
    if length > 0.0 && along(cross(normal, from.xyz())) > 0.0 && along(cross(to.xyz(), normal)) > 0.0 {
        return ends.min(EARTH_RADIUS_KM * (along(normal).abs() / length).min(1.0).asin());
    }
    ends
}
