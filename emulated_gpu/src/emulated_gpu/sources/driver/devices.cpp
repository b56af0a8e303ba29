// Devices and their properties: those of the card by name, the rest by compute capability.
//
// Sizes by capability: CUDA C++ Programming Guide, table "Technical Specifications per Compute
// Capability". Kernels size their scratch memory by them, and Triton its tiles.
#include "emulated_gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <strings.h>

namespace emulated_gpu {
namespace {

struct Architecture {
  int capability;  // 10 * major + minor
  int threads, blocks;  // resident on a multiprocessor
  int shared_kib, shared_opt_in_kib;  // of a multiprocessor, of a block that asks for more
};
const Architecture ARCHITECTURES[] = {
    {70, 2048, 32, 96, 96},    {75, 1024, 16, 64, 64},    {80, 2048, 32, 164, 163},
    {86, 1536, 16, 100, 99},   {87, 1536, 16, 164, 163},  {89, 1536, 24, 100, 99},
    {90, 2048, 32, 228, 227},  {100, 2048, 32, 228, 227}, {103, 2048, 32, 228, 227},
    {110, 1536, 24, 228, 227}, {120, 1536, 24, 100, 99},  {121, 1536, 24, 100, 99},
};
const Architecture& architecture(const Card& card) {
  const Architecture* best = &ARCHITECTURES[0];
  for (const Architecture& each : ARCHITECTURES)
    if (each.capability <= 10 * card.major + card.minor) best = &each;
  return *best;
}
constexpr int SHARED_OF_A_BLOCK = 48 << 10, L2_BYTES = 50 << 20, FIRST_BUS = 0x10;

std::vector<int> parse_visible_devices() {  // an entry that names no card ends the list
  std::vector<int> found;
  int count = static_cast<int>(settings().cards.size());
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int physical = 0; physical < count; physical++) found.push_back(physical);
    return found;
  }
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int chosen = -1;
    char* end = nullptr;
    long index = strtol(part.c_str(), &end, 10);
    if (!part.empty() && !*end) chosen = index >= 0 && index < count ? static_cast<int>(index) : -1;
    else if (part.size() > 4)
      for (int physical = 0; physical < count; physical++)
        if (!strncasecmp(uuid_text(physical).c_str(), part.c_str(), part.size())) chosen = physical;
    for (int before : found)
      if (before == chosen) return {};
    if (chosen < 0) break;
    found.push_back(chosen);
  }
  return found;
}

bool names_a_device(int ordinal) {
  return ordinal >= 0 && ordinal < static_cast<int>(visible_devices().size());
}

}  // namespace

const std::vector<int>& visible_devices() {
  static const auto* devices = new std::vector<int>(parse_visible_devices());
  return *devices;
}

const Card& card(int ordinal) { return settings().cards[visible_devices()[ordinal]]; }

void uuid_bytes(int physical, unsigned char* sixteen) {  // another machine's cards have others
  u64 hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (char letter : settings().machine)
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ull;
  for (int i = 0; i < 16; i++)
    sixteen[i] = static_cast<unsigned char>(13 * i + physical + (hash >> (8 * (i % 8))));
}

std::string uuid_text(int physical) {
  unsigned char bytes[16];
  uuid_bytes(physical, bytes);
  std::string text = settings().nvml.find("mig") != std::string::npos ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; i++) {
    char two[3];
    snprintf(two, sizeof two, "%02x", bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += two;
  }
  return text;
}

void bus_id(int physical, char* out, int length) {
  snprintf(out, length, "0000:%02X:00.0", FIRST_BUS + physical);
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT cudaError_t cudaGetDeviceCount(int* out) {
  *out = 0;
  if (int code = device_problem()) return fail(code);
  *out = static_cast<int>(visible_devices().size());
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int ordinal) {
  if (int code = device_problem()) return fail(code);
  if (!names_a_device(ordinal)) return fail(cudaErrorInvalidDevice);
  const Card& of = card(ordinal);
  const Architecture& limits = architecture(of);
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", of.name.c_str());
  uuid_bytes(visible_devices()[ordinal], reinterpret_cast<unsigned char*>(out->uuid.bytes));
  out->totalGlobalMem = of.total_bytes;
  out->sharedMemPerBlock = SHARED_OF_A_BLOCK;
  out->sharedMemPerBlockOptin = limits.shared_opt_in_kib << 10;
  out->sharedMemPerMultiprocessor = limits.shared_kib << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = limits.threads;
  out->maxBlocksPerMultiProcessor = limits.blocks;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->major = of.major;
  out->minor = of.minor;
  out->multiProcessorCount = of.multiprocessors;
  out->memoryBusWidth = 5120;
  out->l2CacheSize = L2_BYTES;
  out->totalConstMem = 65536;
  out->textureAlignment = 512;
  out->texturePitchAlignment = 32;
  out->memPitch = 2147483647;
  out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
  out->concurrentKernels = out->canMapHostMemory = out->cooperativeLaunch = 1;
  out->memoryPoolsSupported = out->ECCEnabled = 1;
  out->asyncEngineCount = 3;
  out->pciBusID = FIRST_BUS + visible_devices()[ordinal];
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int ordinal) {
  if (!names_a_device(ordinal)) return fail(cudaErrorInvalidDevice);
  const Card& of = card(ordinal);
  const Architecture& limits = architecture(of);
  switch (static_cast<int>(attribute)) {
    case cudaDevAttrComputeCapabilityMajor: *out = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = of.minor; break;
    case cudaDevAttrMultiProcessorCount: *out = of.multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = SHARED_OF_A_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = limits.shared_opt_in_kib << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = limits.shared_kib << 10; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = limits.threads; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = limits.blocks; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *out = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *out = 64; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *out = 65536; break;
    case cudaDevAttrL2CacheSize: *out = L2_BYTES; break;
    case cudaDevAttrPciBusId: *out = FIRST_BUS + visible_devices()[ordinal]; break;
    case cudaDevAttrClockRate: *out = 1980000; break;
    case cudaDevAttrMemoryClockRate: *out = 2619000; break;
    case cudaDevAttrTextureAlignment: *out = 512; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch: *out = 1; break;
    default: *out = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int ordinal) {
  if (!names_a_device(ordinal)) return fail(cudaErrorInvalidDevice);
  bus_id(visible_devices()[ordinal], out, length);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* out) {
  *out = settings().driver_version;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = CUDART_VERSION / 1000 * 1000;
  return cudaSuccess;
}

EXPORT CUresult cuDriverGetVersion(int* out) { return static_cast<CUresult>(cudaDriverGetVersion(out)); }
EXPORT CUresult cuDeviceGetCount(int* out) { return static_cast<CUresult>(cudaGetDeviceCount(out)); }
EXPORT CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  if (!names_a_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *out = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* out, int length, CUdevice ordinal) {
  snprintf(out, length, "%s", card(ordinal).name.c_str());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* out, CUdevice ordinal) {
  uuid_bytes(visible_devices()[ordinal], reinterpret_cast<unsigned char*>(out->bytes));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* out, CUdevice ordinal) {
  *out = card(ordinal).total_bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice ordinal) {
  return static_cast<CUresult>(
      cudaDeviceGetAttribute(out, static_cast<cudaDeviceAttr>(attribute), ordinal));
}
