//! Two features of libtorch that tch lacks: differentiable collectives, and hooks that run after a gradient was
//! accumulated.
//!
//! A collective cannot be differentiated twice. A backward pass with `create_graph` through a collective is an error.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tch::Tensor;

use super::c10d::ProcessGroup;
use super::c10d::millis;
use super::error::{NativeError, check, out_pointer, out_tensor};
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

/// A pair of operations: one for the forward pass, and its counterpart, which the backward pass applies to the
/// gradient.
///
/// Which pair is right depends on what the ranks compute from the result of the forward operation. If all ranks compute
/// the same value, each rank already has the whole gradient of the result. If each rank computes a different value,
/// each has only its share of the gradient, and the backward pass must add or concatenate the shares.
///
/// A tensor is *replicated* if every rank has the same values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Forward: identity. Backward: all-reduce. Used for a replicated tensor from which each rank computes a different
    /// value. Each rank then has a share of the tensor's gradient, and the gradient is the sum of the shares.
    IdentityAllReduce = 0,
    /// Forward: all-reduce. Backward: identity. Used for partial sums that become a replicated tensor.
    AllReduceIdentity = 1,
    /// Forward: all-gather. Backward: this rank's piece of the gradient. Used for pieces that are gathered into a
    /// replicated tensor. Each rank already has the whole gradient of that tensor, so nothing is exchanged.
    GatherSplit = 2,
    /// Forward: this rank's piece of the input. Backward: all-gather. Used for a replicated tensor that is divided
    /// among ranks.
    SplitGather = 3,
}

/// Applies `function` to `input`. If `function` gathers or splits, it does so along dimension `dim`, with pieces of
/// equal size. A negative `dim` counts from the last dimension.
///
/// On Gloo, the call blocks until the result is ready. On NCCL, the call returns at once and the current stream waits.
/// The backward pass runs the backward operation of `function` with the same `timeout`. If this operation fails, the
/// backward call returns an error that names the operation, the group and the rank.
pub fn differentiable(
    group: &ProcessGroup,
    input: &Tensor,
    function: Function,
    dim: i64,
    timeout: Duration,
) -> Result<Tensor, NativeError> {
    let (function, timeout_ms) = (function as c_int, millis(timeout));
    // SAFETY: group and input are alive, the autograd graph takes its own references, and `out` has room for one
    // pointer.
    let call = |out| unsafe { locdiff_differentiable(group.as_ptr(), pointer(input), function, dim, timeout_ms, out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor("differentiable collective", call) }
}

/// Makes `gradient` itself, not a copy, the gradient of `leaf`, so that backward accumulates into `gradient`.
pub fn set_gradient(leaf: &Tensor, gradient: &Tensor) -> Result<(), NativeError> {
    // SAFETY: both tensors are alive; the leaf takes its own reference.
    let status = unsafe { locdiff_set_gradient(pointer(leaf), pointer(gradient)) };
    check("set a gradient", status)
}

struct HookContext {
    call: Box<dyn Fn() + Send + Sync>,
    panicked: Arc<AtomicBool>,
}

/// Calls a function each time the gradient of a leaf has been accumulated, until the hook is dropped.
///
/// The function runs on the thread that accumulated the gradient. For CPU tensors, this is the thread that called
/// backward. For CUDA tensors, it is a thread of the autograd engine. A leaf has at most one hook. A new hook replaces
/// the old one.
#[derive(Debug)]
pub struct GradientHook {
    raw: NonNull<c_void>,
    panicked: Arc<AtomicBool>,
}

// SAFETY: the handle is a shared pointer; a mutex guards its target. The hook function is `Send` and `Sync`.
unsafe impl Send for GradientHook {}
// SAFETY: methods that take `&self` do not change the handle, and a mutex guards the target of the handle.
unsafe impl Sync for GradientHook {}

impl GradientHook {
    /// Makes `call` the hook of `leaf`, which must require a gradient. Do not call this while a backward pass over
    /// `leaf` is running.
    pub fn new(leaf: &Tensor, call: impl Fn() + Send + Sync + 'static) -> Result<Self, NativeError> {
        let panicked = Arc::new(AtomicBool::new(false));
        let context = Box::new(HookContext { call: Box::new(call), panicked: Arc::clone(&panicked) });
        let context = Box::into_raw(context).cast();
        let raw = out_pointer("register a gradient hook", |out| {
            // SAFETY: the leaf is alive. The shim takes over the context and passes it to `drop_context` once, also on
            // failure.
            unsafe { locdiff_hook_new(pointer(leaf), call_context, drop_context, context, out) }
        })?;
        Ok(Self { raw, panicked })
    }

    /// Whether the function has ever panicked. The hook catches the panic, because a panic must not unwind through the
    /// autograd engine.
    pub fn panicked(&self) -> bool {
        self.panicked.load(Ordering::Acquire)
    }
}

impl Drop for GradientHook {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which is not used afterwards.
        unsafe { locdiff_hook_free(self.raw.as_ptr()) };
    }
}

