// Tensors in main memory that Rust fills. They can be pinned, so that a GPU can copy from them asynchronously.
#include <ATen/ATen.h>
#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "error.h"

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Allocates large tensors in huge pages. Rows are written in random order, and with small pages almost every row would
// miss the TLB.
at::Tensor pageable_rows(int64_t rows, int64_t width) {
  const auto options = at::TensorOptions().dtype(at::kHalf).device(at::kCPU);
  size_t bytes = 0;
  const bool fits = !__builtin_mul_overflow(rows, width, &bytes) && !__builtin_mul_overflow(bytes, sizeof(at::Half), &bytes);
  if (!fits || bytes < kHugePageBytes || bytes > SIZE_MAX / 2) return at::empty({rows, width}, options);
  // The memory is mapped here, because memory from malloc may already consist of small pages.
  const size_t mapped = bytes + kHugePageBytes;
  void* begin = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw std::bad_alloc();
  // If Linux does not follow this advice, access is slower but correct.
  madvise(begin, mapped, MADV_HUGEPAGE);
  void* memory = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) & ~(kHugePageBytes - 1));
  return at::from_blob(memory, {rows, width}, [begin, mapped](void*) { munmap(begin, mapped); }, options);
}

// Allocates pinned memory with torch's own allocator.
at::Tensor pinned_rows(int64_t rows, int64_t width) {
  return at::empty({rows, width}, at::TensorOptions().dtype(at::kHalf).device(at::kCPU).pinned_memory(true));
}

}  // namespace

extern "C" {

int locdiff_host_rows(int64_t rows, int64_t width, int pinned, void** out) {
  return locdiff::guarded([&] {
    *out = new at::Tensor(pinned != 0 ? pinned_rows(rows, width) : pageable_rows(rows, width));
  });
}

// Sets `*out` to 1 if the tensor is not pinned and no other tensor, view or autograd graph refers to its memory, else
// to 0.
int locdiff_is_alone(const void* tensor, int* out) {
  return locdiff::guarded([&] {
    const auto& held = *static_cast<const at::Tensor*>(tensor);
    *out = held.defined() && held.use_count() == 1 && held.has_storage() && held.storage().use_count() == 1 &&
           !held.is_pinned();
  });
}

// Copies `from` into `to`. If one of them is pinned and the other is on a GPU, the host does not wait.
int locdiff_copy_async(void* to, const void* from) {
  return locdiff::guarded([&] {
    static_cast<at::Tensor*>(to)->copy_(*static_cast<const at::Tensor*>(from), /*non_blocking=*/true);
  });
}
}
