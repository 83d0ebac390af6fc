// Differentiable collectives and gradient hooks. autograd.rs explains when to use each value of LocdiffFunction.
#pragma once

#include <cstdint>

extern "C" {

// Pairs of a forward and a backward operation.
enum LocdiffFunction : int {
  LOCDIFF_IDENTITY_ALL_REDUCE = 0,
  LOCDIFF_ALL_REDUCE_IDENTITY = 1,
  LOCDIFF_GATHER_SPLIT = 2,
  LOCDIFF_SPLIT_GATHER = 3,
};

// Applies the forward operation of the pair `function` to `input`. `*out` is a new at::Tensor. Only
// LOCDIFF_GATHER_SPLIT and LOCDIFF_SPLIT_GATHER use `dim`.
int locdiff_differentiable(void* group, const void* input, int function, int64_t dim, int64_t timeout_ms, void** out);

// locdiff_hook_call is called after the gradient of a leaf was accumulated, on the thread that accumulated the
// gradient. locdiff_hook_drop is called once, to drop `context`. Neither may unwind.
typedef void (*locdiff_hook_call)(const void* context);
typedef void (*locdiff_hook_drop)(void* context);

// Registers a hook on a leaf and replaces an earlier hook of the leaf. The caller must free `*out` with
// locdiff_hook_free, which disables the hook and drops `context`. If a call of the hook is running, `context` is
// dropped when the call ends.
int locdiff_hook_new(const void* leaf, locdiff_hook_call call, locdiff_hook_drop drop, void* context, void** out);
void locdiff_hook_free(void* hook);

// Makes `gradient` itself, not a copy, the gradient of `leaf`.
int locdiff_set_gradient(const void* leaf, const void* gradient);
}
