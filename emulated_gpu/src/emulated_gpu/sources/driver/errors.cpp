// Error codes: their names, the last one of each thread, and those that a process never recovers
// from (NVIDIA calls them sticky: every later call returns them).
#include "emulated_gpu.h"

#include <atomic>

namespace emulated_gpu {
namespace {

std::atomic<int> sticky{0};
thread_local int last_error = 0;

struct Description {
  int code;
  const char *name, *text;
};
const Description DESCRIPTIONS[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {35, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {209, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"},
    {226, "cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error"},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {705, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {712, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {714, "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
    {718, "cudaErrorInvalidPc", "invalid program counter"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {720, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {802, "cudaErrorSystemNotReady", "system not yet initialized"},
    {803, "cudaErrorSystemDriverMismatch",
     "system has unsupported display driver / cuda driver combination"},
    {804, "cudaErrorCompatNotSupportedOnDevice",
     "forward compatibility was attempted on non supported HW"},
    {999, "cudaErrorUnknown", "unknown error"},
};
const Description* find(int code) {
  for (const Description& each : DESCRIPTIONS)
    if (each.code == code) return &each;
  return nullptr;
}
constexpr const char* UNKNOWN = "unrecognized error code";

}  // namespace

bool is_sticky(int code) {  // CUDA runtime API, the errors after which "the process must be terminated"
  switch (code) {
    case 214: case 220: case 226: case 700: case 702: case 710: case 714: case 715: case 716:
    case 717: case 718: case 719: case 999:
      return true;
    default:
      return false;
  }
}

void poison(int code) {
  write_log("sticky error %d", code);
  sticky = code;
}
int poisoned_by() { return sticky; }

cudaError_t fail(int code) {
  if (code) write_log("error %d", code);
  if (is_sticky(code)) sticky = code;
  last_error = code;
  return static_cast<cudaError_t>(code);
}

cudaError_t status() {
  if (int code = sticky) return static_cast<cudaError_t>(last_error = code);
  return cudaSuccess;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT void emulated_gpu_poison(int code) { poison(code); }
EXPORT cudaError_t cudaGetLastError() {
  if (sticky) return static_cast<cudaError_t>(sticky.load());
  int was = last_error;
  last_error = 0;
  return static_cast<cudaError_t>(was);
}
EXPORT cudaError_t cudaPeekAtLastError() {
  return static_cast<cudaError_t>(sticky ? sticky.load() : last_error);
}
EXPORT const char* cudaGetErrorString(cudaError_t code) {
  const Description* found = find(code);
  return found ? found->text : UNKNOWN;
}
EXPORT const char* cudaGetErrorName(cudaError_t code) {
  const Description* found = find(code);
  return found ? found->name : UNKNOWN;
}
EXPORT CUresult cuGetErrorString(CUresult code, const char** out) {
  *out = cudaGetErrorString(static_cast<cudaError_t>(code));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult code, const char** out) {
  *out = cudaGetErrorName(static_cast<cudaError_t>(code));
  return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaDeviceReset() {
  sticky = 0;
  return cudaSuccess;
}
