// cuDNN's recurrent layers: where the weights lie in their buffer, and the sizes of what a layer
// keeps for its backward pass and of its workspace: estimates, found in two recorded trainings of an
// LSTM on an H200.
#include "cudnn.h"

#include <cstring>

namespace emulated_gpu::cudnn {
namespace {

constexpr int LSTM = 2, GRU = 3;  // cudnnRNNMode_t; 0 and 1 are plain cells
constexpr int NO_BIAS = 0, DOUBLE_BIAS = 2, BIDIRECTIONAL = 1, TRAINING = 1;
constexpr int PROJECTION = 8;  // the number of an LSTM's projection among its matrices

struct Layer {
  int mode, biases, directions, data_type;
  u64 input, hidden, projection, layers;

  int gates() const { return mode == LSTM ? 4 : mode == GRU ? 3 : 1; }
  u64 output() const { return projection && projection != hidden ? projection : hidden; }
  u64 width(u64 pseudo_layer) const {
    return pseudo_layer < static_cast<u64>(directions) ? input : output() * directions;
  }
  u64 projection_elements() const { return output() == hidden ? 0 : output() * hidden; }
  u64 matrix_elements(u64 pseudo_layer) const {
    return gates() * hidden * (width(pseudo_layer) + output()) + projection_elements();
  }
  u64 pseudo_layers() const { return layers * directions; }
  u64 all_matrix_elements() const {
    u64 sum = 0;
    for (u64 at = 0; at < pseudo_layers(); at++) sum += matrix_elements(at);
    return sum;
  }
  u64 bias_elements() const {  // of one pseudo layer
    int sets = biases == NO_BIAS ? 0 : biases == DOUBLE_BIAS ? 2 : 1;
    return sets * gates() * hidden;
  }
};
struct Sequence {
  int data_type;
  u64 steps, samples, width, values;  // values: steps of all samples together
};

}  // namespace
}  // namespace emulated_gpu::cudnn

using namespace emulated_gpu;
using namespace emulated_gpu::cudnn;

EXPORT int cudnnCreateRNNDescriptor(void** out) {
  *out = new Layer{};
  return SUCCESS;
}
EXPORT int cudnnDestroyRNNDescriptor(void* made) {
  delete static_cast<Layer*>(made);
  return SUCCESS;
}
EXPORT int cudnnSetRNNDescriptor_v8(void* made, int, int mode, int biases, int direction, int,
                                    int data_type, int, int, int input, int hidden, int projection,
                                    int layers, void*, unsigned) {
  *static_cast<Layer*>(made) = {mode,
                                biases,
                                direction == BIDIRECTIONAL ? 2 : 1,
                                data_type,
                                static_cast<u64>(input),
                                static_cast<u64>(hidden),
                                static_cast<u64>(projection),
                                static_cast<u64>(layers)};
  return SUCCESS;
}
EXPORT int cudnnCreateRNNDataDescriptor(void** out) {
  *out = new Sequence{};
  return SUCCESS;
}
EXPORT int cudnnDestroyRNNDataDescriptor(void* made) {
  delete static_cast<Sequence*>(made);
  return SUCCESS;
}
EXPORT int cudnnSetRNNDataDescriptor(void* made, int data_type, int, int steps, int samples,
                                     int width, const int* lengths, void*) {
  u64 values = 0;
  for (int at = 0; at < samples; at++) values += lengths[at];
  *static_cast<Sequence*>(made) = {data_type, static_cast<u64>(steps), static_cast<u64>(samples),
                                   static_cast<u64>(width), values};
  return SUCCESS;
}

EXPORT int cudnnGetRNNWeightSpaceSize(void*, void* made, size_t* out) {
  const auto& layer = *static_cast<Layer*>(made);
  u64 elements = layer.all_matrix_elements() + layer.pseudo_layers() * layer.bias_elements();
  *out = elements * element_bytes(layer.data_type);
  return SUCCESS;
}
// All matrices lie first, pseudo layer by pseudo layer: of the input, of the state, the projection.
EXPORT int cudnnGetRNNWeightParams(void*, void* made, int pseudo_layer, size_t, const void* space,
                                   int number, void* matrix_descriptor, void** matrix,
                                   void* bias_descriptor, void** bias) {
  const auto& layer = *static_cast<Layer*>(made);
  u64 gates = layer.gates(), hidden = layer.hidden, width = layer.width(pseudo_layer);
  bool of_state = number >= static_cast<int>(gates);
  u64 gate = of_state ? number - gates : number;
  u64 first = 0;
  for (int at = 0; at < pseudo_layer; at++) first += layer.matrix_elements(at);
  u64 size = element_bytes(layer.data_type);
  auto* start = static_cast<char*>(const_cast<void*>(space));
  u64 rows = hidden, columns = of_state ? layer.output() : width;
  u64 offset = first + (of_state ? gates * hidden * width : 0) + gate * rows * columns;
  if (number == PROJECTION) {
    rows = layer.output(), columns = hidden;
    offset = first + gates * hidden * (width + layer.output());
  }
  auto tell = [&](void* descriptor, void** address, u64 element, u64 height, u64 breadth) {
    if (address) *address = start + element * size;
    if (descriptor)
      *static_cast<cudnn::TensorDescriptor*>(descriptor) = {
          layer.data_type,
          3,
          {1, static_cast<int>(height), static_cast<int>(breadth)},
          {static_cast<int>(height * breadth), static_cast<int>(breadth), 1}};
  };
  tell(matrix_descriptor, matrix, offset, rows, columns);
  if (bias) *bias = nullptr;
  if (layer.biases == NO_BIAS || number == PROJECTION) return SUCCESS;
  u64 biases = layer.all_matrix_elements() + pseudo_layer * layer.bias_elements();
  tell(bias_descriptor, bias, biases + (of_state ? gates * hidden : 0) + gate * hidden, hidden, 1);
  return SUCCESS;
}

EXPORT int cudnnGetRNNTempSpaceSizes(void*, void* made, int mode, void* data, size_t* workspace,
                                     size_t* reserve) {
  const auto& layer = *static_cast<Layer*>(made);
  const auto& sequence = *static_cast<Sequence*>(data);
  note_estimate("cuDNN: workspaces and reserves of recurrent layers");
  u64 row_bytes =
      sequence.values * layer.hidden * layer.directions * element_bytes(sequence.data_type);
  u64 kept = layer.layers * (layer.gates() + 1) + layer.layers - 1;
  *workspace = layer.layers * layer.gates() * row_bytes + 4 * layer.all_matrix_elements();
  if (reserve) *reserve = mode == TRAINING ? kept * row_bytes + 256 : 0;
  return SUCCESS;
}

EXPORT int cudnnRNNForward(void* handle) { return execute(static_cast<Handle*>(handle)); }
EXPORT int cudnnRNNBackwardData_v8(void* handle) { return execute(static_cast<Handle*>(handle)); }
EXPORT int cudnnRNNBackwardWeights_v8(void* handle) {
  return execute(static_cast<Handle*>(handle));
}
