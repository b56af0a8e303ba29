// cuBLAS and cuBLASLt: handles that take memory, products that take time and compute nothing.
//
// The first handle of a process loads the library's kernels onto the device. The workspaces of
// torch are its own: it allocates them and hands them over.
#include "emulated_gpu.h"

#include <cstdlib>
#include <cstring>

namespace emulated_gpu {
namespace {

constexpr u64 LIBRARY_BYTES = 64 * MIB, HANDLE_BYTES = 2 * MIB;
constexpr int SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, EXECUTION_FAILED = 13;
constexpr int VERSION = 130100, BATCH_COUNT = 5;  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT

struct Handle {
  cudaStream_t stream;
  int physical;
};
struct Layout {
  u64 rows, columns, batch;
};

int multiply(cudaStream_t stream, double rows, double columns, double inner, double batch) {
  int fault = due_fault("launch");
  if (fault == HANG) occupy_stream_forever(stream);
  else if (is_sticky(fault)) poison(fault);
  else if (fault) return EXECUTION_FAILED;
  advance_by_product(stream, rows * columns * inner * batch);
  return poisoned_by() ? EXECUTION_FAILED : SUCCESS;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT int cublasCreate_v2(void** out) {
  if (enter_context()) return poisoned_by() ? NOT_INITIALIZED : ALLOC_FAILED;
  if (due_error("cublas")) return ALLOC_FAILED;
  Lock lock(global_mutex());
  static bool loaded[MAX_DEVICES];
  int physical = current_physical();
  if (!reserve_bytes(physical, HANDLE_BYTES + (loaded[physical] ? 0 : LIBRARY_BYTES)))
    return ALLOC_FAILED;
  loaded[physical] = true;
  *out = new Handle{nullptr, physical};
  return SUCCESS;
}
EXPORT int cublasDestroy_v2(void* handle) {
  release_bytes(static_cast<Handle*>(handle)->physical, HANDLE_BYTES);
  delete static_cast<Handle*>(handle);
  return SUCCESS;
}
EXPORT int cublasSetStream_v2(void* handle, cudaStream_t stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return SUCCESS;
}
EXPORT int cublasGetStream_v2(void* handle, cudaStream_t* stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return SUCCESS;
}
EXPORT int cublasGetMathMode(void*, int* out) { return *out = 0; }
EXPORT int cublasSetMathMode(void*, int) { return SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void*, int* out) { return *out = 0; }
EXPORT int cublasSetPointerMode_v2(void*, int) { return SUCCESS; }
EXPORT int cublasSetWorkspace_v2(void*, void*, size_t) { return SUCCESS; }
EXPORT int cublasGetVersion_v2(void*, int* out) {
  *out = VERSION;
  return SUCCESS;
}
EXPORT const char* cublasGetStatusName(int code) {
  return code == ALLOC_FAILED ? "CUBLAS_STATUS_ALLOC_FAILED" : "CUBLAS_STATUS_EXECUTION_FAILED";
}
EXPORT const char* cublasGetStatusString(int code) {
  return code == ALLOC_FAILED ? "the resource allocation failed" : "the function failed to launch";
}

#define PRODUCT(NAME)                                                                  \
  EXPORT int NAME(void* handle, int, int, int rows, int columns, int inner) {          \
    return multiply(static_cast<Handle*>(handle)->stream, rows, columns, inner, 1);    \
  }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasZgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasDgemmBatched)
PRODUCT(cublasCgemmBatched)
PRODUCT(cublasZgemmBatched)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasCgemmStridedBatched)
PRODUCT(cublasZgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

EXPORT size_t cublasLtGetVersion() { return VERSION; }
EXPORT int cublasLtCreate(void** out) {
  *out = calloc(1, 8);
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutCreate(void** out, int, u64 rows, u64 columns, long long) {
  *out = new Layout{rows, columns, 1};
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t) {
  if (attribute == BATCH_COUNT)
    static_cast<Layout*>(layout)->batch = *static_cast<const int*>(value);
  return SUCCESS;
}
EXPORT int cublasLtMatmulDescCreate(void** out, int, int) { return cublasLtCreate(out); }
EXPORT int cublasLtMatmulDescDestroy(void* made) {
  free(made);
  return SUCCESS;
}
EXPORT int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
EXPORT int cublasLtMatmulPreferenceCreate(void** out) { return cublasLtCreate(out); }
EXPORT int cublasLtMatmulPreferenceDestroy(void* made) {
  free(made);
  return SUCCESS;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                          void* results, int* count) {
  struct {  // cublasLtMatmulHeuristicResult_t
    u64 algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
  } one{};
  memcpy(results, &one, sizeof one);
  *count = 1;
  return SUCCESS;
}
EXPORT int cublasLtMatmul(void*, void*, const void*, const void*, void* left, const void*, void*,
                          const void*, const void*, void*, void*, void* product, const void*, void*,
                          size_t, cudaStream_t stream) {
  const auto *a = static_cast<Layout*>(left), *d = static_cast<Layout*>(product);
  double inner = static_cast<double>(a->rows) * a->columns / (d->rows ? d->rows : 1);
  return multiply(stream, d->rows, d->columns, inner, d->batch);
}
