//! Gradients in flat buffers (buckets) that are averaged over ranks while backward is still running.
//!
//! Each gradient is a view into its bucket, and backward accumulates into this view. When all gradients of a bucket are
//! ready, its reduction starts: the mean over ranks is computed. Every rank starts the reductions in the order of the
//! buckets, so that no two ranks wait for different buckets.
//!
//! The division of gradients into buckets depends only on the list of parameters and the bucket size, and never
//! changes. With three or more ranks, the rounding of a sum over ranks depends on this division, so a restarted run
//! must use the same division.
//!
//! ```text
//! buckets.zero()?;
//! for micro_batch in all_but_the_last { buckets.accumulate(|| loss(micro_batch).f_backward())?; }
//! loss(last).f_backward()?;
//! buckets.finish()?;
//! ```

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::error::CommError;
use super::group::{Group, Pending};
use crate::native::autograd::{GradientHook, set_gradient};
use crate::native::c10d::ReduceOp;

/// Each gradient begins at a multiple of this many bytes within its bucket, so that kernels can load whole cache lines.
const ALIGNMENT_BYTES: usize = 64;

/// Position of a gradient in the buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slot {
    bucket: usize,
    offset: usize,
    elements: usize,
}

#[derive(Debug)]
struct State {
    flats: Vec<Tensor>,
    /// For each bucket, the number of gradients that are not ready yet.
    awaited: Vec<usize>,
    arrived: Vec<bool>,
    pending: Vec<Pending>,
    /// The bucket whose reduction starts next. The reductions of all earlier buckets have started.
    next: usize,
    synchronize: bool,
    error: Option<CommError>,
}

#[derive(Debug)]
struct Shared {
    group: Group,
    slots: Vec<Slot>,
    state: Mutex<State>,
}

/// The gradients of a list of parameters, averaged over the ranks of a group.
#[derive(Debug)]
pub struct Buckets {
    shared: Arc<Shared>,
    parameters: Vec<Tensor>,
    hooks: Vec<GradientHook>,
}

