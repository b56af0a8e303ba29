// Memory of the runtime API: device memory and pinned host memory, copies and fills.
//
// Device memory is host memory that the kernel maps when it is touched, so it costs nothing until
// something is written, and pointers to it can be read by the host.
#include "emulated_gpu.h"

#include <atomic>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace emulated_gpu {
namespace {

constexpr u64 COPY_NS = 1000, HOST_BYTES_PER_NS = 25, DEVICE_BYTES_PER_NS = 2000;

std::map<u64, Block>& blocks() {
  static auto* all = new std::map<u64, Block>;
  return *all;
}

bool is_device_memory(const void* pointer) {
  Lock lock(global_mutex());
  const Block* block = find_block(pointer);
  return block && block->kind == Kind::DEVICE;
}

std::atomic<void (*)()> on_read{nullptr};  // called when the host reads device memory

cudaError_t copy(void* to, const void* from, u64 bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 bool wait) {
  if (cudaError_t error = enter_context()) return error;
  if (int code = due_error("memcpy")) return fail(code);
  bool within = kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) within = is_device_memory(to) && is_device_memory(from);
  advance_clock(stream, COPY_NS + bytes / (within ? DEVICE_BYTES_PER_NS / 2 : HOST_BYTES_PER_NS));
  bool to_host = kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && !within &&
                                                    is_device_memory(from));
  // What no kernel reads or wrote need not be copied: it would cost the host's memory. Where those of
  // integers compute, their operators copy.
  const std::string& values = settings().values;
  bool copied = to_host || values == "1" || (values == "0" && !within);
  if (bytes && copied) memmove(to, from, bytes);
  if (auto* seen = on_read.load(); seen && to_host) seen();
  return wait && !within ? synchronize_stream(stream) : status();
}

cudaError_t allocate_device(void** out, u64 bytes) {
  if (cudaError_t error = enter_context()) return error;
  *out = nullptr;
  if (int code = due_error("malloc")) return fail(code);
  if (!bytes) return status();
  u64 charged = round_up(bytes, GRANULARITY_BYTES);
  if (!reserve_bytes(current_physical(), charged)) return fail(cudaErrorMemoryAllocation);
  u64 mapped = round_up(bytes, PAGE_BYTES);
  void* at = map_device_pages(mapped);
  if (!at) {
    release_bytes(current_physical(), charged);
    return fail(cudaErrorMemoryAllocation);
  }
  add_block(reinterpret_cast<u64>(at), {mapped, charged, current_device(), Kind::DEVICE});
  write_log("malloc %llu at %p", bytes, at);
  *out = at;
  return status();
}

cudaError_t free_block(void* pointer) {
  Lock lock(global_mutex());
  auto found = blocks().find(reinterpret_cast<u64>(pointer));
  if (found == blocks().end()) return fail(cudaErrorInvalidValue);
  const Block& block = found->second;
  if (block.kind == Kind::DEVICE) unmap_device_pages(pointer, block.bytes);
  else munmap(pointer, block.bytes);
  if (block.charged_bytes)
    release_bytes(visible_devices()[block.ordinal], block.charged_bytes);
  write_log("free %p (%llu)", pointer, block.bytes);
  blocks().erase(found);
  return status();
}

void fill_pages(void* at, u64 pattern, u64 pattern_bytes, u64 bytes) {
  if (pattern_bytes == 1) {
    memset(at, static_cast<int>(pattern), bytes);
    return;
  }
  for (u64 done = 0; done < bytes; done += pattern_bytes)
    memcpy(static_cast<char*>(at) + done, &pattern, pattern_bytes);
}

}  // namespace

