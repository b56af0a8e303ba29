// Values of cuDNN's recurrent layers, from the same layers on the CPU.
//
// The backward pass runs the forward pass again, with autograd. Its dropout must be that of the first
// pass, so that pass leaves its seed in the reserve, which is handed to the backward pass.
#include "values.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/rnn_relu.h>
#include <ATen/ops/rnn_tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cstring>

namespace emulated_gpu {
namespace {

enum Mode : int64_t { RELU = 0, TANH = 1, LSTM = 2, GRU = 3 };  // cudnnRNNMode_t

struct Layer {
  at::Tensor input, hidden, cell;  // cell is undefined but for LSTMs
  std::vector<at::Tensor> weights;
  at::Tensor batch_sizes;  // of a packed sequence, else undefined
  int64_t mode, layers;
  bool has_biases, batch_first, train, bidirectional;
  double dropout;

  Layer(const Schema& schema, const Values& values) {
    auto get = [&](const char* name) { return named_argument(schema, values, name); };
    input = get("input").toTensor().to(at::kFloat);
    hidden = get("hx").toTensor().to(at::kFloat);
    if (auto given = optional_tensor(get("cx"))) cell = given->to(at::kFloat);
    for (const at::Tensor& each : get("weight").toTensorVector())
      weights.push_back(each.to(at::kFloat));
    std::vector<int64_t> sizes = get("batch_sizes").toIntVector();
    if (!sizes.empty()) batch_sizes = at::tensor(sizes, at::kLong);
    mode = get("mode").toInt();
    layers = get("num_layers").toInt();
    has_biases = get("weight_stride0").toInt() >= 4;  // two weights, two biases, maybe a projection
    batch_first = get("batch_first").toBool();
    train = get("train").toBool();
    bidirectional = get("bidirectional").toBool();
    dropout = get("dropout").toDouble();
  }

  std::vector<at::Tensor> run() const {  // output, hidden state, cell state
    if (mode == LSTM) {
      auto [output, state, kept] =
          batch_sizes.defined()
              ? at::lstm(input, batch_sizes, {hidden, cell}, weights, has_biases, layers, dropout,
                         train, bidirectional)
              : at::lstm(input, {hidden, cell}, weights, has_biases, layers, dropout, train,
                         bidirectional, batch_first);
      return {output, state, kept};
    }
    auto [output, state] = mode == GRU    ? run_with([](auto&&... all) { return at::gru(all...); })
                           : mode == TANH ? run_with([](auto&&... all) { return at::rnn_tanh(all...); })
                                          : run_with([](auto&&... all) { return at::rnn_relu(all...); });
    return {output, state, at::Tensor()};
  }

 private:
  template <class Function>
  std::tuple<at::Tensor, at::Tensor> run_with(Function function) const {
    at::TensorList all = weights;
    if (batch_sizes.defined())
      return function(input, batch_sizes, hidden, all, has_biases, layers, dropout, train,
                      bidirectional);
    return function(input, hidden, all, has_biases, layers, dropout, train, bidirectional,
                    batch_first);
  }
};

std::vector<at::Tensor> run_with_seed(const Layer& layer, uint64_t seed) {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  at::Tensor before = cpu.get_state();
  cpu.set_current_seed(seed);
  std::vector<at::Tensor> made = layer.run();
  cpu.set_state(before);
  return made;
}

Values forward(const Schema& schema, Values& values) {
  static std::atomic<uint64_t> passes{0};
  uint64_t seed = ++passes;
  std::vector<at::Tensor> made = run_with_seed(Layer(schema, values), seed);
  // The fourth result is the reserve, where nothing else is kept; the fifth the flat weights.
  at::Tensor reserve = at::zeros({static_cast<int64_t>(sizeof seed)}, at::kByte);
  std::memcpy(reserve.mutable_data_ptr(), &seed, sizeof seed);
  return {made[0], made[1], made[2], reserve};
}

Values backward(const Schema& schema, Values& values) {
  auto get = [&](const char* name) { return named_argument(schema, values, name); };
  at::Tensor reserve = get("reserve").toTensor();
  uint64_t seed = 0;
  if (reserve.nbytes() >= sizeof seed) std::memcpy(&seed, reserve.const_data_ptr(), sizeof seed);
  c10::impl::ForceDispatchKeyGuard with_autograd(c10::default_included_set,
                                                  c10::default_excluded_set);
  at::AutoGradMode enabled(true);
  Layer layer(schema, values);
  std::vector<at::Tensor> inputs{layer.input, layer.hidden};
  if (layer.cell.defined()) inputs.push_back(layer.cell);
  inputs.insert(inputs.end(), layer.weights.begin(), layer.weights.end());
  for (at::Tensor& each : inputs) each = each.detach().requires_grad_(true);
  size_t first_weight = layer.cell.defined() ? 3 : 2;
  layer.input = inputs[0];
  layer.hidden = inputs[1];
  if (layer.cell.defined()) layer.cell = inputs[2];
  layer.weights.assign(inputs.begin() + first_weight, inputs.end());
  std::vector<at::Tensor> made = run_with_seed(layer, seed), outputs, gradients;
  const char* const names[] = {"grad_output", "grad_hy", "grad_cy"};
  for (size_t i = 0; i < 3; i++)
    if (auto gradient = optional_tensor(get(names[i])); gradient && made[i].defined()) {
      outputs.push_back(made[i]);
      gradients.push_back(gradient->to(at::kFloat));
    }
  auto found = torch::autograd::grad(outputs, inputs, gradients, /*retain_graph=*/std::nullopt,
                                     /*create_graph=*/false, /*allow_unused=*/true);
  c10::List<at::Tensor> of_weights;
  for (size_t i = first_weight; i < found.size(); i++) of_weights.push_back(found[i]);
  return {found[0], found[1], layer.cell.defined() ? found[2] : at::Tensor(), of_weights};
}

}  // namespace

const std::unordered_map<std::string, Kernel>& recurrent_kernels() {
  static const auto* all = new std::unordered_map<std::string, Kernel>{
      {"aten::_cudnn_rnn", forward}, {"aten::_cudnn_rnn_backward", backward}};
  return *all;
}

}  // namespace emulated_gpu
