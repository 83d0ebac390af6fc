// The error that every CUDA function returns in the CPU variant.
#include "error.h"

extern "C" int locdiff_no_cuda() {
  return locdiff::fail("this build has no CUDA; rebuild with `LOCDIFF_CUDA=1 make build`");
}
