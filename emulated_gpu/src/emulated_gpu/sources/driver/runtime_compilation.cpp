// NVRTC, with which torch compiles kernels as it runs: every program compiles, to one that computes nothing.
#include "emulated_gpu.h"

#include <cstdlib>
#include <cstring>

using namespace emulated_gpu;

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
