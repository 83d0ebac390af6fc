// Stub: the status type that ATen's CUDA headers use.
#pragma once

typedef enum { CUSOLVER_STATUS_SUCCESS = 0, CUSOLVER_STATUS_INVALID_VALUE = 3 } cusolverStatus_t;
