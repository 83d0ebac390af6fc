//! Fused AdamW equals algorithm 2 of Loshchilov and Hutter, written here in plain Rust. Other tests check the gradient
//! norm, clipping and the moving average.

use locdiff::native::optim::{AdamW, Moments, UpdateInputs, clip_divisor, ema_update, not_finite, squared_norm};
use tch::{Device, Kind, Tensor};

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.01 };
const LEARNING_RATE: f32 = 3e-3;

fn scalar(value: f32) -> Tensor {
    Tensor::from(value)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.flatten(0, -1).to_kind(Kind::Double)).expect("the tensor is flat and f64")
}

/// Two parameters of different shapes.
fn params(kind: Kind) -> Vec<Tensor> {
    let ramp = Tensor::arange(12, (Kind::Double, Device::Cpu)) / 7.0 - 0.6;
    vec![ramp.view([3, 4]).to_kind(kind), (ramp.narrow(0, 0, 5) * -1.3).to_kind(kind)]
}

/// Gradients that depend on the parameters and on the step.
fn grads(params: &[Tensor], step: i64) -> Vec<Tensor> {
    params.iter().map(|param| (param.copy() * (step as f64 * 0.7) + 0.2).sin()).collect()
}

/// AdamW in f64 for a single number: the value and its two moments.
struct Scalar {
    value: f64,
    first: f64,
    second: f64,
}

impl Scalar {
    fn update(&mut self, grad: f64, step: i32, learning_rate: f64) {
        self.value -= learning_rate * ADAMW.weight_decay * self.value;
        self.first = ADAMW.beta1 * self.first + (1.0 - ADAMW.beta1) * grad;
        self.second = ADAMW.beta2 * self.second + (1.0 - ADAMW.beta2) * grad * grad;
        let first = self.first / (1.0 - ADAMW.beta1.powi(step));
        let second = self.second / (1.0 - ADAMW.beta2.powi(step));
        self.value -= learning_rate * first / (second.sqrt() + ADAMW.eps);
    }
}

fn largest_difference(kind: Kind, divisor: Option<f32>) -> f64 {
    let tensors = params(kind);
    let mut moments = Moments::zeros(&tensors);
    let mut plain: Vec<Scalar> =
        tensors.iter().flat_map(values).map(|value| Scalar { value, first: 0.0, second: 0.0 }).collect();
    let rate = scalar(LEARNING_RATE);
    let grad_divisor = divisor.map(scalar);
    for step in 1..=25 {
        let grads = grads(&tensors, step);
        let flat: Vec<f64> = grads.iter().flat_map(values).collect();
        let control = UpdateInputs { learning_rate: &rate, grad_divisor: grad_divisor.as_ref(), found_inf: None };
        ADAMW.update(&tensors, &grads, &mut moments, control).expect("shapes and types match");
        for (number, grad) in plain.iter_mut().zip(flat) {
            number.update(grad / f64::from(divisor.unwrap_or(1.0)), step as i32, f64::from(LEARNING_RATE));
        }
    }
    assert_eq!(values(&moments.step), [25.0]);
    let got: Vec<f64> = tensors.iter().flat_map(values).collect();
    got.iter().zip(&plain).map(|(got, plain)| (got - plain.value).abs()).fold(0.0, f64::max)
}

#[test]
fn fused_adamw_equals_the_published_algorithm() {
    // The reference computes in f64. In f64, fused AdamW differs from the reference only by the rounding errors of
    // 25 updates. Fused AdamW in f32 also rounds each update by up to 2⁻²⁴ = 6e-8.
    assert!(largest_difference(Kind::Double, None) < 1e-13);
    assert!(largest_difference(Kind::Float, None) < 25.0 * 6e-8);
}

#[test]
fn gradients_are_divided_before_use() {
    assert!(largest_difference(Kind::Double, Some(4.0)) < 1e-13);
}

#[test]
fn found_inf_leaves_everything_untouched() {
    let tensors = params(Kind::Float);
    let mut moments = Moments::zeros(&tensors);
    let (rate, keep, skip) = (scalar(LEARNING_RATE), scalar(0.0), scalar(1.0));
    let with = |flag| UpdateInputs { learning_rate: &rate, grad_divisor: None, found_inf: Some(flag) };
    ADAMW.update(&tensors, &grads(&tensors, 1), &mut moments, with(&keep)).expect("shapes and types match");
    assert_eq!(values(&moments.step), [1.0]);
    let all = |moments: &Moments| -> Vec<f64> {
        let lists = tensors.iter().chain(&moments.exp_avgs).chain(&moments.exp_avg_sqs).chain([&moments.step]);
        lists.flat_map(values).collect()
    };
    let before = all(&moments);
    let broken: Vec<Tensor> = tensors.iter().map(|param| param.full_like(f64::INFINITY)).collect();
    ADAMW.update(&tensors, &broken, &mut moments, with(&skip)).expect("shapes and types match");
    assert_eq!(all(&moments), before);
    ADAMW.update(&tensors, &grads(&tensors, 2), &mut moments, with(&keep)).expect("shapes and types match");
    assert_eq!(values(&moments.step), [2.0]);
    assert_ne!(all(&moments), before);
}

