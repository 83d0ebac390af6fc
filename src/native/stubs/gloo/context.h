// Stub: c10d holds it by shared pointer; an inline member of ProcessGroupGloo names setTimeout.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
