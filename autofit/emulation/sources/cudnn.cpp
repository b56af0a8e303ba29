// cuDNN: descriptors that hold nothing yet, plans that take no workspace and compute nothing.
#include "emulation.h"

#include <cstdio>
#include <cstdlib>

namespace emulation {
namespace {

constexpr u64 HANDLE_BYTES = 2 * MIB;
constexpr int SUCCESS = 0, ALLOC_FAILED = 1003, INTERNAL_ERROR = 4000, EXECUTION_FAILED = 5000;
constexpr int TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15;  // cudnnBackendAttributeType_t
constexpr int ENGINE_SHARED_MEMORY = 304;            // cudnnBackendAttributeName_t

struct Handle {
  cudaStream_t stream;
  int physical;
};

}  // namespace
}  // namespace emulation

using namespace emulation;

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
    *out = calloc(1, 64);                         \
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
DESCRIPTOR(RNNDescriptor)
DESCRIPTOR(RNNDataDescriptor)
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

// The graph API. A descriptor remembers its type alone; every engine is offered once.

EXPORT int cudnnBackendCreateDescriptor(int type, void** out) {
  auto* made = static_cast<int*>(calloc(1, 64));
  *made = type;
  *out = made;
  return SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(void* made) {
  free(made);
  return SUCCESS;
}
EXPORT int cudnnBackendSetAttribute(void*, int, int, long long, const void*) { return SUCCESS; }
EXPORT int cudnnBackendFinalize(void*) { return SUCCESS; }
EXPORT int cudnnBackendGetAttribute(void*, int name, int type, long long wanted, long long* count,
                                    void* out) {
  // One engine configuration, no numerical notes, no workspace; descriptors stay as given.
  if (count) *count = type == TYPE_DESCRIPTOR || type == TYPE_INT64 ? 1 : 0;
  if (type == TYPE_INT64 && out && wanted > 0) *static_cast<long long*>(out) = 0;
  if (name == ENGINE_SHARED_MEMORY && out) *static_cast<int*>(out) = 0;
  return SUCCESS;
}
EXPORT int cudnnBackendExecute(void* handle, void*, void*) {
  cudaStream_t stream = static_cast<Handle*>(handle)->stream;
  int fault = due_fault("launch");
  if (fault == HANG) occupy_stream_forever(stream);
  else if (is_sticky(fault)) poison(fault);
  else if (fault) return EXECUTION_FAILED;
  advance_clock(stream, 5 * LAUNCH_NS);
  return poisoned_by() ? EXECUTION_FAILED : SUCCESS;
}
