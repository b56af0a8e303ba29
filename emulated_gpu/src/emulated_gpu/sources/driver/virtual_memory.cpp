// Virtual memory of the driver API: addresses are reserved, and memory is mapped there in pieces.
// torch uses it for expandable segments.
#include "emulated_gpu.h"

#include <sys/mman.h>

namespace emulated_gpu {
namespace {

struct Allocation {  // what a CUmemGenericAllocationHandle stands for
  u64 bytes;
  int ordinal;
};
void* address(CUdeviceptr at) { return reinterpret_cast<void*>(at); }
CUresult failed(int code) { return static_cast<CUresult>(code); }

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *out = GRANULARITY_BYTES;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, u64) {
  u64 begin = reinterpret_cast<u64>(map_pages(bytes + GRANULARITY_BYTES, PROT_NONE));
  if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = round_up(begin, GRANULARITY_BYTES);
  munmap(address(begin), *out - begin);
  munmap(address(*out + bytes), begin + GRANULARITY_BYTES - *out);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  munmap(address(at), bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                            const CUmemAllocationProp* properties, u64) {
  if (cudaError_t error = enter_context()) return failed(error);
  if (int code = due_error("malloc")) return failed(code);
  int ordinal = properties->location.id;
  if (ordinal < 0 || ordinal >= static_cast<int>(visible_devices().size()))
    return CUDA_ERROR_INVALID_DEVICE;
  if (!reserve_bytes(visible_devices()[ordinal], bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<u64>(new Allocation{bytes, ordinal});
  write_log("create %zu", bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* allocation = reinterpret_cast<Allocation*>(handle);
  release_bytes(visible_devices()[allocation->ordinal], allocation->bytes);
  delete allocation;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                         u64) {
  if (mprotect(address(at), bytes, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  add_block(at, {bytes, 0, reinterpret_cast<Allocation*>(handle)->ordinal, Kind::DEVICE});
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  remove_blocks(at, bytes);
  mmap(address(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream stream) {
  return failed(fill_memory(address(at), value, sizeof value, count * sizeof value, stream));
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count, CUstream stream) {
  return failed(fill_memory(address(at), value, 1, count, stream));
}
EXPORT CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr at) {
  Lock lock(global_mutex());
  const Block* block = find_block(address(at));
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  bool device = block->kind == Kind::DEVICE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out) = block->ordinal; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(out) = at; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<u64*>(out) = at / GRANULARITY_BYTES; break;
    default: *static_cast<int*>(out) = 0;
  }
  return CUDA_SUCCESS;
}
#undef cuMemGetAddressRange
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr at) {
  Lock lock(global_mutex());
  u64 found = 0;
  const Block* block = find_block(address(at), &found);
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = found;
  if (bytes) *bytes = block->bytes;
  return CUDA_SUCCESS;
}
