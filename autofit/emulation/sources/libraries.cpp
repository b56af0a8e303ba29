// The handles and versions of the other libraries that torch links: cuSPARSE, cuSOLVER, cuFFT,
// NCCL, NVRTC, CUPTI. What they would take on the device is not known here.
#include "emulation.h"

#include <cstdlib>

using namespace emulation;

#define HANDLE(NAME)           \
  EXPORT int NAME(void** out) { \
    note_estimate(#NAME);      \
    *out = calloc(1, 256);     \
    return 0;                  \
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

constexpr int NVRTC_ERROR_COMPILATION = 6;  // what it compiled could not run
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
EXPORT int nvrtcCompileProgram(void*, int, const char* const*) { return NVRTC_ERROR_COMPILATION; }
EXPORT int nvrtcGetProgramLogSize(void*, size_t* out) {
  *out = 1;
  return 0;
}
EXPORT int nvrtcGetProgramLog(void*, char* out) {
  *out = 0;
  return 0;
}

constexpr int CUPTI_ERROR_UNKNOWN = 999;
EXPORT int cuptiGetResultString(int, const char** out) {
  *out = "CUPTI is not emulated";
  return 0;
}
EXPORT int cuptiSubscribe(void** out, void*, void*) {
  *out = nullptr;
  return CUPTI_ERROR_UNKNOWN;
}
EXPORT int cuptiActivityRegisterCallbacks(void*, void*) { return CUPTI_ERROR_UNKNOWN; }
