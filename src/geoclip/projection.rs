//! The Equal Earth projection with GeoCLIP's scale. It maps latitude and longitude in degrees to a point of the plane.
//!
//! The computation uses f32 and GeoCLIP's order of operations. GeoCLIP's finest capsule (encoder of one scale)
//! multiplies the result by frequencies near 2π·256, so a different rounding would change the fourth digit of a
//! feature. Source: Šavrič, Patterson, Jenny, "The Equal Earth map projection", IJGIS 33, 2019;
//! `geoclip/model/location_encoder.py`.

use tch::{Kind, TchError, Tensor};

/// Coefficients of the projection's polynomial.
const A1: f64 = 1.340_264;
const A2: f64 = -0.081_106;
const A3: f64 = 0.000_893;
const A4: f64 = 0.003_796;
/// GeoCLIP's scale: 66.50336 / 180.
const SCALE: f64 = 66.503_36;
const SCALE_DIVISOR: f64 = 180.0;

/// Projects latitudes and longitudes `[n, 2]` in degrees to points `[n, 2]` of the plane.
pub fn equal_earth(degrees_n2: &Tensor) -> Result<Tensor, TchError> {
    let radians_n2 = degrees_n2.f_to_kind(Kind::Float)?.f_deg2rad()?;
    let (latitude_n, longitude_n) = (radians_n2.f_select(1, 0)?, radians_n2.f_select(1, 1)?);
    let root = f64::from(3.0_f32.sqrt());
    let theta_n = latitude_n.f_sin()?.f_mul_scalar(root / 2.0)?.f_asin()?;
    let power = |exponent: i64| theta_n.f_pow_tensor_scalar(exponent);
    let denominator_n = (power(8)? * (9.0 * A4) + power(6)? * (7.0 * A3) + power(2)? * (3.0 * A2)).f_add_scalar(A1)?;
    let x_n = (longitude_n * (2.0 * root) * theta_n.f_cos()?).f_div(&(denominator_n * 3.0))?;
    let y_n = power(9)? * A4 + power(7)? * A3 + power(3)? * A2 + &theta_n * A1;
    Tensor::f_stack(&[x_n, y_n], 1)?.f_mul_scalar(SCALE)?.f_div_scalar(SCALE_DIVISOR)
}
