// What the files of the emulated GPU share. Each file promises one thing, said at its head.
//
// Devices have two numbers. A physical device is a card of the emulated machine, and what NVML
// counts. An ordinal is what a process calls it under CUDA_VISIBLE_DEVICES, and what CUDA counts.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulated_gpu {

using u64 = unsigned long long;
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr int MAX_DEVICES = 8;
constexpr u64 KIB = 1024, MIB = 1024 * KIB, PAGE_BYTES = 4 * KIB, GRANULARITY_BYTES = 2 * MIB;

inline u64 round_up(u64 bytes, u64 to) { return (bytes + to - 1) / to * to; }
std::recursive_mutex& global_mutex();

// settings.cpp
struct Card {
  std::string name;
  u64 total_bytes = 0, context_bytes = 0, held_by_others_bytes = 0;
  int major = 0, minor = 0, multiprocessors = 0;
};
struct Settings {
  std::vector<Card> cards;
  std::string machine, faults, nvml, values;
  int driver_version, cudnn_version;
};
const Settings& settings();
void write_log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// process_table.cpp
struct Holder {
  int pid;
  u64 bytes;
};
bool reserve_bytes(int physical, u64 bytes);
void release_bytes(int physical, u64 bytes);
u64 used_bytes(int physical);
std::vector<Holder> holders(int physical);

// faults.cpp
constexpr int HANG = -1;
int due_fault(const char* call);       // an error code, HANG, or 0
int due_error(const char* call);       // as due_fault, and hangs here where that is due
[[noreturn]] void hang();

// errors.cpp
bool is_sticky(int code);
void poison(int code);                 // every later call of this process returns it
int poisoned_by();                     // 0 where the process is healthy
cudaError_t fail(int code);            // also remembers it for cudaGetLastError
cudaError_t status();                  // the sticky error, or success

// devices.cpp
const std::vector<int>& visible_devices();  // by ordinal, the physical device
const Card& card(int ordinal);
int device_problem();                  // why no device can be used, 0 where they can
void uuid_bytes(int physical, unsigned char* sixteen);
std::string uuid_text(int physical);
void bus_id(int physical, char* out, int length);

// contexts.cpp
int current_device();                  // ordinal
int current_physical();
void set_current_device(int ordinal);
bool has_context(int ordinal);
cudaError_t enter_context();           // what every call that needs a context begins with

// streams.cpp
void advance_clock(cudaStream_t stream, u64 nanoseconds);
void occupy_stream(cudaStream_t stream, u64 nanoseconds);  // waiting for it takes that long
void occupy_stream_forever(cudaStream_t stream);
cudaError_t synchronize_stream(cudaStream_t stream);
void begin_capture(cudaStream_t stream);
u64 end_capture(cudaStream_t stream);  // how many works were captured
bool is_capturing(cudaStream_t stream);

// memory.cpp
enum class Kind { HOST = 1, DEVICE = 2 };  // as in cudaMemoryType
struct Block {
  u64 bytes, charged_bytes;
  int ordinal;
  Kind kind;
};
Block* find_block(const void* pointer, u64* base = nullptr);
void add_block(u64 base, const Block& block);
void remove_blocks(u64 base, u64 bytes);
void* map_pages(u64 bytes, int protection);
cudaError_t fill_memory(void* at, u64 pattern, u64 pattern_bytes, u64 bytes, cudaStream_t stream);

// addresses.cpp
void* map_device_pages(u64 bytes);  // nullptr: there is no room
void unmap_device_pages(void* at, u64 bytes);

// kernels.cpp
constexpr u64 LAUNCH_NS = 2000;
cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments,
                   cudaStream_t stream);
void advance_by_product(cudaStream_t stream, double multiplications);

// not_emulated.cpp
void note_estimate(const char* what);  // sizes that this process was told are not NVIDIA's

}  // namespace emulated_gpu
