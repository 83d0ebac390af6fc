// Error reporting of the shim. Every fallible function returns 0 on success. On failure, it returns 1 and stores the
// text of the exception in a thread-local variable, which locdiff_last_error() returns. No exception leaves a function
// of the C ABI.
#pragma once

#include <string>

namespace locdiff {

// Stores `text` as the calling thread's last error and returns 1.
int fail(const std::string& text);

// Runs `body` and returns 0. If `body` throws, passes the text of the exception to fail() and returns 1.
template <typename Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  } catch (...) {
    return fail("C++ code threw an exception that is not a std::exception");
  }
}

}  // namespace locdiff