void* map_pages(u64 bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

Block* find_block(const void* pointer, u64* base) {
  u64 address = reinterpret_cast<u64>(pointer);
  auto after = blocks().upper_bound(address);
  if (after == blocks().begin()) return nullptr;
  --after;
  if (address >= after->first + after->second.bytes) return nullptr;
  if (base) *base = after->first;
  return &after->second;
}
void add_block(u64 base, const Block& block) {
  Lock lock(global_mutex());
  blocks()[base] = block;
}
void remove_blocks(u64 base, u64 bytes) {
  Lock lock(global_mutex());
  blocks().erase(blocks().lower_bound(base), blocks().lower_bound(base + bytes));
}

cudaError_t fill_memory(void* at, u64 pattern, u64 pattern_bytes, u64 bytes, cudaStream_t stream) {
  if (cudaError_t error = enter_context()) return error;
  advance_clock(stream, COPY_NS + bytes / DEVICE_BYTES_PER_NS);
  u64 begin = reinterpret_cast<u64>(at), end = begin + bytes;
  u64 from = round_up(begin, PAGE_BYTES), to = end / PAGE_BYTES * PAGE_BYTES;
  // Whole pages are given back to the host's kernel: they read as zeros, and cost nothing.
  bool give_back = !pattern && bytes > MIB && is_device_memory(at) && to > from &&
                   !madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
  if (give_back) {
    memset(at, 0, from - begin);
    memset(reinterpret_cast<void*>(to), 0, end - to);
  } else {
    fill_pages(at, pattern, pattern_bytes, bytes);
  }
  return status();
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT void emulated_gpu_on_read(void (*seen)()) { on_read = seen; }

EXPORT cudaError_t cudaMalloc(void** out, size_t bytes) { return allocate_device(out, bytes); }
EXPORT cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
  return allocate_device(out, bytes);
}
EXPORT cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return allocate_device(out, bytes);
}
EXPORT cudaError_t cudaFree(void* pointer) {
  if (cudaError_t error = enter_context()) return error;  // cudaFree(nullptr) makes a context
  return pointer ? free_block(pointer) : status();
}
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (cudaError_t error = enter_context()) return error;
  u64 used = used_bytes(current_physical());
  *total_bytes = card(current_device()).total_bytes;
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  return status();
}

EXPORT cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (cudaError_t error = enter_context()) return error;
  if (int code = due_error("host_malloc")) return fail(code);
  u64 mapped = round_up(bytes, PAGE_BYTES);
  void* at = map_pages(mapped, PROT_READ | PROT_WRITE);
  if (!at) return fail(cudaErrorMemoryAllocation);
  add_block(reinterpret_cast<u64>(at), {mapped, 0, current_device(), Kind::HOST});
  *out = at;
  return status();
}
EXPORT cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void* pointer) { return pointer ? free_block(pointer) : status(); }
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  if (cudaError_t error = enter_context()) return error;
  Lock lock(global_mutex());
  if (find_block(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  add_block(reinterpret_cast<u64>(pointer), {bytes, 0, current_device(), Kind::HOST});
  return status();
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(global_mutex());
  bool erased = blocks().erase(reinterpret_cast<u64>(pointer));
  return erased ? status() : fail(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) {
  *out = host;
  return status();
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  if (poisoned_by()) return status();
  Lock lock(global_mutex());
  const Block* block = find_block(pointer);
  out->device = block ? block->ordinal : cudaInvalidDeviceId;
  out->type = block ? static_cast<cudaMemoryType>(block->kind) : cudaMemoryTypeUnregistered;
  out->devicePointer = block ? const_cast<void*>(pointer) : nullptr;
  out->hostPointer = block && block->kind == Kind::HOST ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr, true);
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                       cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, false);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    if (cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch,
                                 static_cast<const char*>(from) + row * from_pitch, width, kind,
                                 stream, false))
      return error;
  return status();
}
EXPORT cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return fill_memory(at, static_cast<unsigned char>(value), 1, bytes, nullptr);
}
EXPORT cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill_memory(at, static_cast<unsigned char>(value), 1, bytes, stream);
}
EXPORT cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  *out = const_cast<void*>(symbol);
  return status();
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes,
                                      size_t offset, cudaMemcpyKind) {
  memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, from, bytes);
  return status();
}
