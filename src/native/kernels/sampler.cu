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

// Four adjacent elements. All loops over a quad have constant bounds, so that quads stay in registers: with bounds that
// the compiler does not know, NVRTC 13.0 puts two quads into the same local memory.
struct Quad {
  float at[4];
};

// Reads the first `count` elements of a quad, at once if they fill an aligned quad. The others are 0.
__device__ inline Quad load(const float* from, u32 count) {
  if (count == 4 && (u64)from % 16 == 0) {
    const float4 all = *(const float4*)from;
    return Quad{{all.x, all.y, all.z, all.w}};
  }
  Quad quad;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) quad.at[i] = i < count ? from[i] : 0.0f;
  return quad;
}

// Writes the first `count` elements of a quad, at once if they fill an aligned quad.
__device__ inline void store(float* to, const Quad& quad, u32 count) {
  if (count == 4 && (u64)to % 16 == 0) {
    *(float4*)to = make_float4(quad.at[0], quad.at[1], quad.at[2], quad.at[3]);
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (i < count) to[i] = quad.at[i];
}

#ifdef F16
__device__ inline Quad load(const Value* from, u32 count) {
  if (count == 4 && (u64)from % 8 == 0) {
    const ushort4 all = *(const ushort4*)from;
    return Quad{{widen(all.x), widen(all.y), widen(all.z), widen(all.w)}};
  }
  Quad quad;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) quad.at[i] = i < count ? widen(from[i]) : 0.0f;
  return quad;
}

__device__ inline void store(Value* to, const Quad& quad, u32 count) {
  if (count == 4 && (u64)to % 8 == 0) {
    *(ushort4*)to = make_ushort4(narrow(quad.at[0]), narrow(quad.at[1]), narrow(quad.at[2]), narrow(quad.at[3]));
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (i < count) to[i] = narrow(quad.at[i]);
}
#endif

// out = sin(product + shift + terms[term_rows]). `product` has `rows` rows of `width` columns, and each of its rows adds
// one row of `terms`. The rows of `out` are `out_stride` elements apart. One thread computes four adjacent columns.
extern "C" __global__ void sine_rows(Value* out, u64 out_stride, const Value* product, const float* shift,
                                     const float* terms, const int* term_rows, u64 rows, u32 width) {
  const u32 quads = (width + 3) / 4;
  const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 row = index / quads;
  const u32 column = (u32)(index % quads) * 4;
  if (row >= rows) return;
  const u32 count = min(4u, width - column);
  const Quad values = load(product + row * width + column, count), shifts = load(shift + column, count);
  const Quad term = load(terms + (u64)term_rows[row] * width + column, count);
  Quad sines;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) sines.at[i] = sine(values.at[i] + shifts.at[i] + term.at[i]);
  store(out + row * out_stride + column, sines, count);
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
  const Quad with = load(conditional + block.first, block.count);
  const Quad without = unconditional ? load(unconditional + block.first, block.count) : with;
  const Quad offset = load(bias + block.first % elements, block.count), old = load(x + block.first, block.count);
  float noise[4];
  normals(block.words, noise);
  Quad next;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    float clean = with.at[i] + offset.at[i];
    if (unconditional) clean += (clean - (without.at[i] + offset.at[i])) * strength;
    next.at[i] = clean * predicted_share;
    if (kept != 0.0f) next.at[i] += old.at[i] * kept;
    if (fresh != 0.0f) next.at[i] += noise[i] * fresh;
  }
  store(x + block.first, next, block.count);
  if (narrow_x) store(narrow_x + block.first, next, block.count);
}
