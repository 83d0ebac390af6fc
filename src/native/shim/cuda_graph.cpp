// CUDA graphs, with a complete clean-up after a failed capture.
//
// If a capture was invalidated, at::cuda::CUDAGraph::capture_end throws before it has cleaned up. The allocators would
// then keep calling a filter that points into the graph, the graph's memory pool would never be released, and the
// default generator would stay in capture mode for ever. Graph::abandon therefore does this clean-up.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "error.h"

// This function is declared here instead of including its header, which would include all of cuBLAS and cuSPARSE.
namespace at::cuda {
void clearCublasWorkspaces();
}

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// Runs a part of the clean-up and ignores its errors. The error that caused the clean-up is reported instead.
template <typename Body>
void quietly(Body&& body) {
  try {
    body();
  } catch (...) {
    (void)cudaGetLastError();
  }
}

struct Graph : at::cuda::CUDAGraph {
  // With keep_graph, the graph is not instantiated before end(), so that a discarded capture is never instantiated.
  Graph() : at::cuda::CUDAGraph(/*keep_graph=*/true) {}

  void begin() {
    c10::cuda::device_synchronize();
    try {
      // Clearing the workspaces makes cuBLAS take a new workspace from this graph's memory pool. Only this graph may
      // use that workspace, because graphs that share a workspace could not be replayed concurrently.
      at::cuda::clearCublasWorkspaces();
      capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    } catch (...) {
      abandon();
      throw;
    }
  }

  void end() {
    try {
      capture_end();
      at::cuda::clearCublasWorkspaces();
      instantiate();
    } catch (...) {
      abandon();
      throw;
    }
  }

  // Ends the capture, whatever its state, and releases everything that the capture has allocated or changed.
  void abandon() {
    if (capture_ended_) {
      quietly([&] { reset(); });
      return;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(capture_stream_, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
      cudaGraph_t partial = nullptr;
      (void)cudaStreamEndCapture(capture_stream_, &partial);
      if (partial != nullptr) (void)cudaGraphDestroy(partial);
    }
    (void)cudaGetLastError();
    quietly([&] { at::cuda::clearCublasWorkspaces(); });
    for (auto& entry : captured_generator_states_) {
      entry.first->capturing_ = false;
      entry.first->offset_intragraph_ = 0;
    }
    if (capture_dev_ == UNDEFINED_DEVICE) return;
    quietly([&] { allocator::endAllocateToPool(capture_dev_, mempool_id_); });
    quietly([&] { at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_); });
    quietly([&] { allocator::releasePool(capture_dev_, mempool_id_); });
    quietly([&] { at::getHostAllocator(at::kCUDA)->release_pool(mempool_id_); });
    capture_dev_ = UNDEFINED_DEVICE;
  }

  size_t nodes() {
    size_t count = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(raw_cuda_graph(), nullptr, &count));
    return count;
  }
};

}  // namespace

extern "C" {

int locdiff_cuda_graph_new(void** out) {
  return locdiff::guarded([&] {
    at::globalContext().lazyInitDevice(c10::kCUDA);
    *out = new Graph();
  });
}

int locdiff_cuda_graph_free(void* graph) {
  return locdiff::guarded([&] { delete static_cast<Graph*>(graph); });
}

// Begins a capture on the current stream, which must be a stream from torch's pool.
int locdiff_cuda_graph_begin(void* graph) {
  return locdiff::guarded([&] { static_cast<Graph*>(graph)->begin(); });
}

int locdiff_cuda_graph_end(void* graph, size_t* nodes) {
  return locdiff::guarded([&] {
    static_cast<Graph*>(graph)->end();
    *nodes = static_cast<Graph*>(graph)->nodes();
  });
}

int locdiff_cuda_graph_abandon(void* graph) {
  return locdiff::guarded([&] { static_cast<Graph*>(graph)->abandon(); });
}

int locdiff_cuda_graph_replay(void* graph) {
  return locdiff::guarded([&] { static_cast<Graph*>(graph)->replay(); });
}
}
