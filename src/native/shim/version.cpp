// Versions of the libraries that are loaded at run time, which may differ from those compiled against.
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "error.h"

#ifdef LOCDIFF_CUDA
#include <cuda_runtime_api.h>
// Declared here, because its header includes all of cuBLAS and cuSPARSE.
namespace torch::cuda::nccl {
std::uint64_t version();
}
#endif

extern "C" {

// libtorch's description of its build, which includes its version. Writes as much as fits, always NUL-terminated.
int locdiff_show_config(char* out, size_t capacity) {
  return locdiff::guarded([&] {
    std::string text = at::show_config();
    size_t count = std::min(text.size(), capacity - 1);
    std::memcpy(out, text.data(), count);
    out[count] = '\0';
  });
}

const char* locdiff_built_against() { return TORCH_VERSION; }

// major * 1000 + minor * 10, or 0 without CUDA.
int locdiff_cuda_version() {
  int version = 0;
#ifdef LOCDIFF_CUDA
  cudaRuntimeGetVersion(&version);
#endif
  return version;
}

// major << 32 | minor << 16 | patch, as libtorch packs it, or 0 without NCCL.
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
