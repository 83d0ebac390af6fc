// Stub: handle and status types that ATen's CUDA headers use.
#pragma once

typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;
