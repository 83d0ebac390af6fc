// Four adjacent numbers of a row (a quad), which a thread keeps in registers. NVRTC compiles this file after philox.cu
// and before the kernels that use it.
//
// T is the type of a network's values: bf16, or f16 if F16 is defined, or f32 if F32 is defined. If ALIGNED is defined,
// all widths are multiples of four, and a quad is read and written at once.

typedef unsigned short Bits;  // the bits of a 16-bit number
#ifdef F32
typedef float T;
#else
typedef Bits T;
#endif

// All loops over a quad have constant bounds, so that quads stay in registers. With bounds that the compiler does not
// know, NVRTC 13.0 can put two quads into the same local memory.
struct Quad {
  float at[4];
};

__device__ inline float half_to_float(Bits value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

#ifdef F16
__device__ inline float widen(Bits value) { return half_to_float(value); }
__device__ inline Bits narrow(float value) {
  Bits bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
__device__ inline float widen(Bits value) { return __uint_as_float((u32)value << 16); }
__device__ inline Bits narrow(float value) {
  Bits bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

// Reads the first `count` numbers of a quad. The others are 0.
__device__ inline Quad load(const float* from, u32 count) {
#ifdef ALIGNED
  const float4 all = *(const float4*)from;
  return Quad{{all.x, all.y, all.z, all.w}};
#else
  Quad quad;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) quad.at[i] = i < count ? from[i] : 0.0f;
  return quad;
#endif
}

__device__ inline Quad load(const Bits* from, u32 count) {
#ifdef ALIGNED
  const ushort4 all = *(const ushort4*)from;
  return Quad{{widen(all.x), widen(all.y), widen(all.z), widen(all.w)}};
#else
  Quad quad;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) quad.at[i] = i < count ? widen(from[i]) : 0.0f;
  return quad;
#endif
}

// Writes the first `count` numbers of a quad.
__device__ inline void store(float* to, const Quad& quad, u32 count) {
#ifdef ALIGNED
  *(float4*)to = make_float4(quad.at[0], quad.at[1], quad.at[2], quad.at[3]);
#else
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (i < count) to[i] = quad.at[i];
#endif
}

__device__ inline void store(Bits* to, const Quad& quad, u32 count) {
#ifdef ALIGNED
  *(ushort4*)to = make_ushort4(narrow(quad.at[0]), narrow(quad.at[1]), narrow(quad.at[2]), narrow(quad.at[3]));
#else
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (i < count) to[i] = narrow(quad.at[i]);
#endif
}

#ifdef F32
__device__ inline float sine_of(float x) { return sinf(x); }
__device__ inline float cosine_of(float x) { return cosf(x); }
#else
// Subtracts a multiple of 2 pi. The fast sine is then off by at most 2^-21, much less than the rounding to 16 bits.
__device__ inline float reduced(float x) {
  const float turns = rintf(x * 0.15915494309189535f);
  return __fmaf_rn(turns, 1.7484556e-7f, __fmaf_rn(turns, -6.2831855f, x));
}
__device__ inline float sine_of(float x) { return __sinf(reduced(x)); }
__device__ inline float cosine_of(float x) { return __cosf(reduced(x)); }
#endif
