// C ABI for c10d's key-value stores; see c10d/store.rs.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"

namespace {
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using milliseconds = std::chrono::milliseconds;

c10d::Store& store_of(void* store) { return **static_cast<StorePtr*>(store); }

c10d::TCPStoreOptions options_for(uint16_t port, int64_t timeout_ms) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = milliseconds(timeout_ms);
  options.useLibUV = true;
  return options;
}
}  // namespace

using locdiff::guarded;

extern "C" {

// Serves the store on the listening socket `fd`, takes ownership of `fd`, and connects to the store as its first
// client.
int locdiff_store_serve(int fd, const char* host, size_t host_length, uint16_t port, int64_t timeout_ms, void** out) {
  return guarded([&] {
    auto options = options_for(port, timeout_ms);
    options.isServer = true;
    options.masterListenFd = fd;
    *out = new StorePtr(c10::make_intrusive<c10d::TCPStore>(std::string(host, host_length), options));
  });
}

int locdiff_store_join(const char* host, size_t host_length, uint16_t port, int64_t timeout_ms, void** out) {
  return guarded([&] {
    auto options = options_for(port, timeout_ms);
    *out = new StorePtr(c10::make_intrusive<c10d::TCPStore>(std::string(host, host_length), options));
  });
}

int locdiff_store_prefix(void* store, const char* prefix, size_t prefix_length, void** out) {
  return guarded([&] {
    *out = new StorePtr(
        c10::make_intrusive<c10d::PrefixStore>(std::string(prefix, prefix_length), *static_cast<StorePtr*>(store)));
  });
}

int locdiff_store_set(void* store, const char* key, size_t key_length, const uint8_t* value, size_t value_length) {
  return guarded([&] {
    store_of(store).set(std::string(key, key_length), std::vector<uint8_t>(value, value + value_length));
  });
}

// Waits until `key` is set. `*out` is a new std::vector<uint8_t> with the value of `key`.
int locdiff_store_get(void* store, const char* key, size_t key_length, int64_t timeout_ms, void** out) {
  return guarded([&] {
    std::string name(key, key_length);
    store_of(store).wait({name}, milliseconds(timeout_ms));
    *out = new std::vector<uint8_t>(store_of(store).get(name));
  });
}

size_t locdiff_bytes_length(const void* bytes) { return static_cast<const std::vector<uint8_t>*>(bytes)->size(); }

const uint8_t* locdiff_bytes_data(const void* bytes) { return static_cast<const std::vector<uint8_t>*>(bytes)->data(); }

void locdiff_bytes_free(void* bytes) { delete static_cast<std::vector<uint8_t>*>(bytes); }

int locdiff_store_contains(void* store, const char* key, size_t key_length, int* out) {
  return guarded([&] { *out = store_of(store).check({std::string(key, key_length)}) ? 1 : 0; });
}

int locdiff_store_add(void* store, const char* key, size_t key_length, int64_t amount, int64_t* out) {
  return guarded([&] { *out = store_of(store).add(std::string(key, key_length), amount); });
}

void locdiff_store_free(void* store) { delete static_cast<StorePtr*>(store); }
}
