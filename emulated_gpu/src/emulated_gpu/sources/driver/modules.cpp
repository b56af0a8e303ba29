// Modules of the driver API, which Triton and runtime compilation load, and the launch of their kernels.
#include "emulated_gpu.h"

using namespace emulated_gpu;

EXPORT CUresult cuModuleLoadData(CUmodule* out, const void*) {
  *out = reinterpret_cast<CUmodule>(0x4d);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*,
                                   void**) {
  return cuModuleLoadData(out, image);
}
EXPORT CUresult cuModuleLoad(CUmodule* out, const char*) {  // of a file, as torch does for Triton
  return cuModuleLoadData(out, nullptr);
}
EXPORT CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char*) {
  *out = reinterpret_cast<CUfunction>(0x46);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = 32; break;
    default: *out = 0;  // no shared, constant or local bytes
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) {
  *out = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) {
  *out = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned, CUstream stream, void**, void**) {
  return static_cast<CUresult>(
      launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, nullptr, stream));
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return static_cast<CUresult>(launch(function,
                                      {config->gridDimX, config->gridDimY, config->gridDimZ},
                                      {config->blockDimX, config->blockDimY, config->blockDimZ},
                                      nullptr, config->hStream));
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                       const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                       const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
