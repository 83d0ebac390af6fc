// Differentiable collectives and gradient hooks; see autograd.h.
#include "autograd.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <utility>

#include "c10d.h"
#include "error.h"

namespace locdiff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor all_reduce(const GroupPtr& group, const at::Tensor& input, milliseconds timeout) {
  auto result = input.clone(at::MemoryFormat::Contiguous);
  start_all_reduce(group, result, Reduce::Sum, timeout)->wait_stream();
  return result;
}

at::Tensor all_gather(const GroupPtr& group, const at::Tensor& input, int64_t dim, milliseconds timeout) {
  TORCH_CHECK(input.dim() > 0, "a scalar has no dimension to gather along");
  auto piece = input.contiguous();
  auto sizes = piece.sizes().vec();
  sizes.insert(sizes.begin(), group->size);
  auto pieces = at::empty(sizes, piece.options());
  start_all_gather(group, pieces, piece, timeout)->wait_stream();
  // Along dimension 0, the gathered pieces already lie in the order of the result.
  return dim == 0 ? pieces.flatten(0, 1) : at::cat(pieces.unbind(0), dim);
}

at::Tensor own_piece(const GroupPtr& group, const at::Tensor& whole, int64_t dim) {
  TORCH_CHECK(dim < whole.dim() && whole.size(dim) % group->size == 0, "dimension ", dim, " of ", whole.sizes(),
              " cannot be divided among ", group->size, " ranks");
  auto length = whole.size(dim) / group->size;
  return whole.narrow(dim, group->rank * length, length).clone(at::MemoryFormat::Contiguous);
}

at::Tensor forward_of(int function, const GroupPtr& group, const at::Tensor& input, int64_t dim, milliseconds timeout) {
  switch (function) {
    case LOCDIFF_IDENTITY_ALL_REDUCE:
      return input;
    case LOCDIFF_ALL_REDUCE_IDENTITY:
      return all_reduce(group, input, timeout);
    case LOCDIFF_GATHER_SPLIT:
      return all_gather(group, input, dim, timeout);
    case LOCDIFF_SPLIT_GATHER:
      return own_piece(group, input, dim);
  }
  TORCH_CHECK(false, "unknown differentiable collective ", function);
}

const char* backward_name(int function) {
  switch (function) {
    case LOCDIFF_IDENTITY_ALL_REDUCE:
      return "all_reduce";
    case LOCDIFF_SPLIT_GATHER:
      return "all_gather";
  }
  return "split";
}

at::Tensor backward_of(int function, const GroupPtr& group, const at::Tensor& grad, int64_t dim, milliseconds timeout) {
  switch (function) {
    case LOCDIFF_IDENTITY_ALL_REDUCE:
      return all_reduce(group, grad, timeout);
    case LOCDIFF_ALL_REDUCE_IDENTITY:
      return grad;
    case LOCDIFF_GATHER_SPLIT:
      return own_piece(group, grad, dim);
    case LOCDIFF_SPLIT_GATHER:
      return all_gather(group, grad, dim, timeout);
  }
  TORCH_CHECK(false, "unknown differentiable collective ", function);
}

struct Collective : torch::autograd::Function<Collective> {
  static Variable forward(AutogradContext* context, const Variable& input, const GroupPtr& group, int64_t function,
                          int64_t dim, int64_t timeout_ms) {
    context->saved_data["group"] = at::IValue::make_capsule(group);
    context->saved_data["function"] = function;
    context->saved_data["dim"] = dim;
    context->saved_data["timeout_ms"] = timeout_ms;
    return forward_of(static_cast<int>(function), group, input, dim, milliseconds(timeout_ms));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    // During the backward pass, the engine enables gradient mode only if the caller asked for create_graph.
    TORCH_CHECK(!at::GradMode::is_enabled(), "a differentiable collective cannot be differentiated twice; run backward without create_graph");
    auto group = c10::static_intrusive_pointer_cast<Group>(context->saved_data["group"].toCapsule());
    auto function = static_cast<int>(context->saved_data["function"].toInt());
    auto dim = context->saved_data["dim"].toInt();
    milliseconds timeout(context->saved_data["timeout_ms"].toInt());
    // The caller of backward receives only the error text, so the text must name the operation, the group and the rank.
    try {
      auto grad = backward_of(function, group, grads[0], dim, timeout);
      return {grad, Variable(), Variable(), Variable(), Variable()};
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, group->describe(backward_name(function)), ": ", error.what_without_backtrace());
    } catch (const std::exception& error) {
      TORCH_CHECK(false, group->describe(backward_name(function)), ": ", error.what());
    }
  }
};

