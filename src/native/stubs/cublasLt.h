// Stub: a handle type that ATen's CUDA headers use.
#pragma once

typedef struct cublasLtContext* cublasLtHandle_t;
