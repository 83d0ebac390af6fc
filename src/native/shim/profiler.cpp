// Times operators and GPU kernels with libtorch's own profiler, which is based on Kineto.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdint>
#include <set>
#include <string>

#include "error.h"

namespace {

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// Values of libkineto::ActivityType, repeated here because the header of this type needs other headers of Kineto.
constexpr uint8_t kOperator = 0;
constexpr uint8_t kGpuAnnotation = 2;

}  // namespace

extern "C" {

// Starts the profiler. `cuda` is 1 to record the work of GPUs as well.
int locdiff_profiler_start(int cuda) {
  return locdiff::guarded([&] {
    std::set<ActivityType> activities{ActivityType::CPU};
    if (cuda != 0) activities.insert(ActivityType::CUDA);
    ProfilerConfig config(ProfilerState::KINETO);
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
  });
}

// Stops the profiler. Calls `add` for each operator that ran on the CPU, or, if `cuda` is 1, for each kernel, copy and
// fill that ran on a GPU. The `name` passed to `add` is valid only during that call and has no NUL at its end. `add`
// must not throw.
int locdiff_profiler_stop(int cuda,
                          void (*add)(void* context, const char* name, size_t length, uint64_t thread,
                                      uint64_t start_ns, uint64_t duration_ns),
                          void* context) {
  return locdiff::guarded([&] {
    auto result = torch::autograd::profiler::disableProfiler();
    for (const auto& event : result->events()) {
      bool on_gpu = event.deviceType() == c10::DeviceType::CUDA && event.activityType() != kGpuAnnotation;
      bool on_cpu = event.deviceType() == c10::DeviceType::CPU && event.activityType() == kOperator;
      if (cuda != 0 ? !on_gpu : !on_cpu) continue;
      std::string name = event.name();
      add(context, name.data(), name.size(), event.startThreadId(), event.startNs(), event.durationNs());
    }
  });
}
}
