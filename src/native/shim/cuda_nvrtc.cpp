// Compiles CUDA C with NVRTC and launches it on torch's current stream.
//
// NVRTC is loaded on first use, normally through libcaffe2_nvrtc.so. That library is in the folder of libtorch, and its
// run path points to the NVRTC that was installed with torch. If it cannot be loaded, libnvrtc.so.13 or libnvrtc.so is
// loaded instead. The compiled code is loaded and launched with functions of the CUDA runtime (cudaLibraryLoadData,
// cudaLaunchKernel), so that neither the driver library nor a toolkit has to be linked.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <memory>
#include <string>
#include <vector>

#include "error.h"

namespace {

// The functions of nvrtc.h that this file calls. Their signatures have not changed since CUDA 11.
struct Nvrtc {
  using Program = void*;
  int (*version)(int*, int*);
  const char* (*error_string)(int);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(Program, int, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*destroy)(Program*);
};

template <typename Function>
void find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(out != nullptr, "NVRTC has no function ", name);
}

void* open_library() {
  std::string reasons;
  for (const char* name : {"libcaffe2_nvrtc.so", "libnvrtc.so.13", "libnvrtc.so"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    const char* reason = dlerror();
    reasons += std::string("; ") + (reason ? reason : name);
  }
  TORCH_CHECK(false, "cannot load NVRTC, which is installed with torch as nvidia-cuda-nvrtc", reasons);
}

// Loads NVRTC's builtins library. NVRTC does not look for this library in its own folder, but it uses a library of this
// name that is already loaded.
void load_builtins(const Nvrtc& nvrtc) {
  Dl_info info;
  int major = 0, minor = 0;
  if (!dladdr(reinterpret_cast<void*>(nvrtc.compile), &info) || nvrtc.version(&major, &minor) != 0) return;
  const std::string path = info.dli_fname;
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return;
  const std::string builtins =
      path.substr(0, slash) + "/libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  (void)dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = [] {
    void* library = open_library();
    Nvrtc out;
    find(library, "nvrtcVersion", out.version);
    find(library, "nvrtcGetErrorString", out.error_string);
    find(library, "nvrtcCreateProgram", out.create);
    find(library, "nvrtcCompileProgram", out.compile);
    find(library, "nvrtcGetProgramLogSize", out.log_size);
    find(library, "nvrtcGetProgramLog", out.log);
    find(library, "nvrtcGetCUBINSize", out.cubin_size);
    find(library, "nvrtcGetCUBIN", out.cubin);
    find(library, "nvrtcDestroyProgram", out.destroy);
    load_builtins(out);
    return out;
  }();
  return loaded;
}

void check(int result, const char* what) {
  TORCH_CHECK(result == 0, what, ": ", nvrtc().error_string(result));
}

struct Program {
  Nvrtc::Program handle = nullptr;
  Program(const char* source, const char* name) {
    check(nvrtc().create(&handle, source, name, 0, nullptr, nullptr), "nvrtcCreateProgram");
  }
  ~Program() { nvrtc().destroy(&handle); }

  std::string log() const {
    size_t size = 0;
    if (nvrtc().log_size(handle, &size) != 0 || size == 0) return "(NVRTC returned no log)";
    std::string text(size, '\0');
    nvrtc().log(handle, text.data());
    return text.c_str();
  }

  std::string cubin(std::vector<const char*> options, const char* name) {
    const int result = nvrtc().compile(handle, static_cast<int>(options.size()), options.data());
    TORCH_CHECK(result == 0, name, ": ", nvrtc().error_string(result), "\n", log());
    size_t size = 0;
    check(nvrtc().cubin_size(handle, &size), "nvrtcGetCUBINSize");
    std::string code(size, '\0');
    check(nvrtc().cubin(handle, code.data()), "nvrtcGetCUBIN");
    return code;
  }
};

// A compiled module. Modules that Rust has received are never unloaded, because Rust keeps them until the process ends.
struct Module {
  std::string code;
  cudaLibrary_t library = nullptr;
};

const void* entry(void* kernel) { return kernel; }

}  // namespace

extern "C" {

// Compiles `source` for the current device. `options` holds `count` NVRTC options, to which the architecture of the
// device is added.
int locdiff_cuda_module_compile(const char* name, const char* source, const char* const* options, size_t count,
                                void** out) {
  return locdiff::guarded([&] {
    int major = 0, minor = 0;
    const int device = c10::cuda::current_device();
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const std::string architecture = "--gpu-architecture=sm_" + std::to_string(major) + std::to_string(minor);
    std::vector<const char*> all(options, options + count);
    all.push_back(architecture.c_str());
    auto module = std::make_unique<Module>();
    module->code = Program(source, name).cubin(all, name);
    C10_CUDA_CHECK(cudaLibraryLoadData(&module->library, module->code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    *out = module.release();
  });
}

// Finds a kernel by name and writes the size of each parameter in bytes to `sizes`, at most `capacity` sizes. Also
// loads the kernel, because its first launch may be inside a CUDA graph capture, where kernels cannot be loaded.
int locdiff_cuda_module_kernel(void* module, const char* name, void** out, size_t* sizes, size_t capacity,
                               size_t* parameters) {
  return locdiff::guarded([&] {
    cudaKernel_t kernel = nullptr;
    C10_CUDA_CHECK(cudaLibraryGetKernel(&kernel, static_cast<Module*>(module)->library, name));
    cudaFuncAttributes attributes;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, entry(kernel)));
    *parameters = 0;
    size_t offset = 0, size = 0;
    while (*parameters < capacity && cudaFuncGetParamInfo(entry(kernel), *parameters, &offset, &size) == cudaSuccess) {
      sizes[(*parameters)++] = size;
    }
    // The loop normally ends with a query for a parameter that does not exist. Clear the error of that query.
    (void)cudaGetLastError();
    *out = kernel;
  });
}

// Launches a kernel on the current stream. `grid` and `block` hold three numbers each.
int locdiff_cuda_kernel_launch(void* kernel, const unsigned* grid, const unsigned* block, unsigned shared_bytes,
                               void** arguments) {
  return locdiff::guarded([&] {
    C10_CUDA_CHECK(cudaLaunchKernel(entry(kernel), dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                                    arguments, shared_bytes, c10::cuda::getCurrentCUDAStream()));
  });
}

// Writes the address of a tensor's first element to `*out`. The tensor must be on the current CUDA device and, if
// `contiguous` is not 0, contiguous.
int locdiff_cuda_tensor_address(const void* tensor, int contiguous, void** out) {
  return locdiff::guarded([&] {
    const auto& value = *static_cast<const at::Tensor*>(tensor);
    TORCH_CHECK(value.is_cuda() && value.device().index() == c10::cuda::current_device(), "the tensor is on ",
                value.device(), ", wanted cuda:", static_cast<int>(c10::cuda::current_device()));
    TORCH_CHECK(!contiguous || value.is_contiguous(), "the tensor is not contiguous: sizes ", value.sizes(), ", strides ",
                value.strides());
    *out = value.data_ptr();
  });
}
}