// The function that a hook calls, and its context. The destructor drops the context.
struct Callback {
  Callback(locdiff_hook_call call, locdiff_hook_drop drop, void* context) : call(call), drop(drop), context(context) {}
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;
  ~Callback() { drop(context); }

  locdiff_hook_call call;
  locdiff_hook_drop drop;
  void* context;
};

// Holds the callback of a hook. The hook of the tensor and the handle in Rust share one Slot.
struct Slot {
  std::shared_ptr<Callback> get() {
    std::lock_guard<std::mutex> lock(mutex);
    return callback;
  }
  void set(std::shared_ptr<Callback> next) {
    std::lock_guard<std::mutex> lock(mutex);
    // The old callback is destroyed after the lock is released, because its destructor may run arbitrary code.
    callback.swap(next);
  }

  std::mutex mutex;
  std::shared_ptr<Callback> callback;
};

struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(std::shared_ptr<Slot> slot) : slot(std::move(slot)) {}
  void operator()(const Variable& /*leaf*/) override {
    // Keep a reference to the callback, so that locdiff_hook_free on another thread does not destroy it during the
    // call.
    if (auto callback = slot->get()) {
      callback->call(callback->context);
    }
  }
  std::shared_ptr<Slot> slot;
};

void check_leaf(const at::Tensor& leaf) {
  TORCH_CHECK(leaf.defined() && leaf.is_leaf() && leaf.requires_grad(), "the tensor is not a leaf that requires a gradient");
}

}  // namespace
}  // namespace locdiff

using namespace locdiff;

extern "C" {

int locdiff_differentiable(void* group, const void* input, int function, int64_t dim, int64_t timeout_ms, void** out) {
  return guarded([&] {
    const auto& tensor = tensor_of(input);
    // A scalar has no dimensions, so `dim` cannot be wrapped. Gathers and splits reject scalars, and the other
    // functions ignore `dim`.
    int64_t wrapped = tensor.dim() == 0 ? dim : c10::maybe_wrap_dim(dim, tensor.dim());
    *out = new at::Tensor(
        Collective::apply(tensor, *static_cast<GroupPtr*>(group), static_cast<int64_t>(function), wrapped, timeout_ms));
  });
}

int locdiff_hook_new(const void* leaf, locdiff_hook_call call, locdiff_hook_drop drop, void* context, void** out) {
  return guarded([&] {
    // From here on, the callback owns the context and drops it, even if a later statement throws.
    auto callback = std::make_shared<Callback>(call, drop, context);
    const auto& tensor = tensor_of(leaf);
    check_leaf(tensor);
    auto slot = std::make_shared<Slot>();
    slot->set(std::move(callback));
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<Hook>(slot));
    *out = new std::shared_ptr<Slot>(std::move(slot));
  });
}

void locdiff_hook_free(void* hook) {
  auto slot = static_cast<std::shared_ptr<Slot>*>(hook);
  (*slot)->set(nullptr);
  delete slot;
}

int locdiff_set_gradient(const void* leaf, const void* gradient) {
  return guarded([&] {
    check_leaf(tensor_of(leaf));
    const auto& grad = tensor_of(gradient);
    TORCH_CHECK(!grad.defined() || (grad.sizes() == tensor_of(leaf).sizes() && grad.dtype() == tensor_of(leaf).dtype() &&
                                    grad.device() == tensor_of(leaf).device()),
                "the gradient must have the shape, dtype and device of its leaf");
    tensor_of(leaf).mutable_grad() = grad.defined() ? grad.detach() : at::Tensor();
  });
}
}
