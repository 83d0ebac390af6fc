//! Tests of the matrix product that takes bf16 factors and gives an f32 result: its precision, gradient and errors.

use locdiff::native::gemm::mm_f32;
use tch::{Device, Kind, Tensor};

fn factors() -> (Tensor, Tensor) {
    tch::manual_seed(5);
    let random = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16);
    (random([17, 64]), random([64, 9]))
}

#[test]
fn result_is_f32_and_near_the_f64_product() {
    let (a, b) = factors();
    let wide = mm_f32(&a, &b).expect("shapes and types match");
    assert_eq!(wide.kind(), Kind::Float);
    let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
    let error = |product: Tensor| (product.to_kind(Kind::Double) - &exact).abs().max().double_value(&[]);
    // The product of two bf16 numbers is exact in f32. Each of the 64 additions rounds by up to 2⁻²⁴ of the sum, so the
    // total error is at most 64 × 2⁻²⁴ of the sum.
    assert!(error(wide) < 1e-4);
    assert!(error(a.matmul(&b)) > 1e-3, "a bf16 result is nearly exact, so this test proves nothing");
}

#[test]
fn gradient_equals_that_of_a_plain_product() {
    let (a, b) = factors();
    let (a, b) = (a.set_requires_grad(true), b.set_requires_grad(true));
    let weights = Tensor::arange(17 * 9, (Kind::Float, Device::Cpu)).view([17, 9]) / 100.0;
    let loss = (mm_f32(&a, &b).expect("shapes and types match") * &weights).sum(Kind::Float);
    let got = Tensor::run_backward(&[loss], &[&a, &b], false, false);
    let rounded = weights.to_kind(Kind::BFloat16);
    let want = [rounded.matmul(&b.tr()), a.tr().matmul(&rounded)];
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.kind(), Kind::BFloat16);
        let difference = (got - want).abs().max().double_value(&[]);
        assert!(difference <= want.abs().max().double_value(&[]) * 0.01, "the gradient differs by {difference}");
    }
}

#[test]
fn mismatched_shapes_and_kinds_are_an_error() {
    let (a, b) = factors();
    assert!(mm_f32(&a, &a).expect_err("17x64 and 17x64 do not match").to_string().contains("cannot be multiplied"));
    assert!(
        mm_f32(&a, &b.to_kind(Kind::Float)).expect_err("the types differ").to_string().contains("wanted the same type")
    );
}
