// C ABI for the process groups and collectives of c10d; see c10d.h and c10d.rs.
#include "c10d.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef LOCDIFF_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>
#include <limits>
#include <utility>

#include "error.h"

namespace locdiff {
namespace {

// Gloo detects timeouts by itself, and reports a more detailed error than a wait() that times out. Work::wait therefore
// waits this much longer than the timeout, so that Gloo's error comes first.
constexpr milliseconds kGlooGrace{400};
// No message is ever sent with this tag, so a receive that uses it always times out.
constexpr int kAbortTag = std::numeric_limits<int>::max();

c10d::ReduceOp reduce_op(const Group& group, Reduce op) {
  switch (op) {
    case Reduce::Sum:
      return c10d::ReduceOp::SUM;
    case Reduce::Max:
      return c10d::ReduceOp::MAX;
    case Reduce::Mean:
      // Gloo has no mean, so it computes the sum, and Work::finish divides the sum.
      return group.nccl ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  }
  TORCH_CHECK(false, "unknown reduction ", static_cast<int>(op));
}

void check_tensor(const Group& group, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "the tensor is undefined");
  TORCH_CHECK(tensor.is_contiguous(), "the tensor is not contiguous");
  TORCH_CHECK(tensor.device() == group.device, "the tensor is on ", tensor.device(), ", wanted the group's device ",
              group.device);
}

void check_pieces(const Group& group, const at::Tensor& whole, const at::Tensor& piece) {
  check_tensor(group, whole);
  check_tensor(group, piece);
  TORCH_CHECK(whole.scalar_type() == piece.scalar_type(), "the whole tensor and its piece have different dtypes: ",
              whole.scalar_type(), " and ", piece.scalar_type());
  TORCH_CHECK(whole.numel() == piece.numel() * group.size, "the whole has ", whole.numel(), " elements, wanted ", group.size,
              " times ", piece.numel());
}

void check_reduce(const at::Tensor& tensor, Reduce op) {
  TORCH_CHECK(op != Reduce::Mean || tensor.is_floating_point(), "cannot take the mean of ", tensor.scalar_type(), " values");
}

WorkPtr completed_work(const GroupPtr& group, milliseconds timeout) {
  return std::make_unique<Work>(group, nullptr, timeout, nullptr);
}

}  // namespace

namespace {
// Set by the first failure or abort of an NCCL group in this process. From then on, a peer is assumed to be dead, and
// an orderly shutdown would wait for that peer for ever: c10d joins a watchdog thread that never ends, and NCCL's
// finalisation needs the peer.
std::atomic<bool> nccl_failed{false};
}  // namespace

Group::~Group() {
  if (!nccl || !backend) {
    return;
  }
  if (nccl_failed) {
    // The backend is leaked on purpose. The process does not use NCCL again and ends soon.
    (void)backend.release();
    return;
  }
  try {
    backend->shutdown();
  } catch (...) {
    // A destructor cannot report errors.
  }
}

void Group::abort() {
  if (!backend || aborted.exchange(true)) {
    return;
  }
  if (nccl) {
    nccl_failed = true;
    backend->abort();
    return;
  }
  // ProcessGroupGloo inherits an abort() that does nothing. But when an operation times out, Gloo closes every
  // connection of its context. All pending operations then fail, on this rank and on its peers. This function therefore
  // starts an operation that times out.
  try {
    std::vector<at::Tensor> never{at::zeros({1}, at::kByte)};
    c10::intrusive_ptr<c10d::Work> work;
    {
      std::lock_guard<std::mutex> lock(issue);
      work = backend->recv(never, (rank + 1) % size, kAbortTag);
    }
    work->wait(milliseconds(1));
  } catch (const std::exception&) {
    // The operation timed out as intended, or the connections were already closed.
  }
}

std::string Group::describe(const char* operation) const {
  return c10::str(operation, " of group ", name, ", rank ", rank, " of ", size);
}

Work::Work(GroupPtr group, c10::intrusive_ptr<c10d::Work> inner, milliseconds timeout, std::function<void()> finish)
    : group_(std::move(group)),
      inner_(std::move(inner)),
      started_(std::chrono::steady_clock::now()),
      timeout_(timeout),
      finish_(std::move(finish)) {}

void Work::finish() {
  if (finish_) {
    at::NoGradGuard no_grad;
    std::exchange(finish_, nullptr)();
  }
}

milliseconds Work::elapsed() const {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - started_);
}

