// Process groups and collectives of c10d, used by the C ABI (c10d.cpp) and by the differentiable collectives
// (autograd.cpp).
//
// A group of one rank has no backend. Its collectives complete at once: they only copy the input to the output, if
// these are different tensors.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/custom_class.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace locdiff {

using milliseconds = std::chrono::milliseconds;

enum class Reduce : int { Sum = 0, Max = 1, Mean = 2 };

struct Group : torch::CustomClassHolder {
  ~Group() override;

  // Makes every pending collective of this group fail. Any thread may call this. The group cannot be used afterwards.
  void abort();
  // A text such as "all_reduce of group data, rank 1 of 4". Errors of the backward pass begin with this text.
  std::string describe(const char* operation) const;

  c10::intrusive_ptr<c10d::Backend> backend;
  std::string name;
  int rank = 0;
  int size = 1;
  bool nccl = false;
  at::Device device = at::kCPU;
  std::atomic<bool> aborted{false};
  // c10d numbers its collectives without a lock, so only one thread at a time may start a collective of this group.
  std::mutex issue;
};

// Rust passes tensors as pointers to at::Tensor.
inline const at::Tensor& tensor_of(const void* tensor) { return *static_cast<const at::Tensor*>(tensor); }

using GroupPtr = c10::intrusive_ptr<Group>;

// A collective that was started. It is safe to destroy this object before the collective has ended, because c10d keeps
// the tensors alive until then.
class Work {
 public:
  Work(GroupPtr group, c10::intrusive_ptr<c10d::Work> inner, milliseconds timeout, std::function<void()> finish);

  // Blocks the host until the result is ready. Throws if the collective fails or its timeout has passed.
  void wait();
  // On NCCL, makes the current stream wait for the result and returns at once. On Gloo, does the same as wait().
  void wait_stream();

 private:
  void finish();
  milliseconds elapsed() const;

  GroupPtr group_;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::chrono::steady_clock::time_point started_;
  milliseconds timeout_;
  std::function<void()> finish_;
};

using WorkPtr = std::unique_ptr<Work>;

WorkPtr start_all_reduce(const GroupPtr& group, at::Tensor tensor, Reduce op, milliseconds timeout);
WorkPtr start_broadcast(const GroupPtr& group, at::Tensor tensor, int root, milliseconds timeout);
// `output` receives the inputs of all ranks, one after the other in the order of ranks.
WorkPtr start_all_gather(const GroupPtr& group, at::Tensor output, at::Tensor input, milliseconds timeout);
// `input` holds one piece per rank, in the order of ranks. `output` receives this rank's piece of the result.
WorkPtr start_reduce_scatter(const GroupPtr& group, at::Tensor output, at::Tensor input, Reduce op, milliseconds timeout);
WorkPtr start_barrier(const GroupPtr& group, milliseconds timeout);

}  // namespace locdiff
