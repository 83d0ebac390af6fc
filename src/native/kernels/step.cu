// The elementwise work of a training step without autograd: everything between the matrix products of the network, the
// gradients of the losses, and the update of the weights. This file is compiled after philox.cu and quads.cu.
//
// T is the type of activations and of rounded weights: bf16 or f32. Sums are computed in f32 and always in the same
// order. A thread processes four adjacent columns.
//
// The rows of a micro-batch are sorted by timestep. Row r has timestep `timestep[r]`, and it is row `order[r]` of this
// rank's slice, which begins at sample `first_sample` of the global batch.
//
// Letters: d dimensions of a code, h hidden width of a module, t timesteps.

// A block that sums over rows has LANES x blockDim.y threads, which read LANES quads of each of blockDim.y rows at a
// time. blockDim.y is at most GROUPS_MAX.
#define LANES 32
#define GROUPS_MAX 32
// Rows that one block of `cosine` sums.
#define ROWS_PER_SUM 64

// Position of a thread that processes one quad of a matrix. `count` is 0 if the thread has no quad.
struct Place {
  u32 row, column, count;
};

__device__ inline Place place(u32 rows, u32 width) {
  const u32 quads = (width + 3) / 4, index = blockIdx.x * blockDim.x + threadIdx.x;
  Place found = {index / quads, 4 * (index % quads), 0};
  if (found.row < rows) found.count = min(4u, width - found.column);
  return found;
}

// Position of a thread in a block that sums over rows.
__device__ inline Place place_in_columns(u32 width) {
  const u32 column = 4 * (blockIdx.x * LANES + threadIdx.x);
  return {threadIdx.y, column, column < width ? min(4u, width - column) : 0};
}

