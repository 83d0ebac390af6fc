// Orthonormal real spherical harmonics of unit vectors, up to degree L (`degree`). src/shdd/harmonics.rs explains the
// formulas.
//
// Each thread computes one order m of one point. threadIdx.x is m, so that at each degree adjacent threads write
// adjacent coefficients. A thread needs m multiplications for (x + iy)^m and then computes the degrees m to L, so
// all threads do about the same work. The kernel performs the same operations in the same order as the CPU. It must be
// compiled with --fmad=false.

// Calls use(i, value) for every coefficient i of orders m and -m of a point.
template <typename Use>
__device__ inline void for_each_coefficient(const double* point, const double* sectoral, const double2* recursion,
                                            int degree, int m, Use use) {
  const double x = point[0], y = point[1], z = point[2];
  double cosine = 1.0, sine = 0.0;
  for (int i = 0; i < m; ++i) {
    const double next = cosine * x - sine * y;
    sine = sine * x + cosine * y;
    cosine = next;
  }
  double older = 0.0, old = sectoral[m];
  // Start at the smallest order m of the warp, so that all threads of the warp process the same degree l at the same
  // time and their memory accesses coalesce.
  for (int l = m & ~31; l <= degree; ++l) {
    if (l < m) continue;
    if (l > m) {
      const double2 ab = recursion[l * (l + 1) / 2 + m];
      const double next = ab.x * z * old - ab.y * older;
      older = old;
      old = next;
    }
    const int center = l * l + l;
    use(center + m, (float)(old * cosine));
    if (m > 0) use(center - m, (float)(old * sine));
  }
}

extern "C" __global__ void harmonics(float* out, const double* points, const double* sectoral, const double2* recursion,
                                     int degree, long long count) {
  const int m = threadIdx.x;
  const long long point = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  if (m > degree || point >= count) return;
  float* row = out + point * (degree + 1) * (degree + 1);
  for_each_coefficient(points + 3 * point, sectoral, recursion, degree, m, [&](int i, float value) { row[i] = value; });
}

// For each code, the scores code · Y(point) of `per_code` points, whose indices are in `chosen`. `count` is the number
// of all scores. Products and sums are f64. The threads with the same y form whole warps and compute one score.
extern "C" __global__ void scores_at(float* out, const double* points, const long long* chosen, const float* codes,
                                     const double* sectoral, const double2* recursion, int degree, int per_code,
                                     long long count) {
  __shared__ double sums[32];
  const int m = threadIdx.x;
  const long long index = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  double sum = 0.0;
  if (m <= degree && index < count) {
    const float* code = codes + index / per_code * (degree + 1) * (degree + 1);
    for_each_coefficient(points + 3 * chosen[index], sectoral, recursion, degree, m,
                         [&](int i, float value) { sum += (double)value * code[i]; });
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  const int warp = (threadIdx.y * blockDim.x + m) / 32;
  if (m % 32 == 0) sums[warp] = sum;
  __syncthreads();
  if (m != 0 || index >= count) return;
  for (int other = 1; other < blockDim.x / 32; ++other) sum += sums[warp + other];
  out[index] = (float)sum;
}
