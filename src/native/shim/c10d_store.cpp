// A c10d store whose keys are held elsewhere; see c10d/store.rs. Each operation is a call into Rust.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"

namespace {
using Bytes = std::vector<uint8_t>;
using milliseconds = std::chrono::milliseconds;

// The operations have the same numbers in c10d/store.rs.
enum Operation : int { kSet = 0, kGet = 1, kAdd = 2, kContains = 3, kRemove = 4 };

// Carries out an operation and returns 0, or returns 1 and writes an error text to `bytes`. `bytes` holds the value to
// set, and receives the value of a key. `number` holds a timeout in milliseconds, or the number to add. It receives a
// sum, or 1 for true and 0 for false.
using Call = int (*)(const void* keys, int operation, const char* key, size_t key_length, void* bytes, int64_t* number);
using Release = void (*)(const void* keys);

class ForeignStore : public c10d::Store {
 public:
  ForeignStore(const void* keys, Call call, Release release, milliseconds timeout)
      : Store(timeout), keys_(keys), call_(call), release_(release) {}
  ForeignStore(const ForeignStore&) = delete;
  ForeignStore& operator=(const ForeignStore&) = delete;
  ~ForeignStore() override { release_(keys_); }

  // Several threads may call the methods at once, so a clone may be the same object.
  c10::intrusive_ptr<Store> clone() override { return c10::intrusive_ptr<Store>::unsafe_reclaim_from_nonowning(this); }

  void set(const std::string& key, const Bytes& value) override {
    Bytes bytes(value);
    call(kSet, key, bytes, 0);
  }

  Bytes get(const std::string& key) override { return get_within(key, timeout_); }

  int64_t add(const std::string& key, int64_t amount) override {
    Bytes bytes;
    return call(kAdd, key, bytes, amount);
  }

  bool deleteKey(const std::string& key) override {
    Bytes bytes;
    return call(kRemove, key, bytes, 0) != 0;
  }

  bool check(const std::vector<std::string>& keys) override {
    Bytes bytes;
    for (const auto& key : keys) {
      if (call(kContains, key, bytes, 0) == 0) return false;
    }
    return true;
  }

  int64_t getNumKeys() override { TORCH_CHECK(false, "this store does not count its keys"); }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (const auto& key : keys) {
      get_within(key, std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now()));
    }
  }

 private:
  Bytes get_within(const std::string& key, milliseconds timeout) {
    Bytes bytes;
    call(kGet, key, bytes, std::max<int64_t>(timeout.count(), 1));
    return bytes;
  }

  int64_t call(Operation operation, const std::string& key, Bytes& bytes, int64_t number) {
    if (call_(keys_, operation, key.data(), key.size(), &bytes, &number) != 0) {
      C10_THROW_ERROR(DistStoreError, std::string(bytes.begin(), bytes.end()));
    }
    return number;
  }

  const void* keys_;
  Call call_;
  Release release_;
};
}  // namespace

using locdiff::guarded;

extern "C" {

// Takes ownership of `keys`, which is passed to every call, and to `release` at the end.
int locdiff_store_new(const void* keys, Call call, Release release, int64_t timeout_ms, void** out) {
  return guarded([&] {
    *out = new c10::intrusive_ptr<c10d::Store>(
        c10::make_intrusive<ForeignStore>(keys, call, release, milliseconds(timeout_ms)));
  });
}

void locdiff_store_free(void* store) { delete static_cast<c10::intrusive_ptr<c10d::Store>*>(store); }

size_t locdiff_bytes_length(const void* bytes) { return static_cast<const Bytes*>(bytes)->size(); }

const uint8_t* locdiff_bytes_data(const void* bytes) { return static_cast<const Bytes*>(bytes)->data(); }

void locdiff_bytes_assign(void* bytes, const uint8_t* data, size_t length) noexcept {
  static_cast<Bytes*>(bytes)->assign(data, data + length);
}
}
