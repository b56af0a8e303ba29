// What functions of cuSOLVER, cuSPARSE and cuFFT write through their arguments: how much scratch memory
// they need, which is not known here and said to be none, and on the device that they succeeded.
//
// These functions are generated at the build (`build.py`), of those that torch imports, and all end
// here with their arguments. Integers and pointers take a slot each on x86-64, so an argument is found
// by its place alone. Whatever is answered is noted as an estimate.
#include "emulated_gpu.h"

#include <cstring>

namespace emulated_gpu {
namespace {

constexpr int NONE = -1, NOT_SUPPORTED = 10;  // CUSPARSE_STATUS_NOT_SUPPORTED

enum Kind { INT, SIZE, INFO };  // bytes of scratch memory as an int or a size_t; an int on the device
struct Written {
  const char* name;  // with "?" for the letter of a type: S, D, C or Z
  Kind kind;
  int place;                // of the pointer to it, from 0
  int second_place = NONE;  // SIZE: of the pointer for the host's memory; INFO: of the number of infos
};
const Written WRITTEN[] = {
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
    {"cusolverDn?gesvd", INFO, 15},
    {"cusolverDn?gesvdj", INFO, 14},
    {"cusolverDn?gesvdjBatched", INFO, 13, 15},
    {"cusolverDn?gesvdaStridedBatched", INFO, 18, 20},
    {"cusolverDn?syevd", INFO, 9},
    {"cusolverDn?heevd", INFO, 9},
    {"cusolverDn?syevj", INFO, 9},
    {"cusolverDn?heevj", INFO, 9},
    {"cusolverDn?syevjBatched", INFO, 9, 11},
    {"cusolverDn?heevjBatched", INFO, 9, 11},
    {"cusolverDnXsyevd", INFO, 15},
    {"cusolverDnXsyevBatched", INFO, 15, 16},
    {"cusolverDnXgeev", INFO, 21},
    {"cusolverDn?getrf", INFO, 7},
    {"cusolverDn?potrf", INFO, 7},
    {"cusolverDnXpotrf", INFO, 12},
};

bool fits(const char* pattern, const char* name) {
  for (; *pattern && *name; pattern++, name++)
    if (*pattern != *name && !(*pattern == '?' && strchr("SDCZ", *name))) return false;
  return !*pattern && !*name;
}
void clear_info(const u64* arguments, const Written& of) {
  auto* info = reinterpret_cast<int*>(arguments[of.place]);
  int count = of.second_place == NONE ? 1 : static_cast<int>(arguments[of.second_place]);
  Lock lock(global_mutex());
  if (find_block(info)) memset(info, 0, count * sizeof *info);
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

EXPORT int emulated_gpu_not_emulated(const char* name);

EXPORT int emulated_gpu_written(const char* name, const u64* arguments) {
  note_estimate(name);
  for (const Written& each : WRITTEN) {
    if (!fits(each.name, name)) continue;
    if (each.kind == INFO) clear_info(arguments, each);
    else
      for (int place : {each.place, each.second_place})
        if (place != NONE)
          memset(reinterpret_cast<void*>(arguments[place]), 0,
                 each.kind == INT ? sizeof(int) : sizeof(size_t));
    return 0;
  }
  return strstr(name, "_bufferSize") ? NOT_SUPPORTED : emulated_gpu_not_emulated(name);
}
