// NVML: the cards, their memory, and the processes that hold it.
//
// EMULATED_GPU_NVML limits it as containers and drivers do: "refuse" (nvmlInit fails),
// "noproc" (no process is listed), "nomem" (their memory is not available), "hostpid" (pids are
// those of another pid namespace), "nouuid" (a card is not found by its UUID), "mig" (the cards are
// slices of larger ones, whose memory and processes a container may not see).
#include "emulated_gpu.h"

#include <cstring>
#include <strings.h>

namespace emulated_gpu {
namespace {

constexpr int SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6;
constexpr int NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15;
constexpr u64 DRIVER_RESERVED_BYTES = 600 * MIB, NOT_AVAILABLE = ~0ull;
constexpr unsigned FOREIGN_PIDS = 1000000, NO_INSTANCE = ~0u;

bool limited_to(const char* word) { return settings().nvml.find(word) != std::string::npos; }
unsigned card_count() { return static_cast<unsigned>(settings().cards.size()); }
void* handle_of(unsigned physical) { return reinterpret_cast<void*>(physical + 1ull); }
int physical_of(void* handle) { return static_cast<int>(reinterpret_cast<u64>(handle)) - 1; }
const Card& card_of(void* handle) { return settings().cards[physical_of(handle)]; }
int write_text(char* out, unsigned length, const std::string& text) {
  snprintf(out, length, "%s", text.c_str());
  return SUCCESS;
}

struct ProcessInfo {
  unsigned pid;
  u64 used_bytes;
  unsigned gpu_instance, compute_instance;
};
struct ProcessInfoV1 {
  unsigned pid;
  u64 used_bytes;
};
std::vector<ProcessInfo> processes(void* handle) {
  std::vector<ProcessInfo> listed;
  if (limited_to("noproc")) return listed;
  for (const Holder& each : holders(physical_of(handle)))
    listed.push_back({each.pid + (limited_to("hostpid") ? FOREIGN_PIDS : 0),
                      limited_to("nomem") ? NOT_AVAILABLE : each.bytes, NO_INSTANCE, NO_INSTANCE});
  return listed;
}
template <class Info, class Convert>
int list_processes(void* handle, unsigned* count, Info* out, Convert convert) {
  auto all = processes(handle);
  unsigned room = *count;
  *count = static_cast<unsigned>(all.size());
  for (unsigned i = 0; i < all.size() && i < room && out; i++) out[i] = convert(all[i]);
  return all.size() > room ? INSUFFICIENT_SIZE : SUCCESS;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT int nvmlInitWithFlags(unsigned) {
  if (int code = due_error("nvml_init")) return code;
  return limited_to("refuse") ? DRIVER_NOT_LOADED : SUCCESS;
}
EXPORT int nvmlInit_v2() { return nvmlInitWithFlags(0); }
EXPORT int nvmlInit() { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown() { return SUCCESS; }
EXPORT const char* nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}
EXPORT int nvmlDeviceGetCount_v2(unsigned* out) {
  *out = card_count();
  return SUCCESS;
}
EXPORT int nvmlDeviceGetCount(unsigned* out) { return nvmlDeviceGetCount_v2(out); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
  if (index >= card_count()) return INVALID_ARGUMENT;
  *out = handle_of(index);
  return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, void** out) {
  for (unsigned index = 0; index < card_count() && !limited_to("nouuid"); index++)
    if (uuid_text(index) == uuid) {
      *out = handle_of(index);
      return SUCCESS;
    }
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** out) {
  for (unsigned index = 0; index < card_count(); index++) {
    char own[32];
    bus_id(index, own, sizeof own);
    size_t given = strlen(id), length = strlen(own);  // the domain may have eight digits
    if (given >= length && !strcasecmp(id + given - length, own)) {
      *out = handle_of(index);
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetIndex(void* handle, unsigned* out) {
  *out = physical_of(handle);
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMinorNumber(void* handle, unsigned* out) {
  return nvmlDeviceGetIndex(handle, out);
}
EXPORT int nvmlDeviceGetName(void* handle, char* out, unsigned length) {
  return write_text(out, length, card_of(handle).name);
}
EXPORT int nvmlDeviceGetUUID(void* handle, char* out, unsigned length) {
  return write_text(out, length, uuid_text(physical_of(handle)));
}
EXPORT int nvmlSystemGetDriverVersion(char* out, unsigned length) {
  return write_text(out, length, "580.95.05");
}
EXPORT int nvmlSystemGetNVMLVersion(char* out, unsigned length) {
  return write_text(out, length, "13.580.95.05");
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* out) {
  *out = settings().driver_version;
  return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int* out) {
  return nvmlSystemGetCudaDriverVersion_v2(out);
}

// Version 1 counts what the driver reserves as used, version 2 tells it apart.

struct MemoryInfo {
  u64 total, free, used;
};
struct MemoryInfoV2 {
  unsigned version;
  u64 total, reserved, free, used;
};
EXPORT int nvmlDeviceGetMemoryInfo_v2(void* handle, MemoryInfoV2* out) {
  if (int code = due_error("nvml")) return code;
  if (limited_to("mig")) return NO_PERMISSION;
  u64 total = card_of(handle).total_bytes, used = used_bytes(physical_of(handle));
  out->total = total + DRIVER_RESERVED_BYTES;
  out->reserved = DRIVER_RESERVED_BYTES;
  out->free = used < total ? total - used : 0;
  out->used = used;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, MemoryInfo* out) {
  MemoryInfoV2 told{};
  if (int code = nvmlDeviceGetMemoryInfo_v2(handle, &told)) return code;
  *out = {told.total, told.free, told.used + told.reserved};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, ProcessInfo* out) {
  if (int code = due_error("nvml")) return code;
  if (limited_to("mig")) return NO_PERMISSION;
  return list_processes(handle, count, out, [](const ProcessInfo& each) { return each; });
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void* handle, unsigned* count, ProcessInfo* out) {
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, ProcessInfoV1* out) {
  return list_processes(handle, count, out, [](const ProcessInfo& each) {
    return ProcessInfoV1{each.pid, each.used_bytes};
  });
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceIsMigDeviceHandle(void*, unsigned* out) {
  *out = limited_to("mig");
  return SUCCESS;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  *major = card_of(handle).major;
  *minor = card_of(handle).minor;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeMode(void*, int* out) {
  *out = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetUtilizationRates(void*, unsigned* out) {
  out[0] = out[1] = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetTemperature(void*, int, unsigned* out) {
  *out = 41;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetPowerUsage(void*, unsigned* out) {
  *out = 120000;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetClockInfo(void*, int, unsigned* out) {
  *out = 1980;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetP2PStatus(void*, void*, int, int* out) {
  *out = 1;
  return SUCCESS;
}
