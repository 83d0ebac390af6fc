//! AdamW over lists of tensors in one fused kernel, with gradient norm, clipping, non-finite check and EMA.
//!
//! Nothing here waits for the device. Learning rate, step, clip divisor and skip flag are tensors, so that a captured
//! graph can be replayed with other values. Each parameter group is a separate call.
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
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: each update first multiplies the parameter by 1 − learning rate × this.
    pub weight_decay: f64,
}

/// Optimizer state of a list of parameters.
#[derive(Debug)]
pub struct Moments {
    /// Running means of the gradients.
    pub exp_avgs: Vec<Tensor>,
    /// Running means of their squares.
    pub exp_avg_sqs: Vec<Tensor>,
    /// Number of updates so far: one f32 on the device (exact up to 2²⁴).
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

/// Inputs of one update other than the gradients, all on the device.
#[derive(Debug, Clone, Copy)]
pub struct UpdateInputs<'a> {
    /// The learning rate, one f32.
    pub learning_rate: &'a Tensor,
    /// Divides the gradients before they are used; the divided gradients are written back. One f32, such as the result
    /// of [`clip_divisor`].
    pub grad_divisor: Option<&'a Tensor>,
    /// One f32. If it is 1, parameters, moments and step stay unchanged.
    pub found_inf: Option<&'a Tensor>,
}

impl AdamW {
    /// Makes one update of `params`, in place.
    ///
    /// All tensors must have one dtype and be on one device, and a gradient must have the strides of its parameter.
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
            let text = format!("{} parameters, but {lengths:?} gradients, first and second moments", params.len());
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

/// The sum of all squares as one f32 on the device (f64 if all tensors are f64). The sums of shards can be added across
/// ranks.
pub fn squared_norm(tensors: &[Tensor]) -> Result<Tensor, NativeError> {
    let list = pointers(tensors);
    // SAFETY: the list holds `tensors.len()` live tensors, and `out` has room for one pointer.
    let call = |out| unsafe { locdiff_squared_norm(list.len(), list.as_ptr(), out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor("squared norm", call) }
}

/// Returns 1 if the scalar is infinite or NaN, else 0, as one f32. Checking the squared norm saves a pass over the
/// gradients, and also catches finite gradients whose norm overflows.
pub fn not_finite(scalar: &Tensor) -> Result<Tensor, NativeError> {
    Ok(scalar.f_isfinite()?.f_logical_not()?.f_to_kind(Kind::Float)?)
}

/// The divisor that limits the norm of the gradients to `max_norm`: max(1, norm / max_norm), one f32.
pub fn clip_divisor(squared_norm: &Tensor, max_norm: f64) -> Result<Tensor, NativeError> {
    Ok(squared_norm.f_sqrt()?.f_div_scalar(max_norm)?.f_clamp_min(1.0)?.f_to_kind(Kind::Float)?)
}

/// Moves `averages` towards `params`: average = (1 − weight) × average + weight × parameter. `weight` is one f32 on the
/// device.
pub fn ema_update(averages: &[Tensor], params: &[Tensor], weight: &Tensor) -> Result<(), NativeError> {
    const OPERATION: &str = "moving average";
    if averages.len() != params.len() {
        let text = format!("{} averages for {} parameters", averages.len(), params.len());
        return Err(NativeError { operation: OPERATION, text });
    }
    let (average_list, param_list) = (pointers(averages), pointers(params));
    // SAFETY: both lists hold `averages.len()` live tensors, and the weight is a live tensor.
    let status =
        unsafe { locdiff_list_lerp(averages.len(), average_list.as_ptr(), param_list.as_ptr(), pointer(weight)) };
    check(OPERATION, status)
}

/// The `at::Tensor*` of a tensor, valid as long as the tensor lives.
pub(super) fn pointer(tensor: &Tensor) -> *mut c_void {
    tensor.as_ptr().cast_mut().cast()
}

fn pointers(tensors: &[Tensor]) -> Vec<*mut c_void> {
    tensors.iter().map(pointer).collect()
}