extern "C" fn call_context(context: *const c_void) {
    // SAFETY: the shim passes the context from `GradientHook::new`, and keeps it alive until the call returns.
    let context = unsafe { &*context.cast::<HookContext>() };
    if catch_unwind(AssertUnwindSafe(|| (context.call)())).is_err() {
        context.panicked.store(true, Ordering::Release);
    }
}

extern "C" fn drop_context(context: *mut c_void) {
    // SAFETY: the shim calls this once, with the pointer from `Box::into_raw`, and does not use that pointer
    // afterwards.
    let context = unsafe { Box::from_raw(context.cast::<HookContext>()) };
    // Dropping the values that the function captured may panic, and a panic must not unwind into C++.
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
            let gradient = watched.lock().expect("only one thread uses the lock").grad();
            assert_eq!(gradient.double_value(&[0]), 2.0, "the hook ran before the gradient was accumulated");
            seen.fetch_add(1, Ordering::Relaxed);
        })
        .expect("the tensor is a leaf");
        (&leaf * 2.0).sum(Kind::Double).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert!(!hook.panicked());
        drop(hook);
        (&leaf * 2.0).sum(Kind::Double).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&calls), 1, "the function of the hook was not dropped");
    }

    #[test]
    fn panic_in_a_hook_does_not_fail_backward() {
        let leaf = leaf();
        let hook = GradientHook::new(&leaf, || std::panic::resume_unwind(Box::new(()))).expect("the tensor is a leaf");
        (&leaf * 2.0).sum(Kind::Double).f_backward().expect("the hook catches the panic");
        assert!(hook.panicked());
    }

    #[test]
    fn hook_on_a_non_leaf_is_an_error() {
        let calls = Arc::new(());
        let held = Arc::clone(&calls);
        let error = GradientHook::new(&(leaf() * 2.0), move || {
            let _ = &held;
        })
        .expect_err("a product is not a leaf");
        assert!(error.text.contains("not a leaf"), "{}", error.text);
        assert_eq!(Arc::strong_count(&calls), 1, "the function of the hook was not dropped");
    }

    #[test]
    fn gradient_accumulates_in_the_tensor_that_was_set() {
        let leaf = leaf();
        let flat = Tensor::zeros([5], (Kind::Double, Device::Cpu));
        set_gradient(&leaf, &flat.narrow(0, 1, 3)).expect("the shapes are the same");
        (&leaf * 2.0).sum(Kind::Double).backward();
        (&leaf * 3.0).sum(Kind::Double).backward();
        assert_eq!(Vec::<f64>::try_from(&flat).expect("the tensor holds five numbers"), [0.0, 5.0, 5.0, 5.0, 0.0]);
        assert!(set_gradient(&leaf, &flat).is_err());
    }
}
