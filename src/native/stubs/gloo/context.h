// Stub: ProcessGroupGloo holds shared pointers to Context, and one of its inline functions calls setTimeout.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
