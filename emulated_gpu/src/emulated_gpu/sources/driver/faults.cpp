// Makes chosen calls fail or hang.
//
// EMULATED_GPU_FAULTS is a list "CALL@NUMBER=ERROR" apart by ",": the call of that number
// (from 1, counted in each process) returns that cudaError_t, or with "hang" never returns.
// "malloc@5x3=2" fails three calls from the fifth on; "launch@60=700@WORD" only in processes whose
// command line holds WORD. Calls: init, context, malloc, host_malloc, memcpy, launch, sync, event,
// cublas, cudnn, nvml_init, nvml. `faults.py` writes this form.
#include "emulated_gpu.h"

#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sstream>
#include <unistd.h>

namespace emulated_gpu {
namespace {

struct Fault {
  u64 first, last;
  int code;
};

std::map<std::string, u64>& counts() {
  static auto* counted = new std::map<std::string, u64>;
  return *counted;
}

bool command_line_has(const std::string& word) {
  char line[16384] = {0};
  int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  ssize_t length = read(file, line, sizeof line - 1);
  close(file);
  for (ssize_t i = 0; i < length; i++)
    if (!line[i]) line[i] = ' ';
  return strstr(line, word.c_str()) != nullptr;
}

std::multimap<std::string, Fault> parse(const std::string& text) {
  std::multimap<std::string, Fault> faults;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    char call[32] = {0}, range[48] = {0}, outcome[32] = {0}, word[256] = {0};
    if (sscanf(part.c_str(), "%31[^@]@%47[^=]=%31[^@]@%255s", call, range, outcome, word) < 3)
      continue;
    if (*word && !command_line_has(word)) continue;
    u64 first = 1, times = 1;
    sscanf(range, "%llux%llu", &first, &times);
    faults.emplace(call, Fault{first, first + times - 1, strcmp(outcome, "hang") ? atoi(outcome) : HANG});
  }
  return faults;
}

std::multimap<std::string, Fault>& faults() {
  static auto* parsed = new std::multimap<std::string, Fault>(parse(settings().faults));
  return *parsed;
}

}  // namespace

int due_fault(const char* call) {
  Lock lock(global_mutex());
  u64 count = ++counts()[call];
  auto [begin, end] = faults().equal_range(call);
  for (auto each = begin; each != end; ++each)
    if (each->second.first <= count && count <= each->second.last) {
      write_log("fault: %s number %llu: %d", call, count, each->second.code);
      return each->second.code;
    }
  return 0;
}

void hang() {
  for (;;) pause();
}

int due_error(const char* call) {
  int code = due_fault(call);
  if (code == HANG) hang();
  return code;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

// Counted from now on: the next call is number 1.
EXPORT void emulated_gpu_inject(const char* call, u64 number, u64 times, int code) {
  Lock lock(global_mutex());
  u64 first = counts()[call] + number;
  faults().emplace(call, Fault{first, first + times - 1, code});
}
EXPORT u64 emulated_gpu_count(const char* call) {
  Lock lock(global_mutex());
  return counts()[call];
}
