// Philox4x32-10 on the device. Draws the same numbers as core/src/random/philox.rs, which documents the layout
// of the Philox counter.
//
// NVRTC compiles this file at run time with --fmad=false, so that every operation rounds once, as in Rust. One thread
// computes one block of four elements. The step of a draw is `step`, plus `*counter` if `counter` is not null. The
// counter lies on the device, so that its value can change between the replays of a captured graph.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Words {
  u32 word[4];
};

// The four words of block `column` of a sample.
__device__ inline Words philox(u64 seed, u32 stream, u64 step, u64 sample, u32 column) {
  u32 c0 = column;
  u32 c1 = (u32)sample;
  u32 c2 = (u32)step;
  u32 c3 = stream << 16 | ((u32)(sample >> 32) & 0xff) << 8 | ((u32)(step >> 32) & 0xff);
  u32 k0 = (u32)seed;
  u32 k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 first = (u64)0xD2511F53u * c0;
    const u64 second = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(second >> 32) ^ c1 ^ k0;
    c1 = (u32)second;
    c2 = (u32)(first >> 32) ^ c3 ^ k1;
    c3 = (u32)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

struct Draw {
  u64 seed;
  u32 stream;
  u64 step;
  u64 first_sample;
  u64 samples;
  u64 elements;
};

struct Block {
  Words words;
  u64 first;  // index of the first element in the output
  u32 count;  // number of elements in this block, 0 if the thread has no block
};

__device__ inline Block draw_block(const Draw& draw) {
  Block block;
  const u64 blocks = (draw.elements + 3) / 4;
  const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 row = index / blocks;
  const u64 column = index % blocks;
  block.count = 0;
  if (row >= draw.samples) return block;
  const u64 left = draw.elements - 4 * column;
  block.first = row * draw.elements + 4 * column;
  block.count = left < 4 ? (u32)left : 4;
  block.words = philox(draw.seed, draw.stream, draw.step, draw.first_sample + row, (u32)column);
  return block;
}

__device__ inline float ln_unit(float value) {
  const u32 bits = __float_as_uint(value);
  const float mantissa = __uint_as_float((bits & 0x007fffffu) | 0x3f000000u);
  const bool low = mantissa < 0.70710678118654752440f;
  const float exponent = (float)((int)(bits >> 23) - 126 - (int)low);
  const float x = (low ? mantissa + mantissa : mantissa) - 1.0f;
  const float square = x * x;
  float y = 7.0376836e-2f;
  y = y * x - 1.151461e-1f;
  y = y * x + 1.1676998e-1f;
  y = y * x - 1.2420141e-1f;
  y = y * x + 1.4249323e-1f;
  y = y * x - 1.6668058e-1f;
  y = y * x + 2.0000715e-1f;
  y = y * x - 2.4999994e-1f;
  y = y * x + 3.333333e-1f;
  y = y * x * square;
  y += exponent * -2.1219444e-4f;
  y += square * -0.5f;
  return x + y + exponent * 0.6933594f;
}

__device__ inline void box_muller(u32 radius_bits, u32 angle_bits, float* first, float* second) {
  const float uniform = (float)radius_bits * 0x1p-32f + 0x1p-33f;
  const float radius = sqrtf(-2.0f * ln_unit(uniform));
  const u32 turn = angle_bits >> 8;
  const u32 quarter = (turn + (1u << 21)) >> 22;
  const int rest = (int)turn - (int)(quarter << 22);
  const float angle = (float)rest * (1.57079632679489661923f / (float)(1 << 22));
  const float square = angle * angle;
  const float s = ((square * -1.9515296e-4f + 8.332161e-3f) * square - 1.6666655e-1f) * square * angle + angle;
  const float c =
      ((square * 2.4433157e-5f - 1.3887316e-3f) * square + 4.1666646e-2f) * square * square - square * 0.5f + 1.0f;
  float sine = (quarter & 1) ? c : s;
  float cosine = (quarter & 1) ? s : c;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
  *first = radius * cosine;
  *second = radius * sine;
}

__device__ inline void normals(const Words& words, float* values) {
  box_muller(words.word[0], words.word[1], &values[0], &values[1]);
  box_muller(words.word[2], words.word[3], &values[2], &values[3]);
}

#define DRAW_PARAMETERS                                                                                        \
  u64 seed, u32 stream, const long long *counter, u64 step, u64 first_sample, u64 samples, u64 elements
#define DRAW                                                                                                   \
  Draw { seed, stream, step + (counter ? (u64)*counter : 0), first_sample, samples, elements }

extern "C" __global__ void fill_uniform(float* out, DRAW_PARAMETERS) {
  const Block block = draw_block(DRAW);
  for (u32 i = 0; i < block.count; ++i) out[block.first + i] = (float)(block.words.word[i] >> 8) * 0x1p-24f;
}

extern "C" __global__ void fill_normal(float* out, DRAW_PARAMETERS) {
  const Block block = draw_block(DRAW);
  if (block.count == 0) return;
  float values[4];
  normals(block.words, values);
  for (u32 i = 0; i < block.count; ++i) out[block.first + i] = values[i];
}

extern "C" __global__ void fill_int(long long* out, u32 bound, DRAW_PARAMETERS) {
  const Block block = draw_block(DRAW);
  for (u32 i = 0; i < block.count; ++i) out[block.first + i] = (long long)((u64)block.words.word[i] * bound >> 32);
}

extern "C" __global__ void fill_mask(bool* out, u64 threshold, DRAW_PARAMETERS) {
  const Block block = draw_block(DRAW);
  for (u32 i = 0; i < block.count; ++i) out[block.first + i] = block.words.word[i] < threshold;
}
