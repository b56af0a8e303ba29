// CUDA graphs: what is captured runs at once, and a replay runs nothing. A cudaGraph_t is the number of
// its nodes.
#include "emulated_gpu.h"

#include <cstdlib>

using namespace emulated_gpu;

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  begin_capture(handle);
  return status();
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  *out = reinterpret_cast<cudaGraph_t>(new u64(end_capture(handle)));
  return status();
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* out) {
  *out = is_capturing(handle) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return status();
}
static cudaError_t capture_info(cudaStream_t handle, cudaStreamCaptureStatus* state, u64* id,
                                cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* count) {
  if (id) cudaStreamGetId(handle, id);
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(handle, state);
}
#if CUDART_VERSION < 13000  // a macro that stands for cudaStreamGetCaptureInfo_v2
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* state,
                                            u64* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes, size_t* count) {
  return capture_info(handle, state, id, graph, nodes, count);
}
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* state,
                                            u64* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return capture_info(handle, state, id, graph, nodes, count);
}
#endif
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, u64) {
  *out = static_cast<cudaGraphExec_t>(malloc(8));
  return status();
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t on) {
  if (cudaError_t error = enter_context()) return error;
  advance_clock(on, 10 * LAUNCH_NS);
  return status();
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = *reinterpret_cast<u64*>(graph);
  return status();
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<u64*>(graph);
  return status();
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  free(graph);
  return status();
}
