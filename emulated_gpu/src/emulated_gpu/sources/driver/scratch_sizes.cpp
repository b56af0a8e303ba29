// The scratch memory of cuSOLVER, cuSPARSE and cuFFT is not known here: whoever asks is told that there
// is none, and the answer is noted as an estimate.
//
// The functions that ask are generated at the build (`build.py`), of those that torch imports, and all
// end here with their arguments. Integers and pointers take a slot each on x86-64 and AArch64, so the
// argument through which the bytes are returned is found by its place alone.
#include "emulated_gpu.h"

#include <cstring>

namespace emulated_gpu {
namespace {

constexpr int NONE = -1, NOT_SUPPORTED = 10;  // CUSPARSE_STATUS_NOT_SUPPORTED

constexpr size_t INT = sizeof(int), SIZE = sizeof(size_t);

struct Question {
  const char* name;  // with "?" for the letter of a type: S, D, C or Z
  size_t width;      // of the integer that is returned
  int place;         // of the pointer to it, from 0
  int second_place = NONE;  // of that for the host's memory, where both are asked for
};
const Question QUESTIONS[] = {
    {"cusolverDn?getrf_bufferSize", INT, 5},
    {"cusolverDn?geqrf_bufferSize", INT, 5},
    {"cusolverDn?potrf_bufferSize", INT, 5},
    {"cusolverDn?sytrf_bufferSize", INT, 4},
    {"cusolverDn?gesvd_bufferSize", INT, 3},
    {"cusolverDn?gesvdj_bufferSize", INT, 12},
    {"cusolverDn?gesvdjBatched_bufferSize", INT, 11},
    {"cusolverDn?gesvdaStridedBatched_bufferSize", INT, 16},
    {"cusolverDn?syevd_bufferSize", INT, 7},
    {"cusolverDn?syevj_bufferSize", INT, 7},
    {"cusolverDn?syevjBatched_bufferSize", INT, 7},
    {"cusolverDn?heevd_bufferSize", INT, 7},
    {"cusolverDn?heevj_bufferSize", INT, 7},
    {"cusolverDn?heevjBatched_bufferSize", INT, 7},
    {"cusolverDn?orgqr_bufferSize", INT, 7},
    {"cusolverDn?ungqr_bufferSize", INT, 7},
    {"cusolverDn?ormqr_bufferSize", INT, 11},
    {"cusolverDn?unmqr_bufferSize", INT, 11},
    {"cusolverDnXgeqrf_bufferSize", SIZE, 10, 11},
    {"cusolverDnXpotrf_bufferSize", SIZE, 8, 9},
    {"cusolverDnXsyevd_bufferSize", SIZE, 11, 12},
    {"cusolverDnXsyevBatched_bufferSize", SIZE, 11, 12},
    {"cusolverDnXsytrs_bufferSize", SIZE, 11, 12},
    {"cusolverDnXgeev_bufferSize", SIZE, 17, 18},
    {"cusparseSpMM_bufferSize", SIZE, 10},
    {"cusparseSDDMM_bufferSize", SIZE, 10},
    {"cusparseSpSM_bufferSize", SIZE, 10},
    {"cusparseSpMV_bufferSize", SIZE, 9},
    {"cusparseSpSV_bufferSize", SIZE, 9},
    {"cufftXtMakePlanMany", SIZE, 12},
};

bool fits(const char* pattern, const char* name) {
  for (; *pattern && *name; pattern++, name++)
    if (*pattern != *name && !(*pattern == '?' && strchr("SDCZ", *name))) return false;
  return !*pattern && !*name;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT int emulated_gpu_scratch_size(const char* name, const u64* arguments) {
  note_estimate(name);
  for (const Question& each : QUESTIONS) {
    if (!fits(each.name, name)) continue;
    for (int place : {each.place, each.second_place})
      if (place != NONE) memset(reinterpret_cast<void*>(arguments[place]), 0, each.width);
    return 0;
  }
  return NOT_SUPPORTED;
}
