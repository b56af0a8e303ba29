// Contexts: each process takes one on each device that it uses, and with it the context's bytes.
// A process that was forked after CUDA had been initialized can use none, as with the real driver.
#include "emulated_gpu.h"

#include <atomic>
#include <pthread.h>

namespace emulated_gpu {
namespace {

thread_local int current = 0;
bool contexts[MAX_DEVICES];
std::atomic<bool> initialized{false}, forked{false};

int initialize() {
  static const int problem = [] {
    int fault = due_error("init");
    if (fault) return fault;
    if (settings().driver_version < CUDART_VERSION / 1000 * 1000)
      return static_cast<int>(cudaErrorInsufficientDriver);
    pthread_atfork(nullptr, nullptr, [] { forked = initialized.load(); });
    initialized = true;
    return 0;
  }();
  return problem;
}

}  // namespace

int device_problem() {
  if (int problem = initialize()) return problem;
  if (forked) return cudaErrorInitializationError;
  return visible_devices().empty() ? cudaErrorNoDevice : 0;
}

int current_device() { return current; }
int current_physical() { return visible_devices()[current]; }
void set_current_device(int ordinal) { current = ordinal; }
bool has_context(int ordinal) { return ordinal >= 0 && ordinal < MAX_DEVICES && contexts[ordinal]; }

cudaError_t enter_context() {
  if (poisoned_by()) return status();
  if (int code = device_problem()) return fail(code);
  Lock lock(global_mutex());
  if (contexts[current]) return cudaSuccess;
  if (int code = due_error("context")) return fail(code);
  if (!reserve_bytes(current_physical(), card(current).context_bytes))
    return fail(cudaErrorMemoryAllocation);
  contexts[current] = true;
  write_log("context on device %d", current);
  return cudaSuccess;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT cudaError_t cudaGetDevice(int* out) {
  if (int code = device_problem()) return fail(code);
  *out = current;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int ordinal) {
  if (int code = device_problem()) return fail(code);
  if (ordinal < 0 || ordinal >= static_cast<int>(visible_devices().size()))
    return fail(cudaErrorInvalidDevice);
  current = ordinal;
  return enter_context();
}

// A context is its ordinal, past null.
static CUcontext handle_of(int ordinal) { return reinterpret_cast<CUcontext>(ordinal + 0x1000ull); }
static int ordinal_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<u64>(context) - 0x1000);
}

EXPORT CUresult cuInit(unsigned) { return static_cast<CUresult>(device_problem()); }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = has_context(ordinal);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  *out = handle_of(ordinal);
  return static_cast<CUresult>(enter_context());
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = has_context(current) ? handle_of(current) : nullptr;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice_v2(CUdevice* out, CUcontext context) {
  *out = context ? ordinal_of(context) : current;
  return CUDA_SUCCESS;
}
#undef cuCtxGetDevice
EXPORT CUresult cuCtxGetDevice(CUdevice* out) { return cuCtxGetDevice_v2(out, nullptr); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current = ordinal_of(context);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* out) { return cuCtxGetCurrent(out); }
EXPORT CUresult cuCtxGetLimit(size_t* out, CUlimit) {
  *out = 1024;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize() {
  return static_cast<CUresult>(cudaDeviceSynchronize());
}
