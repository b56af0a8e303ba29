// What the files of the values layer share.
//
// Each CUDA operator first runs as it is: it allocates what it needs, and its launches compute
// nothing. Then the same operator runs on the CPU, on tensors that lie over the very same memory,
// and its results are written where the CUDA operator's results lie.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {  // of the emulated driver; absent where the layer is loaded without it
void emulated_gpu_poison(int code) __attribute__((weak));
void emulated_gpu_note(const char* what) __attribute__((weak));
}

namespace emulated_gpu {

using Values = std::vector<c10::IValue>;
using Schema = c10::FunctionSchema;
using Kernel = std::function<Values(const Schema&, Values&)>;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
using CudaKernel = c10::KernelFunction;
#else
using CudaKernel = c10::SafeKernelFunction;
#endif

struct Operator {
  CudaKernel cuda;
  bool seeded;           // draws random numbers
  bool writes_blindly;   // what it writes does not depend on what it overwrites
  bool sized_by_values;  // the shapes it returns depend on values, as nonzero's
  bool checks_values;    // raises where they are wrong, and returns nothing
  const Kernel* kernel;  // computes the values; null: the operator's own kernel for CPUs
};

// operators.cpp: runs a registered operator on CUDA and then for its values.
void add_operator(const Schema& schema, const Operator& added);
void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// special_kernels.cpp, recurrent.cpp: operators that have no kernel for CPUs, by full name.
const std::unordered_map<std::string, Kernel>& special_kernels();
const std::unordered_map<std::string, Kernel>& recurrent_kernels();
c10::IValue named_argument(const Schema& schema, const Values& values, const char* name);
std::optional<at::Tensor> optional_tensor(const c10::IValue& value);

}  // namespace emulated_gpu
