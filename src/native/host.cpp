// Tensors in main memory that Rust fills, pinned where a GPU will copy from them.
#include <ATen/ATen.h>

#include "error.h"

extern "C" {

int locdiff_host_rows(int64_t rows, int64_t width, int pinned, void** out) {
  return locdiff::guarded([&] {
    const auto options = at::TensorOptions().dtype(at::kHalf).device(at::kCPU).pinned_memory(pinned != 0);
    *out = new at::Tensor(at::empty({rows, width}, options));
  });
}

// Whether no other tensor, view or graph holds this memory.
int locdiff_is_alone(const void* tensor, int* out) {
  return locdiff::guarded([&] {
    const auto& held = *static_cast<const at::Tensor*>(tensor);
    *out = held.defined() && held.use_count() == 1 && held.has_storage() && held.storage().use_count() == 1;
  });
}
}
