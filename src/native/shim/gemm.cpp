// Matrix product bf16 x bf16 -> f32 with a gradient. at::mm with out_dtype has no gradient.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "error.h"

namespace {

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cuda() && a.scalar_type() != at::kFloat) return at::mm(a, b, at::kFloat);
  return at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

struct WideMm : torch::autograd::Function<WideMm> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a, const at::Tensor& b) {
    context->save_for_backward({a, b});
    return product(a, b);
  }

  // The incoming gradient is rounded to the dtype of the factors, so that both products of the backward pass run on the
  // tensor cores.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor grad = grads[0].to(saved[0].scalar_type());
    at::Tensor grad_a, grad_b;
    if (context->needs_input_grad(0)) grad_a = grad.mm(saved[1].t());
    if (context->needs_input_grad(1)) grad_b = saved[0].t().mm(grad);
    return {grad_a, grad_b};
  }
};

}  // namespace

extern "C" int locdiff_mm_f32_out(void* out, void* a, void* b) {
  return locdiff::guarded([&] {
    const auto& left = *static_cast<const at::Tensor*>(a);
    const auto& right = *static_cast<const at::Tensor*>(b);
    auto& result = *static_cast<at::Tensor*>(out);
    if (left.is_cuda() && left.scalar_type() != at::kFloat) {
      at::mm_out(result, left, right, at::kFloat);
    } else {
      at::mm_out(result, left.to(at::kFloat), right.to(at::kFloat));
    }
  });
}

extern "C" int locdiff_mm_f32(void* a, void* b, void** out) {
  return locdiff::guarded([&] {
    const auto& left = *static_cast<const at::Tensor*>(a);
    const auto& right = *static_cast<const at::Tensor*>(b);
    TORCH_CHECK(left.scalar_type() == right.scalar_type(), "the factors are ", left.toString(), " and ",
                right.toString(), ", wanted the same type");
    *out = new at::Tensor(WideMm::apply(left, right));
  });
}
