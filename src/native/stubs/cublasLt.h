// Stub: a handle type that ATen's CUDA headers name.
#pragma once

typedef struct cublasLtContext* cublasLtHandle_t;
