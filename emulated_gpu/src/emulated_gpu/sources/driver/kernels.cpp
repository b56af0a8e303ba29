// Kernels: registered by the libraries that hold them, launched into nothing.
//
// A launch checks its configuration, meets the faults that are due, and advances the stream's clock.
// A fault that a kernel causes is asynchronous: the launch succeeds, and later calls fail.
#include "emulated_gpu.h"

#include <cstring>
#include <unordered_map>

namespace emulated_gpu {
namespace {

constexpr u64 THREADS_PER_NS = 50, MAX_THREADS = 1024, MAX_GRID_YZ = 65535;
constexpr double MULTIPLICATIONS_PER_NS = 1e5;

std::unordered_map<const void*, const char*>& names() {
  static auto* all = new std::unordered_map<const void*, const char*>;
  return *all;
}
bool is_spin_kernel(const void* function) {  // that of torch.cuda._sleep
  Lock lock(global_mutex());
  auto found = names().find(function);
  return found != names().end() && strstr(found->second, "spin_kernel");
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
constexpr int MAX_NESTED = 16;
thread_local Configuration pushed[MAX_NESTED];
thread_local int nested = 0;

}  // namespace

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments,
                   cudaStream_t stream) {
  if (cudaError_t error = enter_context()) return error;
  u64 of_a_block = static_cast<u64>(block.x) * block.y * block.z;
  u64 threads = static_cast<u64>(grid.x) * grid.y * grid.z * of_a_block;
  if (!threads || of_a_block > MAX_THREADS || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ)
    return fail(cudaErrorInvalidConfiguration);
  int fault = due_fault("launch");
  if (fault == HANG) occupy_stream_forever(stream);
  else if (is_sticky(fault)) poison(fault);
  else if (fault) return fail(fault);
  u64 nanoseconds = LAUNCH_NS + threads / THREADS_PER_NS;
  if (arguments && is_spin_kernel(function)) {
    u64 cycles = *static_cast<u64*>(arguments[0]);
    nanoseconds += cycles / 2;
    occupy_stream(stream, cycles / 2);
  }
  advance_clock(stream, nanoseconds);
  return cudaSuccess;
}

void advance_by_product(cudaStream_t stream, double multiplications) {
  advance_clock(stream, LAUNCH_NS + static_cast<u64>(multiplications / MULTIPLICATIONS_PER_NS));
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*,
                                   uint3*, dim3*, dim3*, int*) {
  Lock lock(global_mutex());
  names()[host] = name;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed[nested++ % MAX_NESTED] = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                              void* stream) {
  const Configuration& last = pushed[--nested % MAX_NESTED];
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                    size_t, cudaStream_t stream) {
  return launch(function, grid, block, arguments, stream);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block,
                                      void** arguments, size_t, cudaStream_t stream) {
  return launch(function, grid, block, arguments, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                               void** arguments, size_t, cudaStream_t stream) {
  return launch(function, grid, block, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void** arguments) {
  return launch(function, config->gridDim, config->blockDim, arguments, config->stream);
}
// The architecture of the kernels that a card runs: the newest of its generation that it is not older
// than, of those that torch is built for, which the build defines. CUB refuses another.
static int kernel_architecture(const Card& of) {
  int own = of.major * 10 + of.minor, found = own;
  for (int built : {KERNEL_ARCHITECTURES})
    if (built <= own && built / 10 == of.major) found = built;
  return found;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  if (cudaError_t error = enter_context()) return error;
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  const Card& of = card(current_device());
  out->ptxVersion = out->binaryVersion = kernel_architecture(of);
  out->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return enter_context();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int block,
                                                                 size_t) {
  *out = block > 0 && block < 1024 ? 2048 / block : 2;
  if (*out > 32) *out = 32;
  return enter_context();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* out, const void* function, int block, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, function, block, shared);
}
