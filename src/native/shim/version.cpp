// Versions of the libraries that this process has loaded. They may differ from the versions that the shim was compiled
// with.
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "error.h"

#ifdef LOCDIFF_CUDA
#include <cuda_runtime_api.h>
// This function is declared here to avoid its header, which includes all of cuBLAS and cuSPARSE.
namespace torch::cuda::nccl {
std::uint64_t version();
}
#endif

extern "C" {

// Writes libtorch's description of its build, which contains its version, to `out`. Writes as much as fits into
// `capacity` bytes, including a NUL at the end.
int locdiff_show_config(char* out, size_t capacity) {
  return locdiff::guarded([&] {
    std::string text = at::show_config();
    size_t count = std::min(text.size(), capacity - 1);
    std::memcpy(out, text.data(), count);
    out[count] = '\0';
  });
}

const char* locdiff_built_against() { return TORCH_VERSION; }

// Version of the CUDA runtime as major * 1000 + minor * 10. 0 in the CPU variant, or if the runtime does not report its
// version.
int locdiff_cuda_version() {
  int version = 0;
#ifdef LOCDIFF_CUDA
  cudaRuntimeGetVersion(&version);
#endif
  return version;
}

// The version of NCCL, encoded as in libtorch: major << 32 | minor << 16 | patch. 0 in the CPU variant, or if NCCL does
// not report its version.
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