void Work::wait() {
  if (inner_) {
    // NCCL counts the timeout from the start of the collective. Gloo counts it from this call, so the elapsed time is
    // subtracted. The timeout is at least 1 ms, because 0 would mean no timeout.
    try {
      inner_->wait(std::max(group_->nccl ? timeout_ : timeout_ - elapsed() + kGlooGrace, milliseconds(1)));
    } catch (...) {
      if (group_->nccl) nccl_failed = true;
      throw;
    }
  }
  finish();
}

void Work::wait_stream() {
  if (!group_->nccl) {
    return wait();
  }
  if (inner_) {
    inner_->wait(kNoTimeout);
  }
  finish();
}

WorkPtr start_all_reduce(const GroupPtr& group, at::Tensor tensor, Reduce op, milliseconds timeout) {
  check_tensor(*group, tensor);
  check_reduce(tensor, op);
  if (!group->backend) {
    return completed_work(group, timeout);
  }
  std::vector<at::Tensor> tensors{tensor.detach()};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(*group, op);
  options.timeout = timeout;
  std::function<void()> finish;
  if (op == Reduce::Mean && !group->nccl) {
    finish = [tensor = tensors[0], size = group->size]() { tensor.div_(size); };
  }
  std::lock_guard<std::mutex> lock(group->issue);
  return std::make_unique<Work>(group, group->backend->allreduce(tensors, options), timeout, std::move(finish));
}

WorkPtr start_broadcast(const GroupPtr& group, at::Tensor tensor, int root, milliseconds timeout) {
  check_tensor(*group, tensor);
  TORCH_CHECK(root >= 0 && root < group->size, "the root is rank ", root, ", wanted 0 to ", group->size - 1);
  if (!group->backend) {
    return completed_work(group, timeout);
  }
  std::vector<at::Tensor> tensors{tensor.detach()};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = timeout;
  std::lock_guard<std::mutex> lock(group->issue);
  return std::make_unique<Work>(group, group->backend->broadcast(tensors, options), timeout, nullptr);
}

WorkPtr start_all_gather(const GroupPtr& group, at::Tensor output, at::Tensor input, milliseconds timeout) {
  check_pieces(*group, output, input);
  // Both tensors are flattened, because Gloo cuts the output along its first dimension.
  auto out = output.detach().view({-1});
  auto in = input.detach().view({-1});
  if (!group->backend) {
    out.copy_(in);
    return completed_work(group, timeout);
  }
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  std::lock_guard<std::mutex> lock(group->issue);
  return std::make_unique<Work>(group, group->backend->_allgather_base(out, in, options), timeout, nullptr);
}

WorkPtr start_reduce_scatter(const GroupPtr& group, at::Tensor output, at::Tensor input, Reduce op, milliseconds timeout) {
  check_pieces(*group, input, output);
  check_reduce(input, op);
  auto out = output.detach().view({-1});
  auto in = input.detach().view({-1});
  if (!group->backend) {
    out.copy_(in);
    return completed_work(group, timeout);
  }
  if (group->nccl) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduce_op(*group, op);
    options.timeout = timeout;
    std::lock_guard<std::mutex> lock(group->issue);
    return std::make_unique<Work>(group, group->backend->_reduce_scatter_base(out, in, options), timeout, nullptr);
  }
  // c10d's own reduce-scatter on Gloo is an all-reduce whose wait() ignores the timeout. This function therefore starts
  // an all-reduce of its own, whose wait() respects the timeout.
  std::vector<at::Tensor> tensors{in.clone()};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(*group, op);
  options.timeout = timeout;
  auto finish = [out, whole = tensors[0], op, rank = group->rank, size = group->size]() {
    out.copy_(whole.view({size, -1}).select(0, rank));
    if (op == Reduce::Mean) {
      out.div_(size);
    }
  };
  std::lock_guard<std::mutex> lock(group->issue);
  return std::make_unique<Work>(group, group->backend->allreduce(tensors, options), timeout, std::move(finish));
}

WorkPtr start_barrier(const GroupPtr& group, milliseconds timeout) {
  if (!group->backend) {
    return completed_work(group, timeout);
  }
  if (group->nccl) {
    // c10d's barrier on NCCL synchronises the stream without a timeout. An all-reduce of one element serves as the
    // barrier instead, because it has a timeout.
    return start_all_reduce(group, at::zeros({1}, at::TensorOptions().device(group->device)), Reduce::Sum, timeout);
  }
  c10d::BarrierOptions options;
  options.timeout = timeout;
  std::lock_guard<std::mutex> lock(group->issue);
  return std::make_unique<Work>(group, group->backend->barrier(options), timeout, nullptr);
}

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, const Group& group, const std::string& address,
                                            milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, group.rank, group.size, options);
}

