// Versions of what is loaded at run time, which need not be what was compiled against.
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <cstring>
#include <string>

#ifdef LOCDIFF_CUDA
#include <cuda_runtime_api.h>
// Declared here: its header draws in all of cuBLAS and cuSPARSE.
namespace torch::cuda::nccl {
std::uint64_t version();
}
#endif

namespace {
// Copies as much as fits, always terminated; returns the length of the whole.
size_t copy_out(const std::string& text, char* out, size_t capacity) {
  if (capacity > 0) {
    size_t n = text.size() < capacity - 1 ? text.size() : capacity - 1;
    std::memcpy(out, text.data(), n);
    out[n] = '\0';
  }
  return text.size();
}
}  // namespace

extern "C" {

// libtorch's own description of its build, which names its version.
size_t locdiff_show_config(char* out, size_t capacity) {
  try {
    return copy_out(at::show_config(), out, capacity);
  } catch (...) {
    return copy_out("", out, capacity);
  }
}

const char* locdiff_built_against() { return TORCH_VERSION; }

// As major * 1000 + minor * 10, 0 without CUDA.
int locdiff_cuda_version() {
  int version = 0;
#ifdef LOCDIFF_CUDA
  cudaRuntimeGetVersion(&version);
#endif
  return version;
}

// major << 32 | minor << 16 | patch, as libtorch packs it; 0 without NCCL.
uint64_t locdiff_nccl_version() {
#ifdef LOCDIFF_CUDA
  try {
    return torch::cuda::nccl::version();
  } catch (...) {
  }
#endif
  return 0;
}
}
