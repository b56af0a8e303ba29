// Streams, events and the clock.
//
// The work of a call is done at once, in the calling thread. Each stream has a clock in nanoseconds
// that advances by what the work is supposed to take, and events read it: elapsed times grow with
// the work, and mean nothing else. Only torch.cuda._sleep and a kernel that hangs make a wait long.
#include "emulated_gpu.h"

#include <ctime>
#include <set>

namespace emulated_gpu {
namespace {

constexpr u64 HOST_NS = 4000, FOREVER = ~0ull, NAP_NS = 5000000;

struct Stream {
  u64 clock_ns = 0;      // at which its work is done
  u64 busy_until = 0;    // of the host's clock: a wait does not end before
  u64 id = 1;
  unsigned flags = 0;
  int priority = 0, ordinal = 0;
  bool capturing = false;
  u64 captured = 0;      // works since the capture began
};
struct Event {
  u64 clock_ns = 0, busy_until = 0;
  bool timed = true, recorded = false;
};

u64 host_clock_ns = 0;

u64 now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}
std::set<Stream*>& streams() {
  static auto* all = new std::set<Stream*>;
  return *all;
}
Stream* stream_of(cudaStream_t handle) {  // null, 1 and 2 are the legacy and per-thread defaults
  if (reinterpret_cast<u64>(handle) > 2) return reinterpret_cast<Stream*>(handle);
  static Stream* defaults[MAX_DEVICES];
  Lock lock(global_mutex());
  Stream*& chosen = defaults[current_device()];
  if (!chosen) {
    chosen = new Stream;
    chosen->ordinal = current_device();
    streams().insert(chosen);
  }
  return chosen;
}
Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

void wait_until(u64 time) {
  if (time == FOREVER) hang();
  while (now() < time) {
    timespec nap = {0, NAP_NS};
    nanosleep(&nap, nullptr);
  }
}
cudaError_t synchronize(Stream* only) {  // null: every stream of the device
  if (cudaError_t error = enter_context()) return error;
  if (int code = due_error("sync")) return fail(code);
  u64 until = 0;
  {
    Lock lock(global_mutex());
    for (Stream* each : streams())
      if (only ? each == only : each->ordinal == current_device()) {
        if (each->busy_until > until) until = each->busy_until;
        if (each->clock_ns > host_clock_ns) host_clock_ns = each->clock_ns;
      }
  }
  wait_until(until);
  return status();
}

}  // namespace

void advance_clock(cudaStream_t handle, u64 nanoseconds) {
  Lock lock(global_mutex());
  Stream* stream = stream_of(handle);
  host_clock_ns += HOST_NS;
  if (stream->clock_ns < host_clock_ns) stream->clock_ns = host_clock_ns;
  stream->clock_ns += nanoseconds;
  stream->captured++;
}
void occupy_stream(cudaStream_t handle, u64 nanoseconds) {
  Lock lock(global_mutex());
  Stream* stream = stream_of(handle);
  u64 time = now();
  if (stream->busy_until == FOREVER) return;
  stream->busy_until = (stream->busy_until > time ? stream->busy_until : time) + nanoseconds;
}
void occupy_stream_forever(cudaStream_t handle) {
  Lock lock(global_mutex());
  stream_of(handle)->busy_until = FOREVER;
}
cudaError_t synchronize_stream(cudaStream_t handle) { return synchronize(stream_of(handle)); }

void begin_capture(cudaStream_t handle) {
  Lock lock(global_mutex());
  stream_of(handle)->capturing = true;
  stream_of(handle)->captured = 0;
}
u64 end_capture(cudaStream_t handle) {
  Lock lock(global_mutex());
  stream_of(handle)->capturing = false;
  return stream_of(handle)->captured;
}
bool is_capturing(cudaStream_t handle) {
  Lock lock(global_mutex());
  return stream_of(handle)->capturing;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  if (cudaError_t error = enter_context()) return error;
  Lock lock(global_mutex());
  static u64 created = 10;
  auto* made = new Stream;
  made->flags = flags;
  made->priority = priority;
  made->ordinal = current_device();
  made->id = ++created;
  streams().insert(made);
  *out = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock(global_mutex());
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!streams().erase(stream)) return fail(cudaErrorInvalidResourceHandle);
  delete stream;
  return status();
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* out) {
  *out = stream_of(handle)->priority;
  return status();
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* out) {
  *out = stream_of(handle)->flags;
  return status();
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t handle, u64* out) {
  *out = stream_of(handle)->id;
  return status();
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* out) {
  *out = stream_of(handle)->ordinal;
  return status();
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return enter_context();
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return synchronize(stream_of(handle));
}
EXPORT cudaError_t cudaDeviceSynchronize() { return synchronize(nullptr); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (poisoned_by()) return status();
  return stream_of(handle)->busy_until > now() ? fail(cudaErrorNotReady) : cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned) {
  Lock lock(global_mutex());
  Stream* stream = stream_of(handle);
  const Event* event = event_of(awaited);
  if (stream->clock_ns < event->clock_ns) stream->clock_ns = event->clock_ns;
  if (stream->busy_until < event->busy_until) stream->busy_until = event->busy_until;
  return status();
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                         void* data, unsigned) {
  function(handle, status(), data);
  return status();
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return status();
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  if (cudaError_t error = enter_context()) return error;
  auto* made = new Event;
  made->timed = !(flags & cudaEventDisableTiming);
  *out = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event_of(handle);
  return status();
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  if (cudaError_t error = enter_context()) return error;
  if (int code = due_error("event")) return fail(code);
  advance_clock(on, 0);
  Lock lock(global_mutex());
  Event* event = event_of(handle);
  event->clock_ns = stream_of(on)->clock_ns;
  event->busy_until = stream_of(on)->busy_until;
  event->recorded = true;
  return status();
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  return cudaEventRecordWithFlags(handle, on, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (poisoned_by()) return status();
  return event_of(handle)->busy_until > now() ? fail(cudaErrorNotReady) : cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (poisoned_by()) return status();
  if (int code = due_error("sync")) return fail(code);
  wait_until(event_of(handle)->busy_until);
  Lock lock(global_mutex());
  if (event_of(handle)->clock_ns > host_clock_ns) host_clock_ns = event_of(handle)->clock_ns;
  return status();
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  if (poisoned_by()) return status();
  const Event *first = event_of(from), *second = event_of(to);
  if (!first->timed || !second->timed || !first->recorded || !second->recorded)
    return fail(cudaErrorInvalidResourceHandle);
  u64 time = now();
  if (first->busy_until > time || second->busy_until > time) return fail(cudaErrorNotReady);
  double elapsed_ns = static_cast<double>(second->clock_ns) - static_cast<double>(first->clock_ns);
  *milliseconds = static_cast<float>(elapsed_ns / 1e6);
  return cudaSuccess;
}
