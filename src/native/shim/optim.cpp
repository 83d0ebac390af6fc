// Operations of ATen that tch does not offer: operations on lists of tensors, such as fused AdamW.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "error.h"

namespace {

std::vector<at::Tensor> list(void* const* tensors, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; ++i) out.push_back(*static_cast<const at::Tensor*>(tensors[i]));
  return out;
}

std::optional<at::Tensor> optional(void* tensor) {
  if (tensor == nullptr) return std::nullopt;
  return *static_cast<const at::Tensor*>(tensor);
}

// A fused kernel reads a parameter, its gradient and its two moments in memory order. Not every backend checks that
// their layouts match, so this function does.
void check_alike(size_t index, const char* name, const at::Tensor& param, const at::Tensor& other) {
  TORCH_CHECK(param.sizes() == other.sizes() && param.strides() == other.strides() &&
                  param.scalar_type() == other.scalar_type() && param.device() == other.device(),
              name, " ", index, " is ", other.toString(), other.sizes(), " with strides ", other.strides(),
              ", but its parameter is ", param.toString(), param.sizes(), " with strides ", param.strides());
  TORCH_CHECK(param.is_non_overlapping_and_dense(), "parameter ", index, " is not dense");
}

}  // namespace

extern "C" {

// Makes one AdamW update on the device and adds 1 to `step`, which is one f32 for the whole list. If `found_inf` is 1,
// leaves parameters, moments and `step` as they were. If `grad_scale` is not null, divides the gradients by
// `grad_scale` and stores the quotients in `grads`.
int locdiff_fused_adamw(size_t count, void* const* params, void* const* grads, void* const* exp_avgs,
                        void* const* exp_avg_sqs, void* step, void* lr, double beta1, double beta2, double eps,
                        double weight_decay, void* grad_scale, void* found_inf) {
  return locdiff::guarded([&] {
    c10::NoGradGuard no_grad;
    auto p = list(params, count), g = list(grads, count), m = list(exp_avgs, count), v = list(exp_avg_sqs, count);
    for (size_t i = 0; i < count; ++i) {
      check_alike(i, "gradient", p[i], g[i]);
      check_alike(i, "first moment", p[i], m[i]);
      check_alike(i, "second moment", p[i], v[i]);
    }
    at::Tensor& steps = *static_cast<at::Tensor*>(step);
    const at::Tensor& rate = *static_cast<const at::Tensor*>(lr);
    TORCH_CHECK(steps.scalar_type() == at::kFloat && steps.numel() == 1, "the step must be one f32");
    TORCH_CHECK(rate.scalar_type() == at::kFloat && rate.numel() == 1, "the learning rate must be one f32");
    const auto skip = optional(found_inf);
    steps.add_(1);
    // The kernels only read the step, so all parameters can share one tensor.
    const std::vector<at::Tensor> all_steps(count, steps);
    try {
      at::_fused_adamw_(p, g, m, v, {}, all_steps, rate, beta1, beta2, weight_decay, eps, /*amsgrad=*/false,
                        /*maximize=*/false, optional(grad_scale), skip);
    } catch (...) {
      steps.sub_(1);
      throw;
    }
    if (skip) steps.sub_(*skip);
  });
}

// Writes the sum of the squares of all elements of all tensors to `*out`, as one f32 (f64 if all tensors are f64).
int locdiff_squared_norm(size_t count, void* const* tensors, void** out) {
  return locdiff::guarded([&] {
    c10::NoGradGuard no_grad;
    const auto all = list(tensors, count);
    TORCH_CHECK(count > 0, "the list of tensors is empty");
    bool wide = true;
    for (const auto& tensor : all) wide = wide && tensor.scalar_type() == at::kDouble;
    if (all[0].is_cpu()) {
      // A dot product has many partial sums, so it is both faster and more exact than a norm, whose sum is sequential.
      double sum = 0;
      for (const auto& tensor : all) {
        const auto flat = (wide ? tensor : tensor.to(at::kFloat)).reshape({-1});
        sum += at::dot(flat, flat).item<double>();
      }
      *out = new at::Tensor(at::scalar_tensor(sum, at::TensorOptions(wide ? at::kDouble : at::kFloat)));
      return;
    }
    const auto kind = wide ? at::kDouble : at::kFloat;
    const auto squared = at::stack(at::_foreach_norm(all, 2, kind)).to(at::kDouble).square().sum();
    *out = new at::Tensor(squared.to(wide ? at::kDouble : at::kFloat));
  });
}

// averages += (values - averages) * weight. The weight is one number on the device. ATen's function for lists is not
// used, because it needs a weight for every element or a weight that the host knows.
int locdiff_list_lerp(size_t count, void* const* averages, void* const* values, void* weight) {
  return locdiff::guarded([&] {
    c10::NoGradGuard no_grad;
    const at::Tensor& share = *static_cast<const at::Tensor*>(weight);
    TORCH_CHECK(share.numel() == 1, "the weight must be one number");
    const auto all = list(averages, count), ends = list(values, count);
    for (size_t i = 0; i < count; ++i) all[i].lerp_(ends[i], share);
  });
}
}
