// Kernels of the sampler. NVRTC compiles this file behind philox.cu, with --fmad=false. With the macro F16, the values of
// the network are f16, otherwise f32.

#ifdef F16
typedef unsigned short Value;  // the bits of an f16 number

__device__ inline float widen(Value value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

__device__ inline Value narrow(float value) {
  Value bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The angle is first reduced to -π to π. There, __sinf is off by at most 2^-21, much less than the rounding to f16.
__device__ inline float sine(float angle) {
  const float turns = rintf(angle * 0.15915494309189535f);
  const float rest = __fmaf_rn(turns, -6.28125f, angle);
  return __sinf(__fmaf_rn(turns, -1.9353071795864769e-3f, rest));
}
#else
typedef float Value;

__device__ inline float widen(Value value) { return value; }
__device__ inline Value narrow(float value) { return value; }
__device__ inline float sine(float angle) { return sinf(angle); }
#endif

// Adjacent elements that one thread loads and stores at once.
template <typename Element, int COUNT>
struct alignas(COUNT * sizeof(Element)) Pack {
  Element element[COUNT];
};

// Reads `count` elements, at once if they fill an aligned pack.
template <int COUNT, typename Element>
__device__ inline Pack<Element, COUNT> read(const Element* at, u32 count) {
  Pack<Element, COUNT> pack;
  if (count == COUNT && (u64)at % sizeof(pack) == 0) return *reinterpret_cast<const Pack<Element, COUNT>*>(at);
  for (u32 i = 0; i < count; ++i) pack.element[i] = at[i];
  return pack;
}

// Writes the first `count` elements of a pack, at once if they fill an aligned pack.
template <int COUNT, typename Element>
__device__ inline void write(Element* at, const Pack<Element, COUNT>& pack, u32 count) {
  if (count == COUNT && (u64)at % sizeof(pack) == 0) {
    *reinterpret_cast<Pack<Element, COUNT>*>(at) = pack;
  } else {
    for (u32 i = 0; i < count; ++i) at[i] = pack.element[i];
  }
}

// out = sin(product + shift + terms[term_rows]). `product` has `rows` rows of `width` columns, and each of its rows adds
// one row of `terms`. The rows of `out` are `out_stride` elements apart. One thread computes eight adjacent columns.
extern "C" __global__ void sine_rows(Value* out, u64 out_stride, const Value* product, const float* shift,
                                     const float* terms, const int* term_rows, u64 rows, u32 width) {
  const u32 packs = (width + 7) / 8;
  const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 row = index / packs;
  const u32 column = (u32)(index % packs) * 8;
  if (row >= rows) return;
  const u32 count = min(8, width - column);
  const Pack<Value, 8> values = read<8>(product + row * width + column, count);
  const Pack<float, 8> shifts = read<8>(shift + column, count);
  const Pack<float, 8> term = read<8>(terms + (u64)term_rows[row] * width + column, count);
  Pack<Value, 8> sines;
  for (int i = 0; i < 8; ++i) sines.element[i] = narrow(sine(widen(values.element[i]) + shifts.element[i] + term.element[i]));
  write(out + row * out_stride + column, sines, count);
}

// x <- predicted_share * x0 + kept * x + fresh * n, where n is standard normal noise, and
// x0 = conditional + strength * (conditional - unconditional). `bias` is added to both predictions. `unconditional` may
// be null. The result is also written to `narrow_x`, unless `narrow_x` is null. If `kept` or `fresh` is 0, its term is
// left out. One thread computes four adjacent elements, the block of Philox that draws their noise.
extern "C" __global__ void denoise(float* x, Value* narrow_x, const Value* conditional, const Value* unconditional,
                                   const float* bias, float strength, float predicted_share, float kept, float fresh,
                                   u64 seed, u32 stream, u64 step, const long long* first_sample, u64 samples,
                                   u64 elements) {
  const Block block = draw_block(Draw{seed, stream, step, (u64)*first_sample, samples, elements});
  if (block.count == 0) return;
  const Pack<Value, 4> with = read<4>(conditional + block.first, block.count);
  const Pack<float, 4> offset = read<4>(bias + block.first % elements, block.count);
  Pack<Value, 4> without, rounded;
  Pack<float, 4> noised = read<4>(x + block.first, block.count);
  if (unconditional) without = read<4>(unconditional + block.first, block.count);
  float noise[4];
  if (fresh != 0.0f) {
    normals(block.words, noise);
  }
  for (int i = 0; i < 4; ++i) {
    float clean = widen(with.element[i]) + offset.element[i];
    if (unconditional) clean += (clean - (widen(without.element[i]) + offset.element[i])) * strength;
    float next = clean * predicted_share;
    if (kept != 0.0f) next += noised.element[i] * kept;
    if (fresh != 0.0f) next += noise[i] * fresh;
    noised.element[i] = next;
    rounded.element[i] = narrow(next);
  }
  write(x + block.first, noised, block.count);
  if (narrow_x) write(narrow_x + block.first, rounded, block.count);
}
