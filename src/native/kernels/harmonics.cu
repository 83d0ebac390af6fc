// Orthonormal real spherical harmonics of unit vectors, up to degree L (`degree`). src/shdd/harmonics.rs explains the
// formulas.
//
// Each thread computes one order m of one point. threadIdx.x is m, so that at each degree adjacent threads write
// adjacent coefficients. A thread needs m multiplications for (x + iy)^m and then computes the degrees m to L, so
// all threads do about the same work. The kernel performs the same operations in the same order as the CPU. It must be
// compiled with --fmad=false.

extern "C" __global__ void harmonics(float* out, const double* points, const double* sectoral, const double2* recursion,
                                     int degree, long long count) {
  const int m = threadIdx.x;
  const long long point = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  if (m > degree || point >= count) return;
  const double x = points[3 * point], y = points[3 * point + 1], z = points[3 * point + 2];
  double cosine = 1.0, sine = 0.0;
  for (int i = 0; i < m; ++i) {
    const double next = cosine * x - sine * y;
    sine = sine * x + cosine * y;
    cosine = next;
  }
  double older = 0.0, old = sectoral[m];
  float* row = out + point * (degree + 1) * (degree + 1);
  // Start at the smallest order m of the warp, so that all threads of the warp process the same degree l at the same
  // time and their writes coalesce.
  for (int l = m & ~31; l <= degree; ++l) {
    if (l < m) continue;
    if (l > m) {
      const double2 ab = recursion[l * (l + 1) / 2 + m];
      const double next = ab.x * z * old - ab.y * older;
      older = old;
      old = next;
    }
    const int center = l * l + l;
    row[center + m] = (float)(old * cosine);
    if (m > 0) row[center - m] = (float)(old * sine);
  }
}
