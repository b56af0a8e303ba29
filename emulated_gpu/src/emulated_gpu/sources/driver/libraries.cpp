// What the other libraries that torch links must hand out: cuSPARSE, cuSOLVER, cuFFT, NCCL and
// CUPTI: handles, versions, and errors.
#include "emulated_gpu.h"

#include <cstdlib>

using namespace emulated_gpu;

#define HANDLE(NAME)            \
  EXPORT int NAME(void** out) { \
    note_estimate(#NAME);       \
    *out = calloc(1, 256);      \
    return 0;                   \
  }
HANDLE(cusparseCreate)
HANDLE(cusparseCreateMatDescr)
HANDLE(cusolverDnCreate)
HANDLE(cusolverDnCreateParams)
HANDLE(cusolverDnCreateGesvdjInfo)
HANDLE(cusolverDnCreateSyevjInfo)

EXPORT int cufftCreate(int* out) {
  static int made = 0;
  note_estimate("cufftCreate");
  *out = ++made;
  return 0;
}
EXPORT const char* cusparseGetErrorString(int) { return "not emulated"; }

EXPORT int ncclGetVersion(int* out) {
  *out = 22809;
  return 0;
}
EXPORT const char* ncclGetErrorString(int) { return "NCCL is not emulated"; }
EXPORT const char* ncclGetLastError(void*) { return "NCCL is not emulated"; }

constexpr int CUPTI_ERROR_UNKNOWN = 999;
EXPORT int cuptiGetResultString(int, const char** out) {
  *out = "CUPTI is not emulated";
  return 0;
}
EXPORT int cuptiGetVersion(unsigned* out) {
  *out = CUDART_VERSION;
  return 0;
}
EXPORT int cuptiSubscribe(void** out, void*, void*) {
  *out = nullptr;
  return CUPTI_ERROR_UNKNOWN;
}
EXPORT int cuptiActivityRegisterCallbacks(void*, void*) { return CUPTI_ERROR_UNKNOWN; }
