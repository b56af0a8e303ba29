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

constexpr int NONE = -1, NOT_SUPPORTED = 9;  // CUSOLVER_STATUS_NOT_SUPPORTED

struct Question {
  const char* name;  // with "?" for the letter of a type: S, D, C or Z
  size_t width;      // of the integer that is returned
  int place, second_place = NONE;  // of the pointer to it; two where device and host are asked for
};
const Question QUESTIONS[] = {
    {"cusolverDn?getrf_bufferSize", sizeof(int), 5},
    {"cusolverDn?geqrf_bufferSize", sizeof(int), 5},
    {"cusolverDn?potrf_bufferSize", sizeof(int), 5},
    {"cusolverDn?sytrf_bufferSize", sizeof(int), 4},
    {"cusolverDn?gesvd_bufferSize", sizeof(int), 3},
    {"cusolverDn?gesvdj_bufferSize", sizeof(int), 12},
    {"cusolverDn?gesvdjBatched_bufferSize", sizeof(int), 11},
    {"cusolverDn?gesvdaStridedBatched_bufferSize", sizeof(int), 16},
    {"cusolverDn?syevd_bufferSize", sizeof(int), 7},
    {"cusolverDn?syevj_bufferSize", sizeof(int), 7},
    {"cusolverDn?syevjBatched_bufferSize", sizeof(int), 7},
    {"cusolverDn?heevd_bufferSize", sizeof(int), 7},
    {"cusolverDn?heevj_bufferSize", sizeof(int), 7},
    {"cusolverDn?heevjBatched_bufferSize", sizeof(int), 7},
    {"cusolverDn?orgqr_bufferSize", sizeof(int), 7},
    {"cusolverDn?ungqr_bufferSize", sizeof(int), 7},
    {"cusolverDn?ormqr_bufferSize", sizeof(int), 11},
    {"cusolverDn?unmqr_bufferSize", sizeof(int), 11},
    {"cusolverDnXgeqrf_bufferSize", sizeof(size_t), 10, 11},
    {"cusolverDnXpotrf_bufferSize", sizeof(size_t), 8, 9},
    {"cusolverDnXsyevd_bufferSize", sizeof(size_t), 11, 12},
    {"cusolverDnXsyevBatched_bufferSize", sizeof(size_t), 11, 12},
    {"cusolverDnXsytrs_bufferSize", sizeof(size_t), 11, 12},
    {"cusolverDnXgeev_bufferSize", sizeof(size_t), 17, 18},
    {"cusparseSpMM_bufferSize", sizeof(size_t), 10},
    {"cusparseSDDMM_bufferSize", sizeof(size_t), 10},
    {"cusparseSpSM_bufferSize", sizeof(size_t), 10},
    {"cusparseSpMV_bufferSize", sizeof(size_t), 9},
    {"cusparseSpSV_bufferSize", sizeof(size_t), 9},
    {"cufftXtMakePlanMany", sizeof(size_t), 12},
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
