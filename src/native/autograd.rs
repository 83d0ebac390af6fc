//! What tch has no way to make: differentiable collectives, and hooks that run when a gradient has been accumulated.
//!
//! None can be differentiated twice: a backward with `create_graph` through a collective is an error.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::Tensor;

use super::c10d::ProcessGroup;
use super::c10d_store::millis;
use super::error::{NativeError, check, handed_over, tensor_from};
use super::optim::pointer;

type HookCall = extern "C" fn(*const c_void);
type HookDrop = extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn locdiff_differentiable(
        group: *mut c_void,
        input: *const c_void,
        function: c_int,
        dim: i64,
        timeout_ms: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_hook_new(
        leaf: *const c_void,
        call: HookCall,
        drop: HookDrop,
        context: *mut c_void,
        out: *mut *mut c_void,
    ) -> c_int;
    fn locdiff_hook_free(hook: *mut c_void);
    fn locdiff_set_gradient(leaf: *const c_void, gradient: *const c_void) -> c_int;
}

/// A collective in the forward pass and its counterpart in the backward pass.
///
/// Which one is right depends on what comes after. *Replicated*: every rank goes on with the same values, and the loss
/// they all compute counts once. *Partial*: every rank goes on in its own way, and the loss is the sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Forward nothing, backward an all-reduce. Where a replicated tensor enters parts that differ between ranks: each
    /// part yields a share of its gradient.
    IdentityAllReduce = 0,
    /// Forward an all-reduce, backward nothing. Where partial sums become a replicated tensor.
    AllReduceIdentity = 1,
    /// Forward an all-gather, backward this rank's piece of the gradient. Where what comes after is replicated, and each
    /// rank already holds the whole gradient.
    GatherSplit = 2,
    /// Forward this rank's piece, backward an all-gather. Where a replicated tensor is divided among ranks.
    SplitGather = 3,
}

/// Applies `function` to `input`; gathers and splits run along `dim` (negative counts from the end), in equal pieces.
///
/// On Gloo it blocks until the result is there, on NCCL the current stream waits. Backward runs the counterpart under
/// the same `timeout`; what fails there is an error of the backward call, with operation, group and rank in its text.
pub fn differentiable(
    group: &ProcessGroup,
    input: &Tensor,
    function: Function,
    dim: i64,
    timeout: Duration,
) -> Result<Tensor, NativeError> {
    let (function, timeout_ms) = (function as c_int, millis(timeout));
    // SAFETY: group and input are alive; the graph takes its own references.
    let call = |out| unsafe { locdiff_differentiable(group.as_ptr(), pointer(input), function, dim, timeout_ms, out) };
    // SAFETY: the result is a new tensor.
    unsafe { tensor_from("differentiable collective", call) }
}

/// Makes `gradient` itself, not a copy, the gradient of the leaf: what backward accumulates is written there.
pub fn set_gradient(leaf: &Tensor, gradient: &Tensor) -> Result<(), NativeError> {
    // SAFETY: both tensors are alive; the leaf takes its own reference.
    let status = unsafe { locdiff_set_gradient(pointer(leaf), pointer(gradient)) };
    check("set a gradient", status)
}

struct HookContext {
    call: Box<dyn Fn() + Send + Sync>,
    panicked: Arc<AtomicBool>,
}

/// A function that runs each time a leaf's gradient has been accumulated; silent once dropped.
///
/// It runs on the thread that accumulated: the caller of backward for CPU tensors, a thread of the engine for CUDA.
/// A leaf has one hook: a new one takes the place of the old.
#[derive(Debug)]
pub struct GradientHook {
    raw: NonNull<c_void>,
    panicked: Arc<AtomicBool>,
}

// SAFETY: the handle is a shared pointer whose target is guarded by a mutex; the function is Send and Sync.
unsafe impl Send for GradientHook {}
// SAFETY: as above; no method changes it.
unsafe impl Sync for GradientHook {}

