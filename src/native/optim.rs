//! The optimiser. This module offers AdamW as one fused operation over a list of tensors, computes the norm of
//! gradients, clips gradients, checks whether they are finite, and updates moving averages of parameters.
//!
//! No function of this module waits for the device. The learning rate, the step, the clip divisor and the skip flag are
//! tensors, so that their values can change between replays of a captured CUDA graph. Each group of parameters with its
//! own hyperparameters needs a separate call of [`AdamW::update`].
//!
//! AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.

use std::ffi::{c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::error::{NativeError, check, out_tensor};

unsafe extern "C" {
    fn locdiff_fused_adamw(
        count: usize,
        params: *const *mut c_void,
        grads: *const *mut c_void,
        exp_avgs: *const *mut c_void,
        exp_avg_sqs: *const *mut c_void,
        step: *mut c_void,
        lr: *mut c_void,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        grad_scale: *mut c_void,
        found_inf: *mut c_void,
    ) -> c_int;
    fn locdiff_squared_norm(count: usize, tensors: *const *mut c_void, out: *mut *mut c_void) -> c_int;
    fn locdiff_list_lerp(
        count: usize,
        averages: *const *mut c_void,
        values: *const *mut c_void,
        weight: *mut c_void,
    ) -> c_int;
}

/// Hyperparameters of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment, so that the update never divides by 0.
    pub eps: f64,
    /// Decoupled weight decay: each update first multiplies the parameter by 1 − learning rate × `weight_decay`.
    pub weight_decay: f64,
}

/// Optimizer state of a list of parameters.
#[derive(Debug)]
pub struct Moments {
    /// Running means of the gradients.
    pub exp_avgs: Vec<Tensor>,
    /// Running means of the squared gradients.
    pub exp_avg_sqs: Vec<Tensor>,
    /// Number of updates so far, as one f32 on the device. An f32 counts exactly up to 2²⁴.
    pub step: Tensor,
}

impl Moments {
    /// Zero moments with the shapes, dtypes and devices of `params`.
    pub fn zeros(params: &[Tensor]) -> Self {
        let zeros = || params.iter().map(|param| param.detach().zeros_like()).collect();
        let device = params.first().map_or(Device::Cpu, Tensor::device);
        Self { exp_avgs: zeros(), exp_avg_sqs: zeros(), step: Tensor::zeros([], (Kind::Float, device)) }
    }
}

/// The inputs of one update besides parameters, gradients and moments. All are tensors on the device.
#[derive(Debug, Clone, Copy)]
pub struct UpdateInputs<'a> {
    /// The learning rate, as one f32.
    pub learning_rate: &'a Tensor,
    /// One f32, such as the result of [`clip_divisor`]. Before the update, the gradients are divided by this number in
    /// place.
    pub grad_divisor: Option<&'a Tensor>,
    /// One f32. If it is 1, the update is skipped: parameters, moments and step stay unchanged. With `None`, no update
    /// is skipped.
    pub found_inf: Option<&'a Tensor>,
}

impl AdamW {
    /// Updates `params` and `moments` once, in place.
    ///
    /// All parameters must have the same dtype and device. The gradient and both moments of a parameter must have the
    /// same shape, strides, dtype and device as the parameter.
    pub fn update(
        &self,
        params: &[Tensor],
        grads: &[Tensor],
        moments: &mut Moments,
        control: UpdateInputs<'_>,
    ) -> Result<(), NativeError> {
        const OPERATION: &str = "fused AdamW";
        let lengths = [grads.len(), moments.exp_avgs.len(), moments.exp_avg_sqs.len()];
        if lengths.iter().any(|length| *length != params.len()) {
            let text = format!(
                "got {} gradients, {} first moments and {} second moments for {} parameters",
                lengths[0],
                lengths[1],
                lengths[2],
                params.len()
            );
            return Err(NativeError { operation: OPERATION, text });
        }
        if params.is_empty() {
            return Ok(());
        }
        let lists = [params, grads, &moments.exp_avgs, &moments.exp_avg_sqs].map(pointers);
        // SAFETY: each list holds `params.len()` live tensors, and the three scalars are live tensors or null.
        let status = unsafe {
            locdiff_fused_adamw(
                params.len(),
                lists[0].as_ptr(),
                lists[1].as_ptr(),
                lists[2].as_ptr(),
                lists[3].as_ptr(),
                pointer(&moments.step),
                pointer(control.learning_rate),
                self.beta1,
                self.beta2,
                self.eps,
                self.weight_decay,
                control.grad_divisor.map_or(std::ptr::null_mut(), pointer),
                control.found_inf.map_or(std::ptr::null_mut(), pointer),
            )
        };
        check(OPERATION, status)
    }
}

/// The sum of the squares of all elements, as one f32 on the device (f64 if all tensors are f64). If each rank holds a
/// part of the tensors, the results of all ranks add up to the squared norm of the whole.
pub fn squared_norm(tensors: &[Tensor]) -> Result<Tensor, NativeError> {
    let list = pointers(tensors);
    // SAFETY: the list holds `tensors.len()` live tensors, and `out` has room for one pointer.
    let call = |out| unsafe { locdiff_squared_norm(list.len(), list.as_ptr(), out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor("squared norm", call) }
}

/// Returns 1 if `scalar` is infinite or NaN, else 0, as one f32. Pass the squared norm of the gradients to check them:
/// this needs no second pass over the gradients, and it also detects finite gradients whose norm overflows.
pub fn not_finite(scalar: &Tensor) -> Result<Tensor, NativeError> {
    Ok(scalar.f_isfinite()?.f_logical_not()?.f_to_kind(Kind::Float)?)
}

/// The number by which gradients must be divided so that their norm is at most `max_norm`: max(1, norm / max_norm), as
/// one f32.
pub fn clip_divisor(squared_norm: &Tensor, max_norm: f64) -> Result<Tensor, NativeError> {
    Ok(squared_norm.f_sqrt()?.f_div_scalar(max_norm)?.f_clamp_min(1.0)?.f_to_kind(Kind::Float)?)
}

/// Moves each of `averages` towards its parameter, in place: average ← (1 − weight) × average + weight × parameter.
/// `weight` is one f32 on the device.
pub fn ema_update(averages: &[Tensor], params: &[Tensor], weight: &Tensor) -> Result<(), NativeError> {
    const OPERATION: &str = "moving average";
    if averages.len() != params.len() {
        let text = format!("got {} averages for {} parameters, wanted one for each", averages.len(), params.len());
        return Err(NativeError { operation: OPERATION, text });
    }
    let (average_list, param_list) = (pointers(averages), pointers(params));
    // SAFETY: both lists hold `averages.len()` live tensors, and the weight is a live tensor.
    let status =
        unsafe { locdiff_list_lerp(averages.len(), average_list.as_ptr(), param_list.as_ptr(), pointer(weight)) };
    check(OPERATION, status)
}

/// The `at::Tensor*` of a tensor. The pointer is valid as long as `tensor` is alive.
pub(super) fn pointer(tensor: &Tensor) -> *mut c_void {
    tensor.as_ptr().cast_mut().cast()
}

fn pointers(tensors: &[Tensor]) -> Vec<*mut c_void> {
    tensors.iter().map(pointer).collect()
}
