// Stub: a handle type that ATen's CUDA headers use.
#pragma once

#include "cusolver_common.h"

typedef struct cusolverDnContext* cusolverDnHandle_t;