impl GradientHook {
    /// Hangs `call` on a leaf that requires a gradient. Not while a backward over that leaf runs.
    pub fn new(leaf: &Tensor, call: impl Fn() + Send + Sync + 'static) -> Result<Self, NativeError> {
        let panicked = Arc::new(AtomicBool::new(false));
        let context = Box::new(HookContext { call: Box::new(call), panicked: Arc::clone(&panicked) });
        let context = Box::into_raw(context).cast();
        let raw = handed_over("hook a gradient", |out| {
            // SAFETY: the leaf is alive; the context is handed over and comes back to `drop_context` once, also on failure.
            unsafe { locdiff_hook_new(pointer(leaf), call_context, drop_context, context, out) }
        })?;
        Ok(Self { raw, panicked })
    }

    /// Whether the function ever panicked. The panic ends there: it must not unwind through the engine.
    pub fn panicked(&self) -> bool {
        self.panicked.load(Ordering::Acquire)
    }
}

impl Drop for GradientHook {
    fn drop(&mut self) {
        // SAFETY: ours alone, and not used after.
        unsafe { locdiff_hook_free(self.raw.as_ptr()) };
    }
}

extern "C" fn call_context(context: *const c_void) {
    // SAFETY: the shim passes the context of `GradientHook::new`, and keeps it until the call returns.
    let context = unsafe { &*context.cast::<HookContext>() };
    if catch_unwind(AssertUnwindSafe(|| (context.call)())).is_err() {
        context.panicked.store(true, Ordering::Release);
    }
}

extern "C" fn drop_context(context: *mut c_void) {
    // SAFETY: the shim calls this once, with the pointer that `Box::into_raw` gave it, and does not use it after.
    let context = unsafe { Box::from_raw(context.cast::<HookContext>()) };
    // What the function owns may panic when dropped; that must not unwind into C++.
    let _ = catch_unwind(AssertUnwindSafe(move || drop(context)));
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tch::{Device, Kind};

    use super::*;

    fn leaf() -> Tensor {
        Tensor::ones([3], (Kind::Double, Device::Cpu)).set_requires_grad(true)
    }

    #[test]
    fn hook_runs_after_accumulation_until_dropped() {
        let leaf = leaf();
        let calls = Arc::new(AtomicUsize::new(0));
        let (seen, watched) = (Arc::clone(&calls), std::sync::Mutex::new(leaf.shallow_clone()));
        let hook = GradientHook::new(&leaf, move || {
            let gradient = watched.lock().expect("one thread").grad();
            assert_eq!(gradient.double_value(&[0]), 2.0, "the gradient is already there");
            seen.fetch_add(1, Ordering::Relaxed);
        })
        .expect("a leaf");
        (&leaf * 2.0).sum(Kind::Double).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert!(!hook.panicked());
        drop(hook);
        (&leaf * 2.0).sum(Kind::Double).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&calls), 1, "the function was dropped");
    }

    #[test]
    fn panic_in_a_hook_stays_there() {
        let leaf = leaf();
        let hook = GradientHook::new(&leaf, || std::panic::resume_unwind(Box::new(()))).expect("a leaf");
        (&leaf * 2.0).sum(Kind::Double).f_backward().expect("backward goes on");
        assert!(hook.panicked());
    }

    #[test]
    fn only_leaves_can_be_hooked() {
        let calls = Arc::new(());
        let held = Arc::clone(&calls);
        let error = GradientHook::new(&(leaf() * 2.0), move || {
            let _ = &held;
        })
        .expect_err("not a leaf");
        assert!(error.text.contains("only a leaf"), "{}", error.text);
        assert_eq!(Arc::strong_count(&calls), 1, "the function was dropped");
    }

    #[test]
    fn gradient_accumulates_in_the_tensor_that_was_set() {
        let leaf = leaf();
        let flat = Tensor::zeros([5], (Kind::Double, Device::Cpu));
        set_gradient(&leaf, &flat.narrow(0, 1, 3)).expect("same shape");
        (&leaf * 2.0).sum(Kind::Double).backward();
        (&leaf * 3.0).sum(Kind::Double).backward();
        assert_eq!(Vec::<f64>::try_from(&flat).expect("five numbers"), [0.0, 5.0, 5.0, 5.0, 0.0]);
        assert!(set_gradient(&leaf, &flat).is_err());
    }
}
