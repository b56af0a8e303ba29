// Values of operators that have no kernel for CPUs, or whose kernel there has another signature.
#include "values.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

namespace emulated_gpu {

c10::IValue named_argument(const Schema& schema, const Values& values, const char* name) {
  auto index = schema.argumentIndexWithName(name);
  return index ? values[*index] : c10::IValue();
}
std::optional<at::Tensor> optional_tensor(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) return value.toTensor();
  return std::nullopt;
}

namespace {

at::Tensor in_float(const c10::IValue& value) { return value.toTensor().to(at::kFloat); }

struct Attention {
  at::Tensor query, key, value, weights;
  int64_t shared;  // heads of the query that one of key and value serves
  std::optional<at::Tensor> bias;
  double scale;

  Attention(const Schema& schema, const Values& values)
      : query(in_float(named_argument(schema, values, "query"))),
        key(in_float(named_argument(schema, values, "key"))),
        value(in_float(named_argument(schema, values, "value"))),
        bias(optional_tensor(named_argument(schema, values, "attn_bias"))) {
    shared = query.size(-3) / key.size(-3);
    key = key.repeat_interleave(shared, -3);
    value = value.repeat_interleave(shared, -3);
    c10::IValue given = named_argument(schema, values, "scale");
    scale = given.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : given.toDouble();
    at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias) scores = scores + bias->to(at::kFloat);
    if (named_argument(schema, values, "is_causal").toBool()) {
      at::Tensor seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
      scores = scores.masked_fill(seen.logical_not(), -INFINITY);
    }
    weights = at::softmax(scores, -1).nan_to_num(0);
  }

  at::Tensor over_shared(const at::Tensor& gradient) const {
    return gradient.unflatten(-3, {gradient.size(-3) / shared, shared}).sum(-3);
  }
};

Values attention(const Schema& schema, Values& values) {
  Attention made(schema, values);
  return {at::matmul(made.weights, made.value)};
}

Values attention_backward(const Schema& schema, Values& values) {
  Attention made(schema, values);
  c10::IValue given = named_argument(schema, values, "grad_out");
  at::Tensor gradient = in_float(given.isTensor() ? given : named_argument(schema, values, "grad_out_"));
  at::Tensor of_weights = at::matmul(gradient, made.value.transpose(-2, -1));
  at::Tensor of_scores =
      made.weights * (of_weights - (of_weights * made.weights).sum(-1, /*keepdim=*/true));
  Values results{at::matmul(of_scores, made.key) * made.scale,
                 made.over_shared(at::matmul(of_scores.transpose(-2, -1), made.query) * made.scale),
                 made.over_shared(at::matmul(made.weights.transpose(-2, -1), gradient))};
  if (schema.returns().size() > 3)
    results.push_back(made.bias ? of_scores.sum_to_size(made.bias->sizes()) : at::Tensor());
  return results;
}

Values batch_norm(const Schema&, Values& values) {
  auto [output, mean, inverse_deviation] = at::native_batch_norm(
      values[0].toTensor(), optional_tensor(values[1]), optional_tensor(values[2]),
      optional_tensor(values[3]), optional_tensor(values[4]), values[5].toBool(),
      values[6].toDouble(), values[7].toDouble());
  return {output, mean, inverse_deviation};
}

Values batch_norm_backward(const Schema& schema, Values& values) {
  auto get = [&](const char* name) { return named_argument(schema, values, name); };
  auto [input, weight, bias] = at::native_batch_norm_backward(
      get("grad_output").toTensor(), get("input").toTensor(), optional_tensor(get("weight")),
      optional_tensor(get("running_mean")), optional_tensor(get("running_var")),
      optional_tensor(get("save_mean")), optional_tensor(get("save_var")), /*train=*/true,
      get("epsilon").toDouble(), {true, true, true});
  return {input, weight, bias};
}

Values softmax(const Schema& schema, Values& values) {  // half_to_float is CUDA's alone
  at::Tensor input = values[0].toTensor();
  if (values[2].toBool()) input = input.to(at::kFloat);
  bool logarithm = schema.name().find("log") != std::string::npos;
  int64_t dimension = values[1].toInt();
  at::Tensor made = logarithm ? at::_log_softmax(input, dimension, false)
                              : at::_softmax(input, dimension, false);
  if (auto out = optional_tensor(named_argument(schema, values, "out")))
    out->resize_(made.sizes()).copy_(made);
  return {made};
}

Values rms_norm_backward(const Schema&, Values& values) {
  at::Tensor gradient = in_float(values[0]), input = in_float(values[1]);
  at::Tensor inverse_rms = in_float(values[3]);
  auto weight = optional_tensor(values[4]);
  int64_t normalized = values[2].toIntVector().size();
  std::vector<int64_t> outer, inner;
  for (int64_t i = 0; i < input.dim(); i++)
    (i < input.dim() - normalized ? outer : inner).push_back(i);
  at::Tensor weighted = weight ? gradient * weight->to(at::kFloat) : gradient;
  at::Tensor mean = (weighted * input).mean(inner, /*keepdim=*/true);
  at::Tensor of_input = inverse_rms * (weighted - input * mean * inverse_rms * inverse_rms);
  at::Tensor of_weight = weight ? (gradient * input * inverse_rms).sum(outer) : at::Tensor();
  return {of_input, of_weight};
}

Values wide_product(const Schema& schema, Values& values) {  // of half inputs, in float32
  at::Tensor left = in_float(values[0]), right = in_float(values[1]);
  return {schema.name() == "aten::mm" ? at::mm(left, right) : at::bmm(left, right)};
}

}  // namespace

const std::unordered_map<std::string, Kernel>& special_kernels() {
  static const auto* all = new std::unordered_map<std::string, Kernel>{
      {"aten::_scaled_dot_product_flash_attention", attention},
      {"aten::_scaled_dot_product_efficient_attention", attention},
      {"aten::_scaled_dot_product_cudnn_attention", attention},
      {"aten::_scaled_dot_product_flash_attention_backward", attention_backward},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention_backward},
      {"aten::_scaled_dot_product_cudnn_attention_backward", attention_backward},
      {"aten::cudnn_batch_norm", batch_norm},
      {"aten::cudnn_batch_norm_backward", batch_norm_backward},
      {"aten::_softmax", softmax},
      {"aten::_softmax.out", softmax},
      {"aten::_log_softmax", softmax},
      {"aten::_log_softmax.out", softmax},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
      {"aten::mm.dtype", wide_product},
      {"aten::bmm.dtype", wide_product}};
  return *all;
}

}  // namespace emulated_gpu
