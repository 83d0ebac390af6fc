// Runs one kernel of philox.cu on the host, one thread after another, and writes the kernel's output to standard
// output. Standard input has one line with these fields:
//   kernel seed stream counter step first_sample samples elements extra
// If `counter` is 0, the kernel gets a null pointer instead of a counter.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#define __device__
#define __global__

struct Dimension {
  unsigned x = 0;
};
static Dimension blockIdx, blockDim, threadIdx;

static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

#include "philox.cu"

template <typename Value, typename Kernel>
void run(u64 samples, u64 elements, Kernel kernel) {
  std::vector<char> out(samples * elements * sizeof(Value));
  // As in a real launch, there are a few more threads than needed. Each thread computes a block of four numbers.
  const u64 threads = samples * ((elements + 3) / 4) + 5;
  blockDim.x = 2;
  for (u64 i = 0; i < threads; ++i) {
    blockIdx.x = (unsigned)(i / 2);
    threadIdx.x = (unsigned)(i % 2);
    kernel(reinterpret_cast<Value*>(out.data()));
  }
  std::fwrite(out.data(), 1, out.size(), stdout);
}

int main() {
  std::string name;
  u64 seed, step, first, samples, elements, extra;
  u32 stream;
  long long value;
  if (!(std::cin >> name >> seed >> stream >> value >> step >> first >> samples >> elements >> extra)) return 1;
  const long long* counter = value == 0 ? nullptr : &value;
#define REST seed, stream, counter, step, first, samples, elements
  if (name == "fill_uniform") run<float>(samples, elements, [&](float* out) { fill_uniform(out, REST); });
  if (name == "fill_normal") run<float>(samples, elements, [&](float* out) { fill_normal(out, REST); });
  if (name == "fill_int") run<long long>(samples, elements, [&](long long* out) { fill_int(out, (u32)extra, REST); });
  if (name == "fill_mask") run<bool>(samples, elements, [&](bool* out) { fill_mask(out, extra, REST); });
}
