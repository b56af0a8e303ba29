// What the emulation answers with a guess, or not at all. A prediction that rests on a guess says so.
//
// Functions that torch imports and that no file here defines are generated at the build; all of them
// end here. Those that only compute succeed. Those of libraries whose scratch memory is unknown
// succeed and are noted as estimates. Whatever else a caller would rely on is refused.
#include "emulated_gpu.h"

#include <cstring>
#include <set>

namespace emulated_gpu {
namespace {

struct Family {
  const char* prefix;
  int answer;  // the library's own code for what it does not support
  bool noted;
};
const Family FAMILIES[] = {  // the first whose prefix fits
    {"cublas", 0, false},     {"curand", 0, false},     {"cusparse", 0, true},
    {"cusolver", 0, true},    {"cufft", 0, true},       {"cudss", 0, true},
    {"cudnnGet", 3000, true}, {"cudnnFind", 3000, true}, {"cudnn", 0, false},
    {"nvml", 3, false},       {"nvrtc", 0, false},      {"nvtx", 0, false},
    {"nccl", 5, true},        {"nvshmem", 7, true},     {"nvJitLink", 7, true},
    {"cuFile", 5001, true},   {"cupti", 27, false},     {"__cuda", 801, true},
    {"cuda", 801, true},      {"cu", 801, true},
};

std::set<std::string>& noted() {
  static auto* all = new std::set<std::string>;
  return *all;
}

}  // namespace

void note_estimate(const char* what) {
  Lock lock(global_mutex());
  if (noted().insert(what).second) write_log("estimate: %s", what);
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT void emulated_gpu_note(const char* what) { note_estimate(what); }

EXPORT int emulated_gpu_not_emulated(const char* name) {
  for (const Family& each : FAMILIES)
    if (!strncmp(name, each.prefix, strlen(each.prefix))) {
      if (each.noted) note_estimate(name);
      return each.answer;
    }
  return 0;
}

// Writes what was noted, a line each, and returns the bytes that this takes.
EXPORT u64 emulated_gpu_estimates(char* out, u64 length) {
  Lock lock(global_mutex());
  std::string text;
  for (const std::string& each : noted()) text += each + "\n";
  if (out && length) {
    strncpy(out, text.c_str(), length - 1);
    out[length - 1] = 0;
  }
  return text.size() + 1;
}
