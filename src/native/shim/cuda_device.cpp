// Devices, streams, events and memory statistics.
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "error.h"

namespace {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
namespace allocator = c10::cuda::CUDACachingAllocator;

// Initialises CUDA in torch. Before this call, torch's caching allocator knows no device.
void initialise() { at::globalContext().lazyInitDevice(c10::kCUDA); }

CUDAStream unpack(int64_t id, int device) {
  return CUDAStream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::kCUDA);
}

int64_t aggregate(const c10::CachingAllocator::StatArray& stats, int64_t c10::CachingAllocator::Stat::*field) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].*field;
}

}  // namespace

extern "C" {

int locdiff_cuda_properties(int device, char* name, size_t capacity, uint64_t* memory, int* out) {
  return locdiff::guarded([&] {
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::strncpy(name, properties.name, capacity - 1);
    name[capacity - 1] = '\0';
    *memory = properties.totalGlobalMem;
    out[0] = properties.multiProcessorCount;
    out[1] = properties.major;
    out[2] = properties.minor;
  });
}

int locdiff_cuda_current_device(int* out) {
  return locdiff::guarded([&] { *out = c10::cuda::current_device(); });
}

int locdiff_cuda_set_device(int device) {
  return locdiff::guarded([&] {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
    initialise();
  });
}

int locdiff_cuda_synchronize() {
  return locdiff::guarded([&] { c10::cuda::device_synchronize(); });
}

// Writes four byte counts to `out`: allocated now, allocated at the peak, reserved now, reserved at the peak.
int locdiff_cuda_memory(int device, int64_t* out) {
  return locdiff::guarded([&] {
    initialise();
    using c10::CachingAllocator::Stat;
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    out[0] = aggregate(stats.allocated_bytes, &Stat::current);
    out[1] = aggregate(stats.allocated_bytes, &Stat::peak);
    out[2] = aggregate(stats.reserved_bytes, &Stat::current);
    out[3] = aggregate(stats.reserved_bytes, &Stat::peak);
  });
}

int locdiff_cuda_free_bytes(int device, uint64_t* out) {
  return locdiff::guarded([&] {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    *out = free;
  });
}

int locdiff_cuda_empty_cache() {
  return locdiff::guarded([&] {
    initialise();
    allocator::emptyCache();
  });
}

int locdiff_cuda_stream_from_pool(int device, int high_priority, int64_t* out) {
  return locdiff::guarded([&] {
    initialise();
    *out = c10::cuda::getStreamFromPool(high_priority != 0, static_cast<c10::DeviceIndex>(device)).id();
  });
}

int locdiff_cuda_current_stream(int device, int64_t* out) {
  return locdiff::guarded([&] {
    initialise();
    *out = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).id();
  });
}

int locdiff_cuda_set_stream(int64_t id, int device) {
  return locdiff::guarded([&] { c10::cuda::setCurrentCUDAStream(unpack(id, device)); });
}

int locdiff_cuda_event_new(void** out) {
  return locdiff::guarded([&] { *out = new CUDAEvent(cudaEventDisableTiming); });
}

int locdiff_cuda_event_free(void* event) {
  return locdiff::guarded([&] { delete static_cast<CUDAEvent*>(event); });
}

int locdiff_cuda_event_record(void* event, int64_t id, int device) {
  return locdiff::guarded([&] { static_cast<CUDAEvent*>(event)->record(unpack(id, device)); });
}

// Makes the stream wait for the event. The host does not wait.
int locdiff_cuda_event_block(void* event, int64_t id, int device) {
  return locdiff::guarded([&] { static_cast<CUDAEvent*>(event)->block(unpack(id, device)); });
}

int locdiff_cuda_event_query(const void* event, int* done) {
  return locdiff::guarded([&] { *done = static_cast<const CUDAEvent*>(event)->query(); });
}

int locdiff_cuda_event_synchronize(const void* event) {
  return locdiff::guarded([&] { static_cast<const CUDAEvent*>(event)->synchronize(); });
}
}
