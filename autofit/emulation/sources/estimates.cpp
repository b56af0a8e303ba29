// Keeps account of what this process asked for that the emulation answers with a guess, or not.
// A prediction that rests on such an answer says so.
#include "emulation.h"

#include <cstring>
#include <set>

namespace emulation {
namespace {

std::set<std::string>& noted() {
  static auto* all = new std::set<std::string>;
  return *all;
}

}  // namespace

void note_estimate(const char* what) {
  Lock lock(global_mutex());
  if (noted().insert(what).second) write_log("estimate: %s", what);
}

}  // namespace emulation

using namespace emulation;

EXPORT void autofit_emulation_note(const char* what) { note_estimate(what); }

// Called by the generated functions: those of NVIDIA's libraries that no file here defines.
EXPORT int autofit_emulation_not_emulated(const char* name) {
  note_estimate(name);
  return 0;
}
// Writes what was noted, a line each, and returns the bytes that this takes.
EXPORT u64 autofit_emulation_estimates(char* out, u64 length) {
  Lock lock(global_mutex());
  std::string text;
  for (const std::string& each : noted()) text += each + "\n";
  if (out && length) {
    strncpy(out, text.c_str(), length - 1);
    out[length - 1] = 0;
  }
  return text.size() + 1;
}
