// cuDNN: handles, and descriptors of the API of before version 8. Its kernels compute nothing.
#include "cudnn.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emulated_gpu::cudnn {
namespace {

constexpr u64 HANDLE_BYTES = 2 * MIB;

}  // namespace

u64 element_bytes(int data_type) {
  switch (data_type) {
    case DOUBLE: return 8;
    case HALF:
    case BFLOAT16: return 2;
    default: return 4;
  }
}
int execute(Handle* handle) {
  int fault = due_fault("launch");
  if (fault == HANG) occupy_stream_forever(handle->stream);
  else if (is_sticky(fault)) poison(fault);
  else if (fault) return EXECUTION_FAILED;
  advance_clock(handle->stream, 5 * LAUNCH_NS);
  return poisoned_by() ? EXECUTION_FAILED : SUCCESS;
}

}  // namespace emulated_gpu::cudnn

using namespace emulated_gpu;
using namespace emulated_gpu::cudnn;

EXPORT size_t cudnnGetVersion() { return settings().cudnn_version; }
EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION / 1000 * 1000; }
EXPORT int cudnnGetProperty(int which, int* out) {  // major, minor, patch
  int version = settings().cudnn_version;
  *out = which == 0 ? version / 10000 : which == 1 ? version / 100 % 100 : version % 100;
  return SUCCESS;
}
EXPORT const char* cudnnGetErrorString(int code) {
  return code == ALLOC_FAILED ? "CUDNN_STATUS_ALLOC_FAILED" : "CUDNN_STATUS_EXECUTION_FAILED";
}
EXPORT void cudnnGetLastErrorString(char* out, size_t length) {
  snprintf(out, length, "%s", "");
}
EXPORT int cudnnCreate(void** out) {
  if (enter_context()) return poisoned_by() ? EXECUTION_FAILED : ALLOC_FAILED;
  if (due_error("cudnn")) return ALLOC_FAILED;
  if (!reserve_bytes(current_physical(), HANDLE_BYTES)) return ALLOC_FAILED;
  *out = new Handle{nullptr, current_physical()};
  return SUCCESS;
}
EXPORT int cudnnDestroy(void* handle) {
  release_bytes(static_cast<Handle*>(handle)->physical, HANDLE_BYTES);
  delete static_cast<Handle*>(handle);
  return SUCCESS;
}
EXPORT int cudnnSetStream(void* handle, cudaStream_t stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return SUCCESS;
}
EXPORT int cudnnGetStream(void* handle, cudaStream_t* stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return SUCCESS;
}

#define DESCRIPTOR(NAME)                          \
  EXPORT int cudnnCreate##NAME(void** out) {      \
    *out = calloc(1, 128);                        \
    return SUCCESS;                               \
  }                                               \
  EXPORT int cudnnDestroy##NAME(void* made) {     \
    free(made);                                   \
    return SUCCESS;                               \
  }
DESCRIPTOR(TensorDescriptor)
DESCRIPTOR(FilterDescriptor)
DESCRIPTOR(ConvolutionDescriptor)
DESCRIPTOR(ActivationDescriptor)
DESCRIPTOR(PoolingDescriptor)
DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(CTCLossDescriptor)
DESCRIPTOR(SpatialTransformerDescriptor)

EXPORT int cudnnDropoutGetStatesSize(void*, size_t* out) {
  *out = 4096;
  return SUCCESS;
}
EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*,
                                                                    void*, void*, void*,
                                                                    size_t* out) {
  *out = 4096;
  return SUCCESS;
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*,
                                                                size_t* out) {
  *out = 4096;
  return SUCCESS;
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*,
                                                             void*, void*, void*, void*,
                                                             size_t* out) {
  *out = 4096;
  return SUCCESS;
}

EXPORT int cudnnSetTensorNdDescriptor(void* made, int data_type, int dims, const int* sizes,
                                      const int* strides) {
  auto& tensor = *static_cast<cudnn::TensorDescriptor*>(made);
  tensor = {data_type, std::min(dims, 8), {}, {}};
  std::copy_n(sizes, tensor.dims, tensor.sizes.begin());
  std::copy_n(strides, tensor.dims, tensor.strides.begin());
  return SUCCESS;
}
EXPORT int cudnnGetTensorNdDescriptor(const void* made, int wanted, int* data_type, int* dims,
                                      int* sizes, int* strides) {
  const auto& tensor = *static_cast<const cudnn::TensorDescriptor*>(made);
  *data_type = tensor.data_type, *dims = tensor.dims;
  std::copy_n(tensor.sizes.begin(), std::min(wanted, tensor.dims), sizes);
  std::copy_n(tensor.strides.begin(), std::min(wanted, tensor.dims), strides);
  return SUCCESS;
}
