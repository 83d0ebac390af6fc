// Stub: ProcessGroupGloo holds shared pointers to Context and calls Context::setTimeout in an inline function.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
