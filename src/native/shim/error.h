// How the shim reports: every fallible function returns 0, or 1 after storing the text of what was thrown
// in a thread-local that locdiff_last_error() reads. No exception leaves a function of the C ABI.
#pragma once

#include <string>

namespace locdiff {

// Keeps `text` for the calling thread until its next failure; returns 1.
int fail(const std::string& text);

template <typename Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  } catch (...) {
    return fail("an exception that is not a std::exception");
  }
}

}  // namespace locdiff
