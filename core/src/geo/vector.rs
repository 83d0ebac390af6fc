//! Unit vectors, which represent points in all computations. The x axis points to latitude 0° and longitude 0°, the y
//! axis to latitude 0° and longitude 90° E, and the z axis to the north pole.
//!
//! Invariant: the length is 1 up to rounding, and no component is NaN. Callers need not treat the poles specially. At a
//! pole, the direction "north" is the limit of the directions along the meridian of longitude 0.

use super::EARTH_RADIUS_KM;
use super::place::{Degrees, GeoError, Km, Place};

/// A point on the unit sphere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnitVector([f64; 3]);

/// Two orthonormal directions of the tangent plane at a point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TangentBasis {
    /// The direction of increasing longitude.
    pub east: [f64; 3],
    /// The direction of increasing latitude.
    pub north: [f64; 3],
}

impl TangentBasis {
    /// The vector with these components along east and north.
    pub fn combine(&self, [east, north]: [f64; 2]) -> [f64; 3] {
        std::array::from_fn(|axis| east * self.east[axis] + north * self.north[axis])
    }
}

impl UnitVector {
    /// The north pole.
    pub const NORTH_POLE: Self = Self([0.0, 0.0, 1.0]);
    /// The south pole.
    pub const SOUTH_POLE: Self = Self([0.0, 0.0, -1.0]);

    /// Scales a vector to length 1. Its components must be finite and not all zero.
    pub fn new(vector: [f64; 3]) -> Result<Self, GeoError> {
        let largest = vector.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        if !vector.iter().all(|value| value.is_finite()) || largest == 0.0 {
            return Err(GeoError(format!("vector is {vector:?}, wanted finite numbers, not all zero")));
        }
        // Divide by the largest component first: the squared length of a very long or very short vector would overflow
        // or underflow.
        Ok(Self::normalized(vector.map(|value| value / largest)))
    }

    /// Scales a vector to length 1. The squared length of `vector` must neither underflow nor overflow.
    fn normalized(vector: [f64; 3]) -> Self {
        let length = dot(vector, vector).sqrt();
        Self(vector.map(|value| value / length))
    }

    /// The point whose z coordinate is `z`, in [-1, 1], and whose longitude is `angle` radians. If `z` and `angle` are
    /// uniformly distributed, the points are uniformly distributed on the sphere.
    pub fn from_height(z: f64, angle: f64) -> Result<Self, GeoError> {
        if !(-1.0..=1.0).contains(&z) {
            return Err(GeoError(format!("height is {z}, wanted -1 to 1")));
        }
        if !angle.is_finite() {
            return Err(GeoError(format!("angle is {angle} rad, wanted a finite number")));
        }
        let ring = ((1.0 - z) * (1.0 + z)).sqrt();
        let (sine, cosine) = angle.sin_cos();
        Ok(Self::normalized([ring * cosine, ring * sine, z]))
    }

    /// The components.
    pub fn xyz(self) -> [f64; 3] {
        self.0
    }

    /// The point on the other side of the Earth.
    #[must_use]
    pub fn antipode(self) -> Self {
        Self(self.0.map(|value| -value))
    }

    /// Cosine of the angle to `other`.
    pub fn dot(self, other: Self) -> f64 {
        dot(self.0, other.0)
    }

    /// Angle to `other`, radians. The absolute error is about 1e-16 at every angle, antipodes included.
    pub fn angle(self, other: Self) -> f64 {
        let across = cross(self.0, other.0);
        dot(across, across).sqrt().atan2(self.dot(other))
    }

    /// Great-circle distance to `other`.
    pub fn distance(self, other: Self) -> Km {
        Km(EARTH_RADIUS_KM * self.angle(other))
    }

    /// The unit vectors towards east and north at this point.
    pub fn tangent_basis(self) -> TangentBasis {
        let [x, y, z] = self.0;
        let ring = x.hypot(y);
        let (cosine, sine) = if ring > 0.0 { (x / ring, y / ring) } else { (1.0, 0.0) };
        TangentBasis { east: [-sine, cosine, 0.0], north: [-z * cosine, -z * sine, ring] }
    }

    /// Walks along the great circle in the direction of `tangent`. The length of `tangent` is the angle to walk, in
    /// radians.
    pub fn walk(self, tangent: [f64; 3]) -> Result<Self, GeoError> {
        let length = dot(tangent, tangent).sqrt();
        if !length.is_finite() {
            return Err(GeoError(format!("tangent is {tangent:?}, wanted finite numbers and a finite length")));
        }
        if length == 0.0 {
            return Ok(self);
        }
        let (sine, cosine) = length.sin_cos();
        Ok(Self::normalized(std::array::from_fn(|axis| cosine * self.0[axis] + sine / length * tangent[axis])))
    }

    /// Walks `distance` along the great circle in the direction `bearing`, measured clockwise from north.
    pub fn displace(self, bearing: Degrees, distance: Km) -> Result<Self, GeoError> {
        if !(bearing.0.is_finite() && distance.0.is_finite()) {
            let text = format!("bearing is {}° and distance is {} km, wanted finite numbers", bearing.0, distance.0);
            return Err(GeoError(text));
        }
        let (sine, cosine) = bearing.radians().sin_cos();
        let angle = distance.0 / EARTH_RADIUS_KM;
        self.walk(self.tangent_basis().combine([angle * sine, angle * cosine]))
    }
}

impl Place {
    /// Great-circle distance to `other`.
    pub fn distance(self, other: Self) -> Km {
        UnitVector::from(self).distance(UnitVector::from(other))
    }
}

impl From<Place> for UnitVector {
    fn from(place: Place) -> Self {
        let latitude = place.latitude().0;
        // Measure the angle from the equator or from the pole, whichever is nearer. The distance to the axis (`ring`)
        // is then precise near the poles and exactly 0 at the poles.
        let (z, ring) = if latitude.abs() <= 45.0 {
            latitude.to_radians().sin_cos()
        } else {
            let (ring, z) = (90.0 - latitude.abs()).to_radians().sin_cos();
            (z.copysign(latitude), ring)
        };
        let (sine, cosine) = place.longitude().radians().sin_cos();
        Self([ring * cosine, ring * sine, z])
    }
}

impl From<UnitVector> for Place {
    fn from(vector: UnitVector) -> Self {
        let [x, y, z] = vector.0;
        let latitude = Degrees(z.atan2(x.hypot(y)).to_degrees());
        let longitude = Degrees(y.atan2(x).to_degrees());
        Self::new(latitude, longitude)
            .expect("the latitude is between -90 and 90 degrees, because `hypot` is never negative")
    }
}

fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

pub(super) fn cross(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]
}
