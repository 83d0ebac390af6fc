//! Value, tangent gradient and Riemannian Hessian of f(p) = Σ c_i Y_i(p) on the sphere.
//!
//! Each harmonic is the real or imaginary part of p_lm(z) · (x + iy)^m, a smooth function on all of R³. Its derivatives
//! in R³ need no angles, so the poles need no special treatment. Let g be the gradient and H the Hessian of f in R³,
//! and n = p the normal of the sphere. The tangent gradient is (I − nnᵀ) g. The Riemannian Hessian is H restricted to
//! the tangent plane, minus (n·g) I (Absil, Mahony, Sepulchre, "Optimization Algorithms on Matrix Manifolds", 2008,
//! section 5.3). The values of f outside the sphere affect neither the tangent gradient nor the Riemannian Hessian.

use locdiff_core::geo::{TangentBasis, UnitVector};

use super::ShddError;
use super::harmonics::{Basis, expect_length, triangle};

/// Value and derivatives of a function on the sphere at one point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Local {
    /// The value f(p).
    pub value: f64,
    /// The gradient per radian, as a tangent vector in R³.
    pub gradient: [f64; 3],
    /// Second derivatives per radian², along the directions of `basis` (east, north).
    pub hessian: [[f64; 2]; 2],
    /// The directions east and north in which `hessian` is expressed.
    pub basis: TangentBasis,
}

/// Two sums Σ_l coefficient · p_lm(z) for one order m, with their derivatives in z. One sum is over the cosine
/// coefficients, and the other is over the sine coefficients.
#[derive(Debug, Clone, Copy, Default)]
struct OrderSums {
    /// The sum that is multiplied by Re (x + iy)^m, then the first and second derivatives of the sum.
    cosine: [f64; 3],
    /// The sum that is multiplied by Im (x + iy)^m, then the first and second derivatives of the sum.
    sine: [f64; 3],
}

impl Basis {
    /// The value and derivatives of Σ_i coefficients\[i\] · Y_i at `point`. Takes as long as encoding a few points.
    pub fn value_gradient_hessian(&self, coefficients: &[f64], point: UnitVector) -> Result<Local, ShddError> {
        expect_length("coefficients", coefficients.len(), self.dims())?;
        let [x, y, z] = point.xyz();
        let (mut value, mut gradient, mut hessian) = (0.0, [0.0; 3], [[0.0; 3]; 3]);
        // (x + iy) to the powers m, m − 1 and m − 2. If an exponent is negative, the variable holds 0, which does not
        // matter because it is multiplied by 0.
        let (mut power, mut lower, mut lowest) = ([1.0, 0.0], [0.0; 2], [0.0; 2]);
        for m in 0..=self.degree() as usize {
            if m > 0 {
                lowest = lower;
                lower = power;
                power = [power[0] * x - power[1] * y, power[1] * x + power[0] * y];
            }
            let OrderSums { cosine: a, sine: b } = self.order_sums(coefficients, m, z);
            let (first, second) = (m as f64, (m * m.saturating_sub(1)) as f64);
            // Let P_m = (x + iy)^m and f = a·Re P_m + b·Im P_m. Then ∂f/∂x = m·(a·Re P_(m-1) + b·Im P_(m-1)) and
            // ∂f/∂y = m·(b·Re P_(m-1) − a·Im P_(m-1)). `mix` and `turn` compute the two expressions in parentheses.
            let mix = |k: usize, power: [f64; 2]| a[k] * power[0] + b[k] * power[1];
            let turn = |k: usize, power: [f64; 2]| b[k] * power[0] - a[k] * power[1];
            value += mix(0, power);
            gradient[0] += first * mix(0, lower);
            gradient[1] += first * turn(0, lower);
            gradient[2] += mix(1, power);
            hessian[0][0] += second * mix(0, lowest);
            hessian[0][1] += second * turn(0, lowest);
            hessian[0][2] += first * mix(1, lower);
            hessian[1][2] += first * turn(1, lower);
            hessian[2][2] += mix(2, power);
        }
        // Powers of x + iy are harmonic in the plane, so their second derivatives satisfy ∂²/∂y² = −∂²/∂x².
        hessian[1][1] = -hessian[0][0];
        (hessian[1][0], hessian[2][0], hessian[2][1]) = (hessian[0][1], hessian[0][2], hessian[1][2]);
        Ok(on_sphere(point, value, gradient, hessian))
    }

    fn order_sums(&self, coefficients: &[f64], m: usize, z: f64) -> OrderSums {
        let mut sums = OrderSums::default();
        let (mut older, mut old) = ([0.0; 3], [self.sectoral[m], 0.0, 0.0]);
        for l in m..=self.degree() as usize {
            if l > m {
                let [a, b] = self.recursion[triangle(l, m)];
                let new = [
                    a * z * old[0] - b * older[0],
                    a * (z * old[1] + old[0]) - b * older[1],
                    a * (z * old[2] + 2.0 * old[1]) - b * older[2],
                ];
                (older, old) = (old, new);
            }
            let center = l * l + l;
            let sine = if m == 0 { 0.0 } else { coefficients[center - m] };
            for (k, value) in old.iter().enumerate() {
                sums.cosine[k] += coefficients[center + m] * value;
                sums.sine[k] += sine * value;
            }
        }
        sums
    }
}

/// Projects derivatives in R³ onto the tangent plane.
fn on_sphere(point: UnitVector, value: f64, gradient: [f64; 3], hessian: [[f64; 3]; 3]) -> Local {
    let dot = |a: [f64; 3], b: [f64; 3]| a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
    let form = |a: [f64; 3], b: [f64; 3]| dot(a, hessian.map(|row| dot(row, b)));
    let normal = point.xyz();
    let outward = dot(normal, gradient);
    let basis = point.tangent_basis();
    let mixed = form(basis.east, basis.north);
    Local {
        value,
        gradient: std::array::from_fn(|axis| gradient[axis] - outward * normal[axis]),
        hessian: [[form(basis.east, basis.east) - outward, mixed], [mixed, form(basis.north, basis.north) - outward]],
        basis,
    }
}
