// Tensors in main memory that Rust fills, pinned if a GPU will copy from them.
#include <ATen/ATen.h>
#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "error.h"

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Rows are written in random order: with small pages, almost every row would miss the TLB.
at::Tensor pageable_rows(int64_t rows, int64_t width) {
  const auto options = at::TensorOptions().dtype(at::kHalf).device(at::kCPU);
  size_t bytes = 0;
  const bool fits = !__builtin_mul_overflow(rows, width, &bytes) && !__builtin_mul_overflow(bytes, sizeof(at::Half), &bytes);
  if (!fits || bytes < kHugePageBytes || bytes > SIZE_MAX / 2) return at::empty({rows, width}, options);
  // Mapped separately, because memory from malloc may already be backed by small pages.
  const size_t mapped = bytes + kHugePageBytes;
  void* begin = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw std::bad_alloc();
  // Only advice: if the kernel does not follow it, access is slower but correct.
  madvise(begin, mapped, MADV_HUGEPAGE);
  void* memory = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) & ~(kHugePageBytes - 1));
  return at::from_blob(memory, {rows, width}, [begin, mapped](void*) { munmap(begin, mapped); }, options);
}

// From torch's own allocator.
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

// Whether the tensor is not pinned and no other tensor, view or graph refers to its memory.
int locdiff_is_alone(const void* tensor, int* out) {
  return locdiff::guarded([&] {
    const auto& held = *static_cast<const at::Tensor*>(tensor);
    *out = held.defined() && held.use_count() == 1 && held.has_storage() && held.storage().use_count() == 1 &&
           !held.is_pinned();
  });
}
}
