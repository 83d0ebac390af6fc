// Stores the text of each thread's last failure; see error.h.
#include "error.h"

namespace {
thread_local std::string last_error;
}

namespace locdiff {
int fail(const std::string& text) {
  last_error = text;
  return 1;
}
}  // namespace locdiff

// The text of the calling thread's last failure. The pointer is valid until the thread's next failure.
extern "C" const char* locdiff_last_error() { return last_error.c_str(); }

// The error that every CUDA function returns in the CPU variant.
extern "C" int locdiff_no_cuda() {
  return locdiff::fail("this build has no CUDA; rebuild with `LOCDIFF_CUDA=1 make build`");
}
