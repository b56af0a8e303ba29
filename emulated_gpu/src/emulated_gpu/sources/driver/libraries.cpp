// What the other libraries that torch links must hand out: cuSPARSE, cuSOLVER, cuFFT, NCCL, NVRTC,
// CUPTI. Their scratch memory is not known here: it is said to be none, and noted as an estimate.
#include "emulated_gpu.h"

#include <cstdlib>
#include <cstring>

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

// Runtime compilation: every program compiles to a kernel that computes nothing.

constexpr char NO_CODE[] = "emulated";
EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = CUDART_VERSION / 1000;
  *minor = 0;
  return 0;
}
EXPORT const char* nvrtcGetErrorString(int) { return "NVRTC is not emulated"; }
EXPORT int nvrtcCreateProgram(void** out, const char*, const char*, int, const char* const*,
                              const char* const*) {
  *out = calloc(1, 8);
  return 0;
}
EXPORT int nvrtcDestroyProgram(void** program) {
  free(*program);
  *program = nullptr;
  return 0;
}
EXPORT int nvrtcGetProgramLogSize(void*, size_t* out) {
  *out = 1;
  return 0;
}
EXPORT int nvrtcGetProgramLog(void*, char* out) {
  *out = 0;
  return 0;
}
EXPORT int nvrtcGetLoweredName(void*, const char*, const char** out) {
  *out = NO_CODE;
  return 0;
}
EXPORT int nvrtcGetPTXSize(void*, size_t* out) {
  *out = sizeof NO_CODE;
  return 0;
}
EXPORT int nvrtcGetCUBINSize(void* program, size_t* out) { return nvrtcGetPTXSize(program, out); }
EXPORT int nvrtcGetPTX(void*, char* out) {
  memcpy(out, NO_CODE, sizeof NO_CODE);
  return 0;
}
EXPORT int nvrtcGetCUBIN(void* program, char* out) { return nvrtcGetPTX(program, out); }

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
