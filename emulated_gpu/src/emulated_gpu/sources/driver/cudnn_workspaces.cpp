// The bytes that cuDNN takes for a convolution where memory is free: a rule found in recorded
// trainings of an H200. autofit has the same rule in Python, in a file named convolutions.py, with what is
// behind it; a test of autofit's holds the two equal.
#include "cudnn.h"

#include <algorithm>
#include <cmath>

namespace emulated_gpu::cudnn {
namespace {

constexpr u64 ALIGNMENT_BYTES = 16, TILE = 128;

u64 product(const std::vector<u64>& sizes, size_t from = 0) {
  u64 all = 1;
  for (size_t at = from; at < sizes.size(); at++) all *= sizes[at];
  return all;
}
bool all_ones(const std::vector<u64>& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](u64 size) { return size == 1; });
}
bool is_channels_last(const Tensor& tensor) {
  return tensor.sizes[1] > 1 && product(tensor.sizes, 2) > 1 && tensor.strides[1] == 1;
}
u64 padded_channels(const Tensor& tensor, u64 multiple) {
  return product(tensor.sizes) / tensor.sizes[1] * round_up(tensor.sizes[1], multiple);
}

struct Copies {  // bytes of the three tensors with their channels padded to a multiple
  u64 data, weight, result;
};
Copies copies(const Convolution& of, u64 multiple) {
  u64 size = element_bytes(of.data.data_type), window = product(of.weight.sizes, 2);
  u64 weight = window == 1 ? 0
                           : round_up(of.weight.sizes[0], multiple) *
                                 round_up(of.weight.sizes[1], multiple) * window;
  return {padded_channels(of.data, multiple) * size, weight * size,
          padded_channels(of.result, multiple) * size};
}

// Float32 sums of a weight gradient, which parts of the samples add up apart: as many as let tiles
// of 128 x 128 keep half of the multiprocessors busy.
u64 partial_sums(const Convolution& of) {
  u64 rows = of.weight.sizes[0], columns = product(of.weight.sizes, 1);
  u64 tiles = (round_up(rows, TILE) / TILE) * (round_up(columns, TILE) / TILE);
  u64 parts = std::llround(card(current_device()).multiprocessors / 2.0 / tiles);
  return parts > 1 ? 4 * parts * rows * columns : 0;
}

u64 on_tensor_cores(const Convolution& of, bool channels_last) {
  u64 size = element_bytes(of.data.data_type), multiple = size == 2 ? 8 : 1;
  Copies copied = copies(of, multiple);
  u64 window = product(of.weight.sizes, 2);
  bool is_weight = of.direction == Direction::WEIGHT;
  bool pointwise = window == 1 && all_ones(of.stride);
  bool patches = !pointwise && std::equal(of.stride.begin(), of.stride.end(),
                                          of.weight.sizes.begin() + 2, of.weight.sizes.end());
  if (patches && (of.direction == Direction::FORWARD || multiple == 1)) return 0;
  u64 summed = is_weight ? partial_sums(of) : 0;
  if (channels_last) return summed + (of.data.sizes[1] % multiple ? copied.data + copied.weight : 0);
  if (!pointwise) return copied.data + copied.weight + copied.result + summed;
  if (product(of.data.sizes, 2) * size % ALIGNMENT_BYTES)
    return copied.data + copied.result + summed;
  u64 sums = 4 * of.data.sizes[0] * product(of.weight.sizes);
  return is_weight ? std::min(sums, copied.data + copied.result) : 0;
}

// Float32 tiles of 4x4 results for weight gradients, of 6x6 for results, with a border of 2.
u64 winograd(const Convolution& of) {
  bool window = of.weight.sizes.size() == 4 && of.weight.sizes[2] == 3 && of.weight.sizes[3] == 3;
  bool grouped = of.weight.sizes[1] != of.data.sizes[1];
  if (of.direction == Direction::DATA || !window || grouped) return 0;
  if (!all_ones(of.stride) || !all_ones(of.dilation)) return 0;
  u64 tile = of.direction == Direction::WEIGHT ? 4 : 6, points = (tile + 2) * (tile + 2);
  u64 tiles = of.data.sizes[0] * (round_up(of.result.sizes[2], tile) / tile) *
              (round_up(of.result.sizes[3], tile) / tile);
  u64 channels = of.data.sizes[1], out = of.result.sizes[1];
  return 4 * points * (tiles * (channels + out) + channels * out);
}

}  // namespace

Workspaces workspaces(const Convolution& of, bool tensor_cores) {
  u64 groups = of.data.sizes[1] / std::max<u64>(of.weight.sizes[1], 1);
  if (groups > 1 && groups == of.data.sizes[1]) return {0, 0};  // depthwise
  bool channels_last =
      is_channels_last(of.data) || is_channels_last(of.weight) || is_channels_last(of.result);
  auto aligned = [](u64 bytes) { return bytes ? bytes + ALIGNMENT_BYTES : 0; };
  if (tensor_cores) {
    u64 taken = on_tensor_cores(of, channels_last);
    return {aligned(taken), 0};
  }
  Copies copied = copies(of, 1);
  u64 moved = channels_last ? copied.data + copied.weight + copied.result : 0;
  return {aligned(moved + winograd(of)), aligned(moved)};
}

}  // namespace emulated_gpu::cudnn
