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

// Functions that write the bytes of their scratch memory through one of their arguments. Integers
// and pointers take a slot each on x86-64 and AArch64, so the argument is found by its place alone.

#define ARGUMENTS                                                                              \
  u64 a0, u64 a1, u64 a2, u64 a3, u64 a4, u64 a5, u64 a6, u64 a7, u64 a8, u64 a9, u64 a10,     \
      u64 a11, u64 a12, u64 a13, u64 a14, u64 a15, u64 a16, u64 a17, u64 a18
#define NO_SCRATCH(NAME, TYPE, AT)                                                             \
  EXPORT int NAME(ARGUMENTS) {                                                                 \
    const u64 given[] = {a0, a1,  a2,  a3,  a4,  a5,  a6,  a7,  a8, a9,                        \
                         a10, a11, a12, a13, a14, a15, a16, a17, a18};                         \
    note_estimate(#NAME);                                                                      \
    *reinterpret_cast<TYPE*>(given[AT]) = 0;                                                   \
    return 0;                                                                                  \
  }
#define NO_SCRATCH_TWICE(NAME, DEVICE, HOST)                                                   \
  EXPORT int NAME(ARGUMENTS) {                                                                 \
    const u64 given[] = {a0, a1,  a2,  a3,  a4,  a5,  a6,  a7,  a8, a9,                        \
                         a10, a11, a12, a13, a14, a15, a16, a17, a18};                         \
    note_estimate(#NAME);                                                                      \
    *reinterpret_cast<size_t*>(given[DEVICE]) = *reinterpret_cast<size_t*>(given[HOST]) = 0;   \
    return 0;                                                                                  \
  }
#define OF_EACH_TYPE(NAME, AT)                      \
  NO_SCRATCH(cusolverDnS##NAME##_bufferSize, int, AT) \
  NO_SCRATCH(cusolverDnD##NAME##_bufferSize, int, AT) \
  NO_SCRATCH(cusolverDnC##NAME##_bufferSize, int, AT) \
  NO_SCRATCH(cusolverDnZ##NAME##_bufferSize, int, AT)
#define OF_REAL_TYPES(NAME, AT)                     \
  NO_SCRATCH(cusolverDnS##NAME##_bufferSize, int, AT) \
  NO_SCRATCH(cusolverDnD##NAME##_bufferSize, int, AT)
#define OF_COMPLEX_TYPES(NAME, AT)                  \
  NO_SCRATCH(cusolverDnC##NAME##_bufferSize, int, AT) \
  NO_SCRATCH(cusolverDnZ##NAME##_bufferSize, int, AT)
OF_EACH_TYPE(getrf, 5)
OF_EACH_TYPE(geqrf, 5)
OF_EACH_TYPE(potrf, 5)
OF_EACH_TYPE(sytrf, 4)
OF_EACH_TYPE(gesvd, 3)
OF_EACH_TYPE(gesvdj, 12)
OF_EACH_TYPE(gesvdjBatched, 11)
OF_EACH_TYPE(gesvdaStridedBatched, 16)
OF_REAL_TYPES(syevd, 7)
OF_REAL_TYPES(syevj, 7)
OF_REAL_TYPES(syevjBatched, 7)
OF_REAL_TYPES(orgqr, 7)
OF_REAL_TYPES(ormqr, 11)
OF_COMPLEX_TYPES(heevd, 7)
OF_COMPLEX_TYPES(heevj, 7)
OF_COMPLEX_TYPES(heevjBatched, 7)
OF_COMPLEX_TYPES(ungqr, 7)
OF_COMPLEX_TYPES(unmqr, 11)
NO_SCRATCH_TWICE(cusolverDnXgeqrf_bufferSize, 10, 11)
NO_SCRATCH_TWICE(cusolverDnXpotrf_bufferSize, 8, 9)
NO_SCRATCH_TWICE(cusolverDnXsyevd_bufferSize, 11, 12)
NO_SCRATCH_TWICE(cusolverDnXsyevBatched_bufferSize, 11, 12)
NO_SCRATCH_TWICE(cusolverDnXsytrs_bufferSize, 11, 12)
NO_SCRATCH_TWICE(cusolverDnXgeev_bufferSize, 17, 18)
NO_SCRATCH(cusparseSpMM_bufferSize, size_t, 10)
NO_SCRATCH(cusparseSDDMM_bufferSize, size_t, 10)
NO_SCRATCH(cusparseSpSM_bufferSize, size_t, 10)
NO_SCRATCH(cusparseSpMV_bufferSize, size_t, 9)
NO_SCRATCH(cusparseSpSV_bufferSize, size_t, 9)
NO_SCRATCH(cufftXtMakePlanMany, size_t, 12)

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
