// How torch finds the driver's functions: by name, through the runtime.
#include "emulated_gpu.h"

#include <dlfcn.h>

namespace emulated_gpu {
namespace {

void* own_library() {
  static void* const handle = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&own_library), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return handle;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, u64,
                                                    cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(own_library(), name);
  if (!*out) *out = dlsym(own_library(), (std::string(name) + "_v2").c_str());
  if (result)
    *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? cudaSuccess : fail(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, u64 flags,
                                           cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, CUDART_VERSION, flags, result);
}
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** out, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult* result) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaError_t error = cudaGetDriverEntryPointByVersion(name, out, version, flags, &found);
  if (result)
    *result = error ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return error ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
