//! Laws of the loss.
// b batch · a anchors · d dimensions of the code

use std::f64::consts::PI;

use locdiff::loss::{CODE_SCALE, Inputs, Loss, LossError, Losses};
use locdiff_launch::config::{AutoOr, KlDirection, LossConfig, Precision};
use tch::{Kind, Tensor};

use crate::model_support::{assert_close, normals};

fn config(weights: [f64; 4]) -> LossConfig {
    let [kl, l2_weight, l1_weight, cosine_weight] = weights;
    LossConfig { kl_weight: AutoOr::Value(kl), l2_weight, l1_weight, cosine_weight, ..LossConfig::default() }
}

fn compute(config: &LossConfig, predicted: &Tensor, truth: &Tensor, precision: Precision) -> Result<Losses, LossError> {
    let basis = normals(3, &[32, 16], truth.kind());
    let inputs = Inputs { predicted_bd: predicted, truth_bd: truth, basis_ad: &basis, anchors_split: None };
    Loss::new(config, 3, precision).compute(inputs)
}

fn value(part: &Option<Tensor>) -> f64 {
    part.as_ref().expect("asked for").double_value(&[])
}

#[test]
fn truth_costs_nothing_and_everything_else_something() {
    let truth = normals(1, &[5, 16], Kind::Double);
    for direction in [KlDirection::Reverse, KlDirection::Forward] {
        let config = LossConfig { kl: direction, ..config([1.0, 1.0, 1.0, 1.0]) };
        let losses = compute(&config, &(&truth * CODE_SCALE), &truth, Precision::F32).expect("computed");
        assert!(losses.check(0, 0).expect("finite").abs() < 1e-12);
        let losses = compute(&config, &normals(2, &[5, 16], Kind::Double), &truth, Precision::F32).expect("computed");
        for part in [&losses.kl, &losses.l2, &losses.l1, &losses.cosine] {
            assert!(value(part) > 0.01);
        }
    }
}

#[test]
fn parts_are_their_definitions_and_the_total_their_weighted_sum() {
    let (predicted, truth) = (normals(1, &[5, 16], Kind::Double), normals(2, &[5, 16], Kind::Double));
    let basis = normals(3, &[32, 16], Kind::Double);
    let difference = &predicted - &truth * CODE_SCALE;
    let cosine = 1.0 - Tensor::cosine_similarity(&predicted, &truth, 1, 1e-8).mean(Kind::Double).double_value(&[]);
    let q = (&predicted / CODE_SCALE).matmul(&basis.tr()).softmax(1, Kind::Double);
    let p = truth.matmul(&basis.tr()).softmax(1, Kind::Double);
    let kl = |q: &Tensor, p: &Tensor| (q * (q / p).log()).sum(Kind::Double).double_value(&[]) / 5.0;
    for (direction, kl) in [(KlDirection::Reverse, kl(&q, &p)), (KlDirection::Forward, kl(&p, &q))] {
        let config = LossConfig { kl: direction, ..config([0.25, 2.0, 3.0, 5.0]) };
        let losses = compute(&config, &predicted, &truth, Precision::F32).expect("computed");
        let wants = [
            kl,
            difference.square().mean(Kind::Double).double_value(&[]),
            difference.abs().mean(Kind::Double).double_value(&[]),
            cosine,
        ];
        let gots = [&losses.kl, &losses.l2, &losses.l1, &losses.cosine].map(value);
        for (got, want) in gots.iter().zip(wants) {
            assert!((got - want).abs() < 1e-10 * want.abs(), "{got} {want}");
        }
        let total = 0.25 * wants[0] + 2.0 * wants[1] + 3.0 * wants[2] + 5.0 * wants[3];
        assert!((losses.check(0, 0).expect("finite") - total).abs() < 1e-10 * total);
    }
    let only_l2 = compute(&config([0.0, 1.0, 0.0, 0.0]), &predicted, &truth, Precision::F32).expect("computed");
    assert!(only_l2.kl.is_none() && only_l2.l1.is_none() && only_l2.cosine.is_none());
}

#[test]
fn automatic_kl_weight_shrinks_with_the_size_of_the_code() {
    let weight = |degree| Loss::new(&LossConfig::default(), degree, Precision::F32).kl_weight();
    assert!((weight(23) - 0.1).abs() < 1e-3);
    assert!((weight(47) - 4.58 * 4.0 * PI / 2304.0).abs() < 1e-15);
}

#[test]
fn both_modules_scale_codes_alike() {
    assert!((CODE_SCALE - (4.0 * PI).sqrt()).abs() < 1e-15);
    assert!((CODE_SCALE - locdiff::diffusion::CODE_SCALE).abs() == 0.0);
}

#[test]
fn sixteen_bit_factors_keep_the_gradient_of_the_logits() {
    let truth = normals(1, &[5, 16], Kind::Float);
    let gradient = |precision| {
        let predicted = (normals(2, &[5, 16], Kind::Float)).set_requires_grad(true);
        let losses = compute(&config([1.0, 0.0, 0.0, 0.0]), &predicted, &truth, precision).expect("computed");
        losses.total.backward();
        predicted.grad()
    };
    // Eight bits of mantissa in the factors: a few tenths of a percent, times the slope of the softmax.
    assert_close(&gradient(Precision::Bf16), &gradient(Precision::F32), 0.05, "gradient");
}

#[test]
fn loss_that_is_not_finite_names_step_rank_and_largest_logit() {
    let truth = normals(1, &[5, 16], Kind::Float);
    let predicted = truth.ones_like() * 1e38_f64;
    let losses = compute(&LossConfig::default(), &predicted, &truth, Precision::F32).expect("computed");
    let error = losses.check(12, 3).expect_err("not finite");
    assert!(error.to_string().starts_with("step 12, rank 3: the loss is "), "{error}");
    let LossError::NotFinite { step: 12, rank: 3, largest_logit: Some(_), .. } = error else { panic!("{error}") };
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let truth = normals(1, &[5, 15], Kind::Float);
    let error = compute(&LossConfig::default(), &normals(2, &[5, 16], Kind::Float), &truth, Precision::F32);
    assert_eq!(error.expect_err("shapes").to_string(), "loss: truth is [5, 15], wanted [5, 16]");
}