impl Buckets {
    /// Replaces the gradients of `parameters` with views into zeroed buckets, and registers a hook on each parameter. A
    /// bucket has at most `bucket_bytes`, unless a single gradient is larger.
    ///
    /// The first bucket holds the last parameters, because backward computes their gradients first. Every rank must
    /// pass parameters of the same shapes and types in the same order, and the same `bucket_bytes`. If the arguments of
    /// the ranks differ, this function fails.
    pub fn new(group: &Group, parameters: &[Tensor], bucket_bytes: usize) -> Result<Self, CommError> {
        let fail = |problem: String| bucket_error(group, &problem);
        for (index, parameter) in parameters.iter().enumerate() {
            check_parameter(group, parameter).map_err(|problem| fail(format!("parameter {index} {problem}")))?;
        }
        let sizes: Vec<(Kind, usize)> = parameters.iter().map(|p| (p.kind(), p.numel())).collect();
        let (slots, lengths) = plan(&sizes, bucket_bytes);
        group.check_agreement("the list of parameters", fingerprint(parameters, bucket_bytes))?;

        let flats = lengths
            .iter()
            .map(|(kind, length)| Tensor::f_zeros([*length as i64], (*kind, group.device())))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| fail(error.to_string()))?;
        let awaited = (0..flats.len()).map(|b| slots.iter().filter(|slot| slot.bucket == b).count()).collect();
        let state = State {
            flats,
            awaited,
            arrived: vec![false; parameters.len()],
            pending: Vec::new(),
            next: 0,
            synchronize: true,
            error: None,
        };
        let shared = Arc::new(Shared { group: group.clone(), slots, state: Mutex::new(state) });
        let parameters: Vec<Tensor> = parameters.iter().map(Tensor::shallow_clone).collect();
        let hooks = hook_gradients(&shared, &parameters).map_err(fail)?;
        Ok(Self { shared, parameters, hooks })
    }

    /// Sets every gradient to zero. Use only this function to zero gradients, because other ways may move the gradients
    /// out of the buckets.
    pub fn zero(&self) -> Result<(), CommError> {
        let mut state = self.shared.lock();
        for flat in &mut state.flats {
            let _ = flat.f_zero_().map_err(|error| self.error(&error.to_string()))?;
        }
        Ok(())
    }

    /// Runs `backward` without averaging over ranks. Use this for every micro-batch of a step except the last one.
    pub fn accumulate<T>(&self, backward: impl FnOnce() -> T) -> T {
        struct Resume<'a>(&'a Shared);
        impl Drop for Resume<'_> {
            fn drop(&mut self) {
                self.0.lock().synchronize = true;
            }
        }
        self.shared.lock().synchronize = false;
        let _resume = Resume(&self.shared);
        backward()
    }

    /// Starts the reductions that have not started yet, and waits for all reductions. Every gradient is then the mean
    /// over ranks. If backward does not reach some parameter, the reductions of its bucket and of all later buckets
    /// start only here. Returns the first error of the step, including errors in hooks. On NCCL, the current stream
    /// waits, not the host.
    pub fn finish(&self) -> Result<(), CommError> {
        tracing::trace!("finish");
        let (pending, error) = self.shared.close_step();
        let mut result = error.map_or(Ok(()), Err);
        for work in pending {
            // Wait for every reduction, even after an error. An unfinished reduction would write into the gradients of
            // the next step.
            let outcome = work.wait_stream();
            result = result.and(outcome);
        }
        result?;
        self.check_in_place()
    }

    /// The flat buffers, in the order of the buckets. The first buffer holds the gradients of the last parameters. The
    /// padding between gradients is zero.
    pub fn flats(&self) -> Vec<Tensor> {
        self.shared.lock().flats.iter().map(Tensor::shallow_clone).collect()
    }

    fn check_in_place(&self) -> Result<(), CommError> {
        if self.hooks.iter().any(GradientHook::panicked) {
            return Err(self.error("a gradient hook panicked; standard error shows its message"));
        }
        let state = self.shared.lock();
        for (index, (parameter, slot)) in self.parameters.iter().zip(&self.shared.slots).enumerate() {
            let gradient = parameter.grad();
            let wanted =
                state.flats[slot.bucket].data_ptr().addr() + slot.offset * parameter.kind().elt_size_in_bytes();
            if !gradient.defined() || gradient.data_ptr().addr() != wanted {
                let advice = "set gradients to zero only with Buckets::zero";
                return Err(
                    self.error(&format!("the gradient of parameter {index} is no longer in its bucket; {advice}"))
                );
            }
        }
        Ok(())
    }

    fn error(&self, problem: &str) -> CommError {
        bucket_error(&self.shared.group, problem)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // If a hook panics while it holds the lock, `GradientHook::panicked` reports the panic. The lock guards only
        // counters and handles, which remain usable after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The hook of one parameter. It runs on the thread that accumulated the gradient. A hook cannot return an error,
    /// so the error is stored and `finish` returns it.
    fn gradient_arrived(&self, parameter: usize) {
        let mut state = self.lock();
        tracing::trace!(parameter, "gradient");
        if !state.synchronize {
            return;
        }
        if std::mem::replace(&mut state.arrived[parameter], true) {
            let advice = "run every backward pass except the last one inside accumulate()";
            let problem = format!("parameter {parameter} got a second gradient in one step; {advice}");
            state.error.get_or_insert(bucket_error(&self.group, &problem));
            return;
        }
        state.awaited[self.slots[parameter].bucket] -= 1;
        while state.next < state.flats.len() && state.awaited[state.next] == 0 {
            self.start_next(&mut state);
        }
    }

    fn start_next(&self, state: &mut State) {
        let bucket = state.next;
        state.next += 1;
        if state.error.is_some() {
            return;
        }
        tracing::trace!(bucket, "reduction started");
        match self.group.start_all_reduce(&mut state.flats[bucket], ReduceOp::Mean) {
            Ok(work) => state.pending.push(work),
            Err(error) => state.error = Some(error),
        }
    }

    /// Starts the remaining reductions and resets the state for the next step.
    fn close_step(&self) -> (Vec<Pending>, Option<CommError>) {
        let mut state = self.lock();
        while state.next < state.flats.len() {
            self.start_next(&mut state);
        }
        state.next = 0;
        state.arrived.fill(false);
        state.awaited.fill(0);
        for slot in &self.slots {
            state.awaited[slot.bucket] += 1;
        }
        (std::mem::take(&mut state.pending), state.error.take())
    }
}

/// An error about gradients that cannot be put into buckets or were moved out of their buckets.
fn bucket_error(group: &Group, problem: &str) -> CommError {
    CommError::Bad(format!("gradient buckets of group {}: {problem}", group.name()))
}