#ifdef LOCDIFF_CUDA
// By default, c10d's watchdog kills the process when a collective fails. With these environment variables, the caller
// that waits for the collective gets an error instead. Variables that are already set keep their value.
void leave_errors_to_the_caller() {
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 0);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", 0);
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const StorePtr& store, const Group& group, milliseconds timeout) {
  static std::once_flag once;
  std::call_once(once, leave_errors_to_the_caller);
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, group.rank, group.size, options);
  backend->setBoundDeviceId(group.device);
  // Connect now. Otherwise the first collective would have to connect within its own timeout.
  backend->eagerConnectSingleDevice(group.device);
  return backend;
}
#endif

GroupPtr new_group(const char* name, size_t name_length, int rank, int size) {
  TORCH_CHECK(size > 0 && rank >= 0 && rank < size, "the rank is ", rank, ", wanted 0 to ", size - 1);
  auto group = c10::make_intrusive<Group>();
  group->name.assign(name, name_length);
  group->rank = rank;
  group->size = size;
  return group;
}

GroupPtr& group_of(void* group) { return *static_cast<GroupPtr*>(group); }
Work& work_of(void* work) { return *static_cast<Work*>(work); }
milliseconds ms(int64_t count) { return milliseconds(count); }

}  // namespace
}  // namespace locdiff

using namespace locdiff;

extern "C" {

int locdiff_group_gloo(void* store, const char* name, size_t name_length, int rank, int size,
                       const char* address, size_t address_length, int64_t timeout_ms, void** out) {
  return guarded([&] {
    auto group = new_group(name, name_length, rank, size);
    if (size > 1) {
      group->backend =
          make_gloo(*static_cast<StorePtr*>(store), *group, std::string(address, address_length), ms(timeout_ms));
    }
    *out = new GroupPtr(std::move(group));
  });
}

#ifdef LOCDIFF_CUDA
int locdiff_group_nccl(void* store, const char* name, size_t name_length, int rank, int size, int device,
                       int64_t timeout_ms, void** out) {
  return guarded([&] {
    auto group = new_group(name, name_length, rank, size);
    group->device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    group->nccl = true;
    if (size > 1) {
      group->backend = make_nccl(*static_cast<StorePtr*>(store), *group, ms(timeout_ms));
    }
    *out = new GroupPtr(std::move(group));
  });
}
#endif

int locdiff_group_abort(void* group) {
  return guarded([&] { group_of(group)->abort(); });
}

void locdiff_group_free(void* group) { delete static_cast<GroupPtr*>(group); }

int locdiff_start_all_reduce(void* group, const void* tensor, int op, int64_t timeout_ms, void** out) {
  return guarded([&] {
    *out = start_all_reduce(group_of(group), tensor_of(tensor), static_cast<Reduce>(op), ms(timeout_ms)).release();
  });
}

int locdiff_start_broadcast(void* group, const void* tensor, int root, int64_t timeout_ms, void** out) {
  return guarded([&] { *out = start_broadcast(group_of(group), tensor_of(tensor), root, ms(timeout_ms)).release(); });
}

int locdiff_start_all_gather(void* group, const void* output, const void* input, int64_t timeout_ms, void** out) {
  return guarded([&] {
    *out = start_all_gather(group_of(group), tensor_of(output), tensor_of(input), ms(timeout_ms)).release();
  });
}

int locdiff_start_reduce_scatter(void* group, const void* output, const void* input, int op, int64_t timeout_ms,
                                 void** out) {
  return guarded([&] {
    *out = start_reduce_scatter(group_of(group), tensor_of(output), tensor_of(input), static_cast<Reduce>(op),
                                ms(timeout_ms))
               .release();
  });
}

int locdiff_start_barrier(void* group, int64_t timeout_ms, void** out) {
  return guarded([&] { *out = start_barrier(group_of(group), ms(timeout_ms)).release(); });
}

int locdiff_work_wait(void* work) {
  return guarded([&] { work_of(work).wait(); });
}

int locdiff_work_wait_stream(void* work) {
  return guarded([&] { work_of(work).wait_stream(); });
}

void locdiff_work_free(void* work) { delete static_cast<Work*>(work); }
}