// Adds up the quads of all threads of a column, in a fixed order. The result is valid in the threads of group 0.
__device__ inline Quad sum_groups(const Quad& own) {
  __shared__ Quad all[GROUPS_MAX][LANES];
  __syncthreads();
  all[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  Quad sum = all[0][threadIdx.x];
  for (u32 group = 1; group < blockDim.y; ++group)
    for (u32 i = 0; i < 4; ++i) sum.at[i] += all[group][threadIdx.x].at[i];
  return sum;
}

// Adds up the values of all threads of a one-dimensional block, in a fixed order. Every thread gets the sum.
template <typename Number>
__device__ inline Number sum_block(Number value) {
  __shared__ Number warps[32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  Number sum = 0;
  for (u32 warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
  return sum;
}

__device__ inline float max_block(float value) {
  __shared__ float warps[32];
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float most = warps[0];
  for (u32 warp = 1; warp < blockDim.x / 32; ++warp) most = fmaxf(most, warps[warp]);
  return most;
}

// Draws noise, and writes the noised codes and the rounded true codes.
extern "C" __global__ void noised(T* noised_bd, T* rounded_bd, const float* truth_bd, const int* timestep,
                                  const int* order, const float* signal, const float* noise, u64 seed, u32 stream,
                                  const long long* step, u64 first_sample, u32 rows, u32 dims) {
  const Place at = place(rows, dims);
  if (at.count == 0) return;
  const int t = timestep[at.row];
  const u64 sample = first_sample + (u64)order[at.row];
  float normal[4];
  normals(philox(seed, stream, (u64)*step, sample, at.column / 4), normal);
  const size_t index = (size_t)at.row * dims + at.column;
  const Quad truth = load(truth_bd + index, at.count);
  Quad out;
  for (u32 i = 0; i < 4; ++i) out.at[i] = signal[t] * truth.at[i] + noise[t] * normal[i];
  store(noised_bd + index, out, at.count);
  store(rounded_bd + index, truth, at.count);
}

// Standardises the embeddings. Zeros replace the embedding of a row if its random word is not below `threshold`.
extern "C" __global__ void standardise(T* out_be, const Bits* image_be, const float* mean,
                                       const float* deviation, const int* order, u64 threshold, u64 seed, u32 stream,
                                       const long long* step, u64 first_sample, u32 rows, u32 width) {
  const Place at = place(rows, width);
  if (at.count == 0) return;
  const int from = order[at.row];
  const bool kept =
      threshold > 0xffffffffull || philox(seed, stream, (u64)*step, first_sample + (u64)from, 0).word[0] < threshold;
  Quad out;
  for (u32 i = 0; i < 4; ++i) {
    const u32 column = at.column + (i < at.count ? i : 0);
    const float value = half_to_float(image_be[(size_t)from * width + column]);
    out.at[i] = kept ? (value - mean[column]) / deviation[column] : 0.0f;
  }
  store(out_be + (size_t)at.row * width + at.column, out, at.count);
}

// hidden = x (1 + scale_t) + shift_t + image. A row of `table` holds the scales of a timestep and then its shifts.
extern "C" __global__ void modulate(T* hidden_bh, const T* x_bh, const T* image, u32 image_stride, const T* table,
                                    const int* timestep, u32 rows, u32 width) {
  const Place at = place(rows, width);
  if (at.count == 0) return;
  const T* row = table + (size_t)timestep[at.row] * 2 * width + at.column;
  const size_t index = (size_t)at.row * width + at.column;
  const Quad x = load(x_bh + index, at.count), scale = load(row, at.count), shift = load(row + width, at.count);
  const Quad condition = load(image + (size_t)at.row * image_stride + at.column, at.count);
  Quad out;
  for (u32 i = 0; i < 4; ++i) out.at[i] = x.at[i] * (1.0f + scale.at[i]) + shift.at[i] + condition.at[i];
  store(hidden_bh + index, out, at.count);
}

// The factors of dropout for one quad: 0 or `factor`.
#define DROPOUT u64 threshold, float factor, u64 seed, u32 stream, const long long *step, u64 first_sample, const int *order
__device__ inline Quad kept(u32 row, u32 column, DROPOUT) {
  Quad out = {{1.0f, 1.0f, 1.0f, 1.0f}};
  if (threshold > 0xffffffffull) return out;
  const Words words = philox(seed, stream, (u64)*step, first_sample + (u64)order[row], column / 4);
  for (u32 i = 0; i < 4; ++i) out.at[i] = words.word[i] < threshold ? factor : 0.0f;
  return out;
}
#define KEPT(row, column) kept(row, column, threshold, factor, seed, stream, step, first_sample, order)

// out = dropout(sin(z + bias)), where `out` has a stride of its own. The argument of the sine is f32, because it can be
// large, and rounding it would be the largest error of a module.
extern "C" __global__ void sine(T* out, u32 out_stride, const float* z_bo, const T* bias, DROPOUT, u32 rows, u32 width) {
  const Place at = place(rows, width);
  if (at.count == 0) return;
  const Quad z = load(z_bo + (size_t)at.row * width + at.column, at.count), mask = KEPT(at.row, at.column);
  const Quad added = load(bias + at.column, at.count);
  Quad value;
  for (u32 i = 0; i < 4; ++i) value.at[i] = sine_of(z.at[i] + added.at[i]) * mask.at[i];
  store(out + (size_t)at.row * out_stride + at.column, value, at.count);
}

// The backward pass of `sine`. Also adds up each group of ROWS_PER_SUM rows of the result into one row of `sums`.
extern "C" __global__ void cosine(T* dz_bo, float* sums, u32 sums_stride, const T* dout, u32 dout_stride,
                                  const float* z_bo, const T* bias, DROPOUT, u32 rows, u32 width) {
  const Place at = place_in_columns(width);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  const u32 first = blockIdx.y * ROWS_PER_SUM, end = min(rows, first + ROWS_PER_SUM);
  if (at.count > 0) {
    const Quad added = load(bias + at.column, at.count);
#pragma unroll 4
    for (u32 row = first + at.row; row < end; row += blockDim.y) {
      const Quad z = load(z_bo + (size_t)row * width + at.column, at.count);
      const Quad gradient = load(dout + (size_t)row * dout_stride + at.column, at.count);
      const Quad mask = KEPT(row, at.column);
      Quad value;
      for (u32 i = 0; i < 4; ++i) {
        value.at[i] = gradient.at[i] * mask.at[i] * cosine_of(z.at[i] + added.at[i]);
        sum.at[i] += value.at[i];
      }
      store(dz_bo + (size_t)row * width + at.column, value, at.count);
    }
  }
  sum = sum_groups(sum);
  if (threadIdx.y == 0 && at.count > 0) store(sums + (size_t)blockIdx.y * sums_stride + at.column, sum, at.count);
}

// Adds up the rows of a matrix.
extern "C" __global__ void column_sums(T* out, const float* rows_w, u32 rows, u32 width) {
  const Place at = place_in_columns(width);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 5
  for (u32 row = at.row; row < (at.count > 0 ? rows : 0); row += blockDim.y) {
    const Quad value = load(rows_w + (size_t)row * width + at.column, at.count);
    for (u32 i = 0; i < 4; ++i) sum.at[i] += value.at[i];
  }
  sum = sum_groups(sum);
  if (threadIdx.y == 0 && at.count > 0) store(out + at.column, sum, at.count);
}

// Adds up each group of ROWS_PER_SUM rows of a matrix into one row of `sums`.
extern "C" __global__ void row_group_sums(float* sums, const T* rows_w, u32 rows, u32 width) {
  const Place at = place_in_columns(width);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  const u32 first = blockIdx.y * ROWS_PER_SUM, end = min(rows, first + ROWS_PER_SUM);
  if (at.count > 0) {
#pragma unroll 4
    for (u32 row = first + at.row; row < end; row += blockDim.y) {
      const Quad value = load(rows_w + (size_t)row * width + at.column, at.count);
      for (u32 i = 0; i < 4; ++i) sum.at[i] += value.at[i];
    }
  }
  sum = sum_groups(sum);
  if (threadIdx.y == 0 && at.count > 0) store(sums + (size_t)blockIdx.y * width + at.column, sum, at.count);
}

// The backward pass of `modulate` for the rows of one timestep, which are rows segments[t] to segments[t + 1] - 1.
// Writes the gradient of x. Writes the gradient of the table twice: rounded to T, and in f32.
extern "C" __global__ void modulate_backward(T* dx_bh, T* dtable, float* dtable_wide, const T* dhidden,
                                             u32 dhidden_stride, const T* x_bh, const T* table, const int* segments,
                                             u32 width) {
  const Place at = place_in_columns(width);
  const u32 t = blockIdx.y, end = segments[t + 1];
  const size_t row_of_table = (size_t)t * 2 * width + at.column;
  Quad of_scale = {{0.0f, 0.0f, 0.0f, 0.0f}}, of_shift = of_scale;
  if (at.count > 0) {
    const Quad scale = load(table + row_of_table, at.count);
#pragma unroll 2
    for (u32 row = segments[t] + at.row; row < end; row += blockDim.y) {
      const size_t index = (size_t)row * width + at.column;
      const Quad gradient = load(dhidden + (size_t)row * dhidden_stride + at.column, at.count);
      const Quad x = load(x_bh + index, at.count);
      Quad out;
      for (u32 i = 0; i < 4; ++i) {
        out.at[i] = gradient.at[i] * (1.0f + scale.at[i]);
        of_scale.at[i] += gradient.at[i] * x.at[i];
        of_shift.at[i] += gradient.at[i];
      }
      store(dx_bh + index, out, at.count);
    }
  }
  of_scale = sum_groups(of_scale);
  of_shift = sum_groups(of_shift);
  if (threadIdx.y != 0 || at.count == 0) return;
  store(dtable + row_of_table, of_scale, at.count);
  store(dtable + row_of_table + width, of_shift, at.count);
  store(dtable_wide + row_of_table, of_scale, at.count);
  store(dtable_wide + row_of_table + width, of_shift, at.count);
}

// Computes bias gradients of one module from the gradient of its table: for the second time layer, the image layer and
// the layer x. The bias gradient of the layer x is the sum over t of (1 + scale_t) times the gradient of shift_t.
extern "C" __global__ void table_biases(T* of_time, T* of_image, T* of_x, const float* dtable_wide, const T* table,
                                        u32 timesteps, u32 width) {
  const Place at = place_in_columns(width);
  Quad of_scale = {{0.0f, 0.0f, 0.0f, 0.0f}}, of_shift = of_scale, scaled = of_scale;
#pragma unroll 5
  for (u32 t = at.row; t < (at.count > 0 ? timesteps : 0); t += blockDim.y) {
    const size_t index = (size_t)t * 2 * width + at.column;
    const Quad scale = load(table + index, at.count), first = load(dtable_wide + index, at.count);
    const Quad second = load(dtable_wide + index + width, at.count);
    for (u32 i = 0; i < 4; ++i) {
      of_scale.at[i] += first.at[i];
      of_shift.at[i] += second.at[i];
      scaled.at[i] += second.at[i] * (1.0f + scale.at[i]);
    }
  }
  of_scale = sum_groups(of_scale);
  of_shift = sum_groups(of_shift);
  scaled = sum_groups(scaled);
  if (threadIdx.y != 0 || at.count == 0) return;
  store(of_time + at.column, of_scale, at.count);
  store(of_time + width + at.column, of_shift, at.count);
  store(of_image + at.column, of_shift, at.count);
  store(of_x + at.column, scaled, at.count);
}

extern "C" __global__ void silu(T* out, const T* z, u32 rows, u32 width) {
  const Place at = place(rows, width);
  if (at.count == 0) return;
  const size_t index = (size_t)at.row * width + at.column;
  Quad value = load(z + index, at.count);
  for (u32 i = 0; i < 4; ++i) value.at[i] /= 1.0f + expf(-value.at[i]);
  store(out + index, value, at.count);
}

// The backward pass of `silu`, with the bias gradient of the layer before it.
extern "C" __global__ void silu_backward(T* dz, T* bias, const float* dout, const T* z, u32 rows, u32 width) {
  const Place at = place_in_columns(width);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 5
  for (u32 row = at.row; row < (at.count > 0 ? rows : 0); row += blockDim.y) {
    const size_t index = (size_t)row * width + at.column;
    const Quad x = load(z + index, at.count);
    Quad value = load(dout + index, at.count);
    for (u32 i = 0; i < 4; ++i) {
      const float share = 1.0f / (1.0f + expf(-x.at[i]));
      value.at[i] *= share * (1.0f + x.at[i] * (1.0f - share));
      sum.at[i] += value.at[i];
    }
    store(dz + index, value, at.count);
  }
  sum = sum_groups(sum);
  if (threadIdx.y == 0 && at.count > 0) store(bias + at.column, sum, at.count);
}

// Kinds of numbers that are kept for each row.
enum { KL, L2, L1, COSINE, LARGEST, STATISTICS };

// For each row, the squared, absolute and cosine distances of the prediction to the scaled truth, and the gradient of
// their sum with the given weights. One block per row.
extern "C" __global__ void distances(T* gradient_bd, float* statistics, const T* predicted_bd, const float* truth_bd,
                                     float code_scale, float l2_weight, float l1_weight, float cosine_weight, u32 rows,
                                     u32 dims) {
  const u32 row = blockIdx.x;
  const size_t first = (size_t)row * dims;
  float squares = 0.0f, magnitudes = 0.0f, product = 0.0f, own = 0.0f, other = 0.0f, largest = -1.0f;
  for (u32 column = 4 * threadIdx.x; column < dims; column += 4 * blockDim.x) {
    const u32 count = min(4u, dims - column);
    const Quad p = load(predicted_bd + first + column, count), y = load(truth_bd + first + column, count);
    // Elements beyond the row are 0 in both quads, so they add nothing.
    for (u32 i = 0; i < 4; ++i) {
      const float target = code_scale * y.at[i], error = p.at[i] - target;
      squares += error * error;
      magnitudes += fabsf(error);
      product += p.at[i] * target;
      own += p.at[i] * p.at[i];
      other += target * target;
      if (isfinite(p.at[i])) largest = fmaxf(largest, fabsf(p.at[i]));
    }
  }
  squares = sum_block(squares);
  magnitudes = sum_block(magnitudes);
  largest = max_block(largest);
  float inverse = 0.0f, along = 0.0f, similarity = 0.0f;
  if (cosine_weight != 0.0f) {
    product = sum_block(product);
    const float length = sqrtf(sum_block(own)), bounded = fmaxf(length, 1e-8f);
    inverse = 1.0f / (bounded * fmaxf(sqrtf(sum_block(other)), 1e-8f));
    similarity = product * inverse;
    along = length > 1e-8f ? similarity / (length * length) : 0.0f;
  }
  if (threadIdx.x == 0) {
    statistics[(size_t)L2 * rows + row] = squares / (float)dims;
    statistics[(size_t)L1 * rows + row] = magnitudes / (float)dims;
    statistics[(size_t)COSINE * rows + row] = 1.0f - similarity;
    statistics[(size_t)LARGEST * rows + row] = largest;
  }
  const float of_square = 2.0f * l2_weight / (float)dims, of_magnitude = l1_weight / (float)dims;
  for (u32 column = 4 * threadIdx.x; column < dims; column += 4 * blockDim.x) {
    const u32 count = min(4u, dims - column);
    const Quad p = load(predicted_bd + first + column, count), y = load(truth_bd + first + column, count);
    Quad out;
    for (u32 i = 0; i < 4; ++i) {
      const float target = code_scale * y.at[i], error = p.at[i] - target;
      const float sign = error > 0.0f ? 1.0f : (error < 0.0f ? -1.0f : 0.0f);
      out.at[i] = of_square * error;
      if (l1_weight != 0.0f) out.at[i] += of_magnitude * sign;
      if (cosine_weight != 0.0f) out.at[i] += cosine_weight * (along * p.at[i] - inverse * target);
    }
    store(gradient_bd + first + column, out, count);
  }
}

// For each row, computes the KL divergence and its gradient with respect to the prediction's unscaled logits. q is the
// softmax of `logit_scale` times the prediction's logits, and p is the softmax of the truth's logits. The divergence is
// KL(q || p), or KL(p || q) if `forward` is set. The gradient is multiplied by `weight`. One block computes one row.
extern "C" __global__ void divergence(T* gradient_ba, float* statistics, const float* logits_ba, const float* truth_ba,
                                      float logit_scale, float weight, int forward, u32 rows, u32 anchors) {
  const u32 row = blockIdx.x;
  const float* z = logits_ba + (size_t)row * anchors;
  const float* y = truth_ba + (size_t)row * anchors;
  float z_most = -3.4e38f, y_most = -3.4e38f, largest = -1.0f;
  for (u32 a = threadIdx.x; a < anchors; a += blockDim.x) {
    const float logit = z[a] * logit_scale;
    z_most = fmaxf(z_most, logit);
    y_most = fmaxf(y_most, y[a]);
    if (isfinite(logit)) largest = fmaxf(largest, fabsf(logit));
  }
  z_most = max_block(z_most);
  y_most = max_block(y_most);
  largest = max_block(largest);
  float z_sum = 0.0f, y_sum = 0.0f;
  for (u32 a = threadIdx.x; a < anchors; a += blockDim.x) {
    z_sum += expf(z[a] * logit_scale - z_most);
    y_sum += expf(y[a] - y_most);
  }
  const float z_log = z_most + logf(sum_block(z_sum)), y_log = y_most + logf(sum_block(y_sum));
  float total = 0.0f;
  for (u32 a = threadIdx.x; a < anchors; a += blockDim.x) {
    const float q = z[a] * logit_scale - z_log, p = y[a] - y_log;
    total += forward ? expf(p) * (p - q) : expf(q) * (q - p);
  }
  total = sum_block(total);
  if (threadIdx.x == 0) {
    statistics[(size_t)KL * rows + row] = total;
    statistics[(size_t)LARGEST * rows + row] = largest;
  }
  for (u32 a = threadIdx.x; a < anchors; a += blockDim.x) {
    const float q = z[a] * logit_scale - z_log, p = y[a] - y_log;
    const float slope = forward ? expf(q) - expf(p) : expf(q) * (q - p - total);
#ifdef F32
    gradient_ba[(size_t)row * anchors + a] = weight * logit_scale * slope;
#else
    gradient_ba[(size_t)row * anchors + a] = narrow(weight * logit_scale * slope);
#endif
  }
}

// Adds the losses of a micro-batch, divided by the number of rows of the global batch, to `before`, and writes the
// result to `sums`. The losses are the weighted total, KL, L2, L1 and cosine. The sixth number of `before` is copied.
// Also writes the means over the micro-batch and the largest finite logit (or prediction) to `local`. Launched with one
// block.
extern "C" __global__ void add_losses(double* sums, double* local, const double* before, const float* statistics,
                                      float kl_weight, float l2_weight, float l1_weight, float cosine_weight,
                                      u32 global_batch, u32 rows) {
  const float weights[4] = {kl_weight, l2_weight, l1_weight, cosine_weight};
  double total = 0.0;
  for (u32 kind = 0; kind < LARGEST; ++kind) {
    if (weights[kind] == 0.0f) {
      if (threadIdx.x == 0) sums[1 + kind] = before[1 + kind];
      continue;
    }
    double sum = 0.0;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) sum += (double)statistics[(size_t)kind * rows + row];
    sum = sum_block(sum);
    total += (double)weights[kind] * sum;
    if (threadIdx.x == 0) {
      sums[1 + kind] = before[1 + kind] + sum / (double)global_batch;
      local[1 + kind] = sum / (double)rows;
    }
  }
  float largest = -1.0f;
  for (u32 row = threadIdx.x; row < rows; row += blockDim.x)
    largest = fmaxf(largest, statistics[(size_t)LARGEST * rows + row]);
  largest = max_block(largest);
  if (threadIdx.x != 0) return;
  sums[0] = before[0] + total / (double)global_batch;
  sums[5] = before[5];
  local[0] = total / (double)rows;
  local[5] = (double)largest;
}

// Number of elements whose squares one block of `squares` (256 threads) adds up.
#define ELEMENTS_PER_SUM 16384

template <typename G>
__device__ inline void add_squares(float* sums, const G* gradient, u64 elements) {
  const u64 first = (u64)blockIdx.x * ELEMENTS_PER_SUM;
  float sum = 0.0f;
#pragma unroll 4
  for (u32 i = 4 * threadIdx.x; i < ELEMENTS_PER_SUM; i += 4 * blockDim.x) {
    if (first + i >= elements) break;
    const Quad value = load(gradient + first + i, 4);
    for (u32 k = 0; k < 4; ++k) sum += value.at[k] * value.at[k];
  }
  sum = sum_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Each block sums the squares of ELEMENTS_PER_SUM elements. The number of elements is a multiple of four.
extern "C" __global__ void squares(float* sums, const T* gradient, u64 elements) {
  add_squares(sums, gradient, elements);
}
extern "C" __global__ void squares_of_sums(float* sums, const float* gradient, u64 elements) {
  add_squares(sums, gradient, elements);
}

// Adds the gradient of a micro-batch to the sum over micro-batches, or starts this sum.
extern "C" __global__ void accumulate(float* total, const T* gradient, int first, u64 elements) {
  const u64 i = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= elements) return;
  Quad value = load(gradient + i, 4);
  if (!first) {
    const Quad old = load(total + i, 4);
    for (u32 k = 0; k < 4; ++k) value.at[k] += old.at[k];
  }
  store(total + i, value, 4);
}

// The numbers that all threads of `update` share.
struct Control {
  float skip;       // 1 if nothing may change
  float divisor;    // divides the gradient, to clip it
  float decay;      // factor of the weights: 1 - learning rate x weight decay
  float step_size;  // learning rate / (1 - beta1^updates)
  float correction; // sqrt(1 - beta2^updates)
  float average;    // weight of the new parameters in the moving average
};

// Prepares the update: adds up the partial sums of squares. Counts the update, unless the gradient is not finite or a
// rank has no rows. `numbers` receives the six sums and the squared norm. Launched with one block.
extern "C" __global__ void prepare_update(Control* control, double* numbers, float* updates, const float* squares,
                                          u32 blocks, const double* sums, const float* learning_rate, float clip_norm,
                                          float beta1, float beta2, float weight_decay, float average_min) {
  double squared = 0.0;
  for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) squared += (double)squares[i];
  squared = sum_block(squared);
  if (threadIdx.x != 0) return;
  // A rank without rows sends NaN as its request. The sum is then NaN too, so the update is skipped.
  squared += 0.0 * sums[5];
  for (u32 i = 0; i < 6; ++i) numbers[i] = sums[i];
  numbers[6] = (double)(float)squared;  // finite unless the update is skipped
  const bool skip = !isfinite((float)squared);
  const float before = *updates, rate = *learning_rate;
  const double count = (double)before + 1.0;
  if (!skip) *updates = before + 1.0f;
  control->skip = skip ? 1.0f : 0.0f;
  control->divisor = clip_norm > 0.0f ? fmaxf(1.0f, (float)(sqrt(squared) / (double)clip_norm)) : 1.0f;
  control->decay = 1.0f - rate * weight_decay;
  control->step_size = (float)((double)rate / (1.0 - pow((double)beta1, count)));
  control->correction = (float)sqrt(1.0 - pow((double)beta2, count));
  control->average = fmaxf(average_min, (float)(9.0 / (count + 9.0)));
}

template <typename G>
__device__ inline void update_quad(float* weights, float* first, float* second, float* average, T* rounded,
                                   const G* gradient, const Control* control, float beta1, float beta2, float epsilon,
                                   u64 elements) {
  const u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
  const Control how = *control;
  if (at >= elements || how.skip != 0.0f) return;
  const Quad g = load(gradient + at, 4);
  Quad w = load(weights + at, 4), m = load(first + at, 4), v = load(second + at, 4), e = load(average + at, 4);
  for (u32 i = 0; i < 4; ++i) {
    const float clipped = g.at[i] / how.divisor;
    m.at[i] += (1.0f - beta1) * (clipped - m.at[i]);
    v.at[i] = beta2 * v.at[i] + (1.0f - beta2) * clipped * clipped;
    w.at[i] = how.decay * w.at[i] - how.step_size * m.at[i] / (sqrtf(v.at[i]) / how.correction + epsilon);
    e.at[i] += how.average * (w.at[i] - e.at[i]);
  }
  store(weights + at, w, 4);
  store(first + at, m, 4);
  store(second + at, v, 4);
  store(average + at, e, 4);
  if (rounded) store(rounded + at, w, 4);
}

// Clips the gradient, then updates the weights with AdamW (Loshchilov and Hutter 2019, algorithm 2), their moments,
// their moving average and their rounded copy. The number of elements is a multiple of four.
#define UPDATE(G)                                                                                                  \
  float *weights, float *first, float *second, float *average, T *rounded, const G *gradient,                      \
      const Control *control, float beta1, float beta2, float epsilon, u64 elements
extern "C" __global__ void update(UPDATE(T)) {
  update_quad(weights, first, second, average, rounded, gradient, control, beta1, beta2, epsilon, elements);
}
extern "C" __global__ void update_from_sums(UPDATE(float)) {
  update_quad(weights, first, second, average, rounded, gradient, control, beta1, beta2, epsilon, elements);
}

// The unit vectors of the rows, in the order of the sorted rows. `coordinates` holds all latitudes and then all
// longitudes, in degrees. The formulas are those of core/src/geo/vector.rs.
extern "C" __global__ void unit_vectors(double* points_n3, const double* coordinates, const int* order, u32 rows) {
  const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const double radians = 0.017453292519943295769;
  const double latitude = coordinates[order[row]], longitude = coordinates[rows + order[row]];
  double sine, cosine, z, ring;
  if (fabs(latitude) <= 45.0) {
    sincos(latitude * radians, &z, &ring);
  } else {
    sincos((90.0 - fabs(latitude)) * radians, &ring, &z);
    z = copysign(z, latitude);
  }
  sincos(longitude * radians, &sine, &cosine);
  points_n3[3 * row] = ring * cosine;
  points_n3[3 * row + 1] = ring * sine;
  points_n3[3 * row + 2] = z;
}

// Uniform random points on the sphere, as in src/shdd/points.rs.
extern "C" __global__ void uniform_points(double* points_n3, u64 seed, u32 stream, const long long* step, u32 count) {
  const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= count) return;
  const Words words = philox(seed, stream, (u64)*step, index, 0);
  const double height = 2.0 * ((double)(((u64)words.word[0] << 32 | words.word[1]) >> 11) * 0x1p-53) - 1.0;
  const double turn = (double)(((u64)words.word[2] << 32 | words.word[3]) >> 11) * 0x1p-53;
  const double ring = sqrt((1.0 - height) * (1.0 + height));
  double sine, cosine;
  sincos(6.28318530717958647692 * turn, &sine, &cosine);
  points_n3[3 * index] = ring * cosine;
  points_n3[3 * index + 1] = ring * sine;
  points_n3[3 * index + 2] = height;
}
