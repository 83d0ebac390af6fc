// Kernels of the sampler. NVRTC compiles this file after philox.cu and quads.cu, with --fmad=false. The values of the
// network are f16 or f32.

// out = sin(product + shift + terms[term_rows]). `product` has `rows` rows of `width` columns, and each of its rows
// adds one row of `terms`. The rows of `out` are `out_stride` elements apart. One thread computes four adjacent columns
// of ROWS rows. If images have one view, these rows mostly share a row of `terms`.
#define ROWS 4
extern "C" __global__ void sine_rows(T* out, u64 out_stride, const T* product, const float* shift,
                                     const float* terms, const int* term_rows, u32 rows, u32 width) {
  const u32 quads = (width + 3) / 4, index = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 first = index / quads * ROWS, column = index % quads * 4;
  if (first >= rows) return;
  const u32 count = min(4u, width - column);
  const Quad shifts = load(shift + column, count);
  Quad values[ROWS];
#pragma unroll
  for (u32 k = 0; k < ROWS; ++k) values[k] = load(product + (u64)min(first + k, rows - 1) * width + column, count);
  Quad term = {};
  int previous = -1;
#pragma unroll
  for (u32 k = 0; k < ROWS; ++k) {
    if (first + k >= rows) return;
    const int term_row = term_rows[first + k];
    if (term_row != previous) term = load(terms + (u64)term_row * width + column, count);
    previous = term_row;
    Quad sines;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sines.at[i] = sine_of(values[k].at[i] + shifts.at[i] + term.at[i]);
    store(out + (u64)(first + k) * out_stride + column, sines, count);
  }
}

// x <- predicted_share * x0 + kept * x + fresh * n, where n is standard normal noise, and
// x0 = conditional + strength * (conditional - unconditional). `bias` is added to both predictions. `unconditional` may
// be null. The result is also written to `narrow_x`, unless `narrow_x` is null. If `kept` or `fresh` is 0, its term is
// left out. One thread computes four adjacent elements, whose noise comes from one Philox block. Each image has
// `per_image` of the `chains` chains, and a seed of its own. The chains of an image are numbered from 0.
extern "C" __global__ void denoise(float* x, T* narrow_x, const T* conditional, const T* unconditional,
                                   const float* bias, float strength, float predicted_share, float kept, float fresh,
                                   const long long* seeds, u64 per_image, u32 stream, u64 step, u64 chains,
                                   u64 elements) {
  const u64 chain = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / ((elements + 3) / 4);
  if (chain >= chains) return;
  const u64 image = chain / per_image;
  // draw_block adds the number of the chain. The difference, modulo 2^64, counts from the image's first chain.
  const Block block = draw_block(Draw{(u64)seeds[image], stream, step, 0 - image * per_image, chains, elements});
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