fn check_parameter(group: &Group, parameter: &Tensor) -> Result<(), String> {
    if !parameter.requires_grad() || !parameter.is_leaf() {
        return Err("is not a leaf that requires a gradient".to_owned());
    }
    if parameter.device() != group.device() {
        return Err(format!("is on {:?}, wanted the group's device {:?}", parameter.device(), group.device()));
    }
    if !parameter.is_contiguous() {
        return Err("is not contiguous".to_owned());
    }
    Ok(())
}

/// Assigns each parameter a position in a bucket, from the last parameter to the first. A new bucket begins if the next
/// gradient does not fit into the current bucket or has another type. A gradient that is larger than `bucket_bytes` has
/// a bucket for itself. Returns the positions, and the type and length of each bucket.
fn plan(parameters: &[(Kind, usize)], bucket_bytes: usize) -> (Vec<Slot>, Vec<(Kind, usize)>) {
    let mut slots = Vec::with_capacity(parameters.len());
    let mut buckets: Vec<(Kind, usize)> = Vec::new();
    for &(kind, elements) in parameters.iter().rev() {
        let element_bytes = kind.elt_size_in_bytes();
        let padded = elements.next_multiple_of(ALIGNMENT_BYTES / element_bytes);
        match buckets.last() {
            Some(&(last, length)) if last == kind && (length + padded) * element_bytes <= bucket_bytes => {}
            _ => buckets.push((kind, 0)),
        }
        let bucket = buckets.len() - 1;
        slots.push(Slot { bucket, offset: buckets[bucket].1, elements });
        buckets[bucket].1 += padded;
    }
    slots.reverse();
    (slots, buckets)
}

fn fingerprint(parameters: &[Tensor], bucket_bytes: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    bucket_bytes.hash(&mut hasher);
    for parameter in parameters {
        (parameter.kind() as i32, parameter.size()).hash(&mut hasher);
    }
    hasher.finish()
}

/// Makes each gradient a view into its bucket and registers its hook.
fn hook_gradients(shared: &Arc<Shared>, parameters: &[Tensor]) -> Result<Vec<GradientHook>, String> {
    let mut hooks = Vec::with_capacity(parameters.len());
    for (index, (parameter, slot)) in parameters.iter().zip(&shared.slots).enumerate() {
        let view = shared.lock().flats[slot.bucket]
            .f_narrow(0, slot.offset as i64, slot.elements as i64)
            .and_then(|flat| flat.f_view(&parameter.size()[..]))
            .map_err(|error| error.to_string())?;
        set_gradient(parameter, &view).map_err(|error| error.to_string())?;
        let own = Arc::clone(shared);
        hooks.push(GradientHook::new(parameter, move || own.gradient_arrived(index)).map_err(|e| e.to_string())?);
    }
    Ok(hooks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_runs_from_the_last_parameter_and_never_overlaps() {
        let sizes = [(Kind::Float, 100), (Kind::Float, 3), (Kind::BFloat16, 7), (Kind::Float, 40), (Kind::Float, 1)];
        let (slots, buckets) = plan(&sizes, 4 * 64);
        assert_eq!(buckets, [(Kind::Float, 64), (Kind::BFloat16, 32), (Kind::Float, 16), (Kind::Float, 112)]);
        let places: Vec<_> = slots.iter().map(|slot| (slot.bucket, slot.offset)).collect();
        assert_eq!(places, [(3, 0), (2, 0), (1, 0), (0, 16), (0, 0)]);
    }

    #[test]
    fn parameters_are_aligned_and_never_share_memory() {
        let sizes: Vec<_> = (0..50).map(|n| (Kind::Double, n * 37 % 101)).collect();
        let (slots, buckets) = plan(&sizes, 4096);
        let mut taken: Vec<Vec<bool>> = buckets.iter().map(|(_, elements)| vec![false; *elements]).collect();
        for (slot, (kind, elements)) in slots.iter().zip(&sizes) {
            assert_eq!(slot.offset * kind.elt_size_in_bytes() % ALIGNMENT_BYTES, 0);
            for element in &mut taken[slot.bucket][slot.offset..slot.offset + elements] {
                assert!(!std::mem::replace(element, true), "two parameters share an element");
            }
        }
        assert!(
            slots.windows(2).all(|pair| pair[0].bucket >= pair[1].bucket),
            "the buckets do not hold the parameters in reverse order: {slots:?}"
        );
    }
}
