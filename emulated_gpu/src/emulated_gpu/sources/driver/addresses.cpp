// The addresses of device memory: of free blocks of one size, PyTorch's allocator takes the one with
// the lowest address, so they decide what a training reserves.
//
// A rule found in recorded trainings of an H200: addresses never used before are given downwards,
// freed ones again from the lowest up; those of allocations below 4 MiB, PyTorch's small segments,
// lie above all others and are given upwards. With it the recorded decoders and transformers of
// this repository (benchmarks/) reserve what was recorded; with any one order, some do not.
#include "emulated_gpu.h"

#include <map>
#include <sys/mman.h>

namespace emulated_gpu {
namespace {

constexpr u64 GIB = 1024 * MIB, SMALL_BYTES = 4 * MIB, ALIGNMENT_BYTES = 2 * MIB;
constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Region {
  u64 lowest, top;  // what was given lies between them
  std::map<u64, u64> taken;  // begin -> end

  u64 lowest_gap(u64 bytes) const {  // 0: there is none
    u64 at = lowest;
    for (const auto& [begin, end] : taken) {
      if (begin - at >= bytes) break;
      at = round_up(end, ALIGNMENT_BYTES);
    }
    return at <= top && top - at >= bytes ? at : 0;
  }
};
struct Space {
  u64 bottom = 0, top = 0;
  Region small, large;

  Space() {  // as much as the limits of the process allow
    for (u64 bytes = 4096 * GIB; bytes >= 64 * GIB && !bottom; bytes /= 2) {
      void* at = mmap(nullptr, bytes, PROT_NONE, FLAGS, -1, 0);
      if (at == MAP_FAILED) continue;
      bottom = round_up(reinterpret_cast<u64>(at), ALIGNMENT_BYTES);
      top = (reinterpret_cast<u64>(at) + bytes) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    }
    u64 middle = round_up(top - (top - bottom) / 4, ALIGNMENT_BYTES);
    small = {middle, top, {}};
    large = {middle, middle, {}};
  }
  Region& of(u64 bytes) { return bytes < SMALL_BYTES ? small : large; }
};
Space& space() {
  static auto* only = new Space;
  return *only;
}

}  // namespace

void* map_device_pages(u64 bytes) {
  Lock lock(global_mutex());
  Region& region = space().of(bytes);
  u64 at = region.lowest_gap(bytes), room = region.lowest - space().bottom;
  if (!at && (&region == &space().small || room < bytes + ALIGNMENT_BYTES)) return nullptr;
  if (!at) at = region.lowest = (region.lowest - bytes) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
  void* wanted = reinterpret_cast<void*>(at);
  if (mmap(wanted, bytes, PROT_READ | PROT_WRITE, FLAGS | MAP_FIXED, -1, 0) == MAP_FAILED)
    return nullptr;
  region.taken[at] = at + bytes;
  return wanted;
}
void unmap_device_pages(void* at, u64 bytes) {  // the addresses stay reserved: nothing else may lie there
  Lock lock(global_mutex());
  mmap(at, bytes, PROT_NONE, FLAGS | MAP_FIXED, -1, 0);
  space().of(bytes).taken.erase(reinterpret_cast<u64>(at));
}

}  // namespace emulated_gpu
