// What the files of the emulated cuDNN share. Values of enumerations are those of cudnn_graph.h and
// cudnn_adv.h, cuDNN 9.
#pragma once
#include "emulated_gpu.h"

#include <array>
#include <vector>

namespace emulated_gpu::cudnn {

constexpr int SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, ALLOC_FAILED = 1003,
              EXECUTION_FAILED = 5000;

// cudnnDataType_t
constexpr int FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9;
u64 element_bytes(int data_type);

struct Handle {
  cudaStream_t stream;
  int physical;
};
int execute(Handle* handle);  // one kernel of a plan or a layer: time, and the faults that are due

struct TensorDescriptor {  // of the API of before version 8
  int data_type, dims;
  std::array<int, 8> sizes, strides;
};

// cudnn_workspaces.cpp
enum class Direction { FORWARD, DATA, WEIGHT };
struct Tensor {
  int data_type;
  std::vector<u64> sizes, strides;
};
struct Convolution {  // sizes as for torch.nn.functional.conv2d: samples, channels, height, width
  Tensor data, weight, result;
  std::vector<u64> stride, dilation;
  Direction direction;
};
struct Workspaces {  // bytes where memory is free, and of what runs where it is not
  u64 preferred_bytes, least_bytes;
};
Workspaces workspaces(const Convolution& convolution, bool tensor_cores);

}  // namespace emulated_gpu::cudnn
