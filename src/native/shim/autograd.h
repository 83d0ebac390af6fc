// Differentiable collectives and gradient hooks; see autograd.rs for when each function is the right one.
#pragma once

#include <cstdint>

extern "C" {

// Which pair of forward and backward.
enum LocdiffFunction : int {
  LOCDIFF_IDENTITY_ALL_REDUCE = 0,
  LOCDIFF_ALL_REDUCE_IDENTITY = 1,
  LOCDIFF_GATHER_SPLIT = 2,
  LOCDIFF_SPLIT_GATHER = 3,
};

// `*out` is a new at::Tensor. `dim` counts for the gathers and the split only.
int locdiff_differentiable(void* group, const void* input, int function, int64_t dim, int64_t timeout_ms, void** out);

// Called after the gradient of a leaf was accumulated, on the thread that did it; must not unwind.
typedef void (*locdiff_hook_call)(const void* context);
typedef void (*locdiff_hook_drop)(void* context);

// Hangs a hook on a leaf in place of the one before. `*out` is to be freed; freeing it silences the hook, and drops
// `context` once no call runs any more.
int locdiff_hook_new(const void* leaf, locdiff_hook_call call, locdiff_hook_drop drop, void* context, void** out);
void locdiff_hook_free(void* hook);

// Makes `gradient` itself, not a copy, the gradient of `leaf`.
int locdiff_set_gradient(const void* leaf, const void* gradient);
}