#[test]
fn mismatched_lists_are_named() {
    let tensors = params(Kind::Float);
    let mut moments = Moments::zeros(&tensors);
    let rate = scalar(LEARNING_RATE);
    let control = UpdateInputs { learning_rate: &rate, grad_divisor: None, found_inf: None };
    let mut refused = |grads: &[Tensor]| {
        ADAMW.update(&tensors, grads, &mut moments, control).expect_err("the lists do not match").to_string()
    };
    assert!(refused(&grads(&tensors, 1)[..1]).contains("2 parameters"));
    let mut transposed = grads(&tensors, 1);
    transposed[0] = transposed[0].tr().contiguous().tr();
    assert!(refused(&transposed).contains("gradient 0"));
    let mut wide = grads(&tensors, 1);
    wide[1] = wide[1].to_kind(Kind::Double);
    assert!(refused(&wide).contains("gradient 1"));
    assert_eq!(values(&moments.step), [0.0], "a refused update was counted");
}

#[test]
fn norm_clip_divisor_and_finite_flag_are_tensors() {
    let tensors = vec![Tensor::from_slice(&[3.0_f32, 0.0]), Tensor::from_slice(&[0.0_f32, 4.0]).view([1, 2])];
    let squares = squared_norm(&tensors).expect("the list is not empty");
    assert_eq!((squares.kind(), values(&squares)), (Kind::Float, vec![25.0]));
    assert_eq!(values(&clip_divisor(&squares, 2.5).expect("the norm is one number")), [2.0]);
    assert_eq!(values(&clip_divisor(&squares, 10.0).expect("the norm is one number")), [1.0]);
    assert_eq!(values(&not_finite(&squares).expect("the norm is one number")), [0.0]);
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let tensors = [Tensor::from_slice(&[1.0_f32]), Tensor::from_slice(&[0.0, broken, 1.0])];
        let squares = squared_norm(&tensors).expect("the list is not empty");
        assert_eq!(values(&not_finite(&squares).expect("the norm is one number")), [1.0]);
    }
    let huge = squared_norm(&[Tensor::from_slice(&[3e38_f32, -3e38])]).expect("the list is not empty");
    assert_eq!(
        values(&not_finite(&huge).expect("the norm is one number")),
        [1.0],
        "a norm that overflows is not flagged"
    );
    let half = [tensors[0].to_kind(Kind::BFloat16)];
    assert_eq!(squared_norm(&half).expect("the list is not empty").kind(), Kind::Float);
}

#[test]
fn moving_average_moves_by_its_weight() {
    let (averages, params) = ([Tensor::from_slice(&[1.0_f64, 2.0])], [Tensor::from_slice(&[3.0_f64, 0.0])]);
    let weight = Tensor::from(0.25_f64);
    ema_update(&averages, &params, &weight).expect("the lists match");
    assert_eq!(values(&averages[0]), [1.5, 1.5]);
    assert!(ema_update(&averages, &[], &weight).is_err());
    assert!(ema_update(&averages, &params, &Tensor::from_slice(&[0.1_f64, 0.2])).is_err(), "two weights were accepted");
}

/// Rust and C++ pass tensors to each other by pointer. A leak of one small tensor per call would make this test fail.
#[test]
fn ten_thousand_calls_do_not_leak() {
    let tensors = params(Kind::Float);
    let mut moments = Moments::zeros(&tensors);
    let rate = scalar(1e-6);
    let grads = grads(&tensors, 1);
    let mut round = || {
        let squares = squared_norm(&grads).expect("the list is not empty");
        let (divisor, flag) = (
            clip_divisor(&squares, 1.0).expect("the norm is one number"),
            not_finite(&squares).expect("the norm is one number"),
        );
        let control = UpdateInputs { learning_rate: &rate, grad_divisor: Some(&divisor), found_inf: Some(&flag) };
        ADAMW.update(&tensors, &grads, &mut moments, control).expect("shapes and types match");
    };
    // Other tests run at the same time and allocate memory too, so it is enough if memory does not grow in one of the
    // five attempts. If every call leaked a tensor, memory would grow by 2 MB in every attempt.
    let grown: Vec<u64> = (0..5)
        .map(|_| {
            let before = crate::resident_bytes();
            (0..10_000).for_each(|_| round());
            crate::resident_bytes().saturating_sub(before)
        })
        .collect();
    assert!(grown.iter().any(|bytes| *bytes < 1 << 20), "memory grew by {grown:?} bytes");
}
