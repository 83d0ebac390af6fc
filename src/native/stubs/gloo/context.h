// Stub: c10d holds a shared pointer to it, and an inline member of ProcessGroupGloo calls setTimeout.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
