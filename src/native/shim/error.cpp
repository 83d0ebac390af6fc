// The text of the last failure, one per thread; see error.h.
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

// Valid until the calling thread's next failure.
extern "C" const char* locdiff_last_error() { return last_error.c_str(); }
