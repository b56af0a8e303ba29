// Runs an operator twice: on CUDA, for what it allocates, and on the CPU, for the values.
#include "values.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdlib>

namespace emulated_gpu {
namespace {

constexpr int DEVICE_SIDE_ASSERT = 710;

bool integers_alone() {  // and single numbers: models decide by few other values
  static const bool asked = [] {
    const char* values = getenv("EMULATED_GPU_VALUES");
    return values && std::string(values) == "integers";
  }();
  return asked;
}

std::unordered_map<const Schema*, Operator>& operators() {
  static auto* all = new std::unordered_map<const Schema*, Operator>;
  return *all;
}

thread_local int nested = 0;  // operators inside an operator run on CUDA alone
struct Nested {
  Nested() { nested++; }
  ~Nested() { nested--; }
};

struct BelowModes {  // neither autograd, autocast nor a mode of the user's sees these calls
  c10::impl::ExcludeDispatchKeyGuard modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
      c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowAutograd autograd;
};

at::Tensor on_host(const at::Tensor& tensor) {  // a CPU tensor over a CUDA tensor's memory
  void* data = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

bool has_plain_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         tensor.has_storage() && (tensor.is_cuda() || tensor.is_cpu());
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList()) visit(each);
  else if (value.isOptionalTensorList())
    for (const auto& each : value.toOptionalTensorList())
      if (std::optional<at::Tensor> one = each) visit(*one);
}

void write_back(const at::Tensor& to, const at::Tensor& from) {
  if (!to.defined() || !from.defined()) return;
  if (!to.is_cuda()) {
    bool same = to.unsafeGetTensorImpl() == from.unsafeGetTensorImpl();
    if (!same && to.sizes() == from.sizes()) to.copy_(from);
    return;
  }
  bool bytes = to.dim() == 1 && from.dim() == 1 && to.scalar_type() == at::kByte;
  if (bytes && to.numel() != from.numel()) {  // a reserve of cuDNN's, whose head is used
    int64_t count = std::min(to.numel(), from.numel());
    if (count) on_host(to).narrow(0, 0, count).copy_(from.narrow(0, 0, count));
    return;
  }
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  if (to.numel()) on_host(to).copy_(from);
}

// The arguments of one operator, moved to the CPU.
class Arguments {
 public:
  std::optional<at::Generator> generator;

  // Before the CUDA operator runs, keep a copy of what it is going to overwrite: the operator on the
  // CPU needs it as it was.
  void keep(const at::Tensor& given, bool is_out, bool writes_blindly) {
    if (!given.defined() || !given.is_cuda() || kept_.count(given.unsafeGetTensorImpl())) return;
    at::Tensor copy;
    if (is_out) {
      auto options = given.options().device(at::kCPU).memory_format(c10::nullopt);
      copy = at::empty({0}, options);
    } else {
      copy = writes_blindly ? on_host(given) : on_host(given).clone();
    }
    kept_[given.unsafeGetTensorImpl()] = copy;
    if (is_out || !writes_blindly) written_.emplace_back(given, copy);
  }

  c10::IValue on_cpu(const c10::IValue& given) const {
    if (given.isTensor()) return tensor(given.toTensor());
    if (given.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : given.toTensorList()) list.push_back(tensor(each));
      return list;
    }
    if (given.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : given.toOptionalTensorList()) {
        std::optional<at::Tensor> one = each;
        list.push_back(one ? std::optional<at::Tensor>(tensor(*one)) : one);
      }
      return list;
    }
    if (given.isGenerator()) return generator ? c10::IValue(*generator) : c10::IValue();
    if (given.isDevice() && given.toDevice().is_cuda()) return c10::Device(at::kCPU);
    return given;
  }

  void write_all_back() const {
    for (const auto& [given, copy] : written_) write_back(given, copy);
  }

 private:
  at::Tensor tensor(const at::Tensor& given) const {
    if (!given.defined() || !given.is_cuda()) return given;
    auto found = kept_.find(given.unsafeGetTensorImpl());
    return found != kept_.end() ? found->second : on_host(given);
  }

  std::unordered_map<at::TensorImpl*, at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // CUDA tensor, CPU result
};

// Random numbers on the CPU follow CUDA's seed and offset, and leave the CPU's state as it was.
class Seeded {
 public:
  Seeded(Arguments& arguments, uint64_t seed)
      : cpu_(at::globalContext().defaultGenerator(at::kCPU)), state_(cpu_.get_state()) {
    arguments.generator = at::detail::createCPUGenerator(seed);
    cpu_.set_current_seed(seed);
  }
  ~Seeded() { cpu_.set_state(state_); }

 private:
  at::Generator cpu_;
  at::Tensor state_;
};

uint64_t seed_of(const Values& given, c10::Device device) {
  at::Generator chosen = at::globalContext().defaultGenerator(device);
  for (const auto& each : given)
    if (each.isGenerator() && each.toGenerator().device().is_cuda()) chosen = each.toGenerator();
  return chosen.current_seed() * 0x9E3779B97F4A7C15ull +
         chosen.get_offset() * 0xBF58476D1CE4E5B9ull + 1;
}

at::Tensor on_device(const at::Tensor& made, c10::Device device) {
  at::Tensor placed = at::empty(made.sizes(), made.options().device(device));
  write_back(placed, made);
  return placed;
}

void store(c10::IValue& to, const c10::IValue& from, const Operator& ran, c10::Device device) {
  if (from.isNone()) return;
  if (to.isTensor() && from.isTensor()) {
    if (ran.sized_by_values) to = on_device(from.toTensor(), device);
    else write_back(to.toTensor(), from.toTensor());
  } else if (to.isTensorList() && from.isTensorList()) {
    auto targets = to.toTensorVector(), sources = from.toTensorVector();
    for (size_t i = 0; i < targets.size() && i < sources.size(); i++)
      write_back(targets[i], sources[i]);
  } else if (!to.isTensor() && !to.isTensorList()) {
    to = from;
  }
}

void compute_values(const c10::OperatorHandle& op, const Operator& ran, const Arguments& arguments,
                    const Values& given, c10::Device device, torch::jit::Stack* stack) {
  const Schema& schema = op.schema();
  BelowModes below;
  Values moved;
  for (const auto& each : given) moved.push_back(arguments.on_cpu(each));
  Values results;
  if (ran.kernel) {
    results = (*ran.kernel)(schema, moved);
  } else {
    torch::jit::Stack cpu(moved.begin(), moved.end());
    op.callBoxed(&cpu);
    results.assign(cpu.begin(), cpu.end());
  }
  arguments.write_all_back();
  size_t count = schema.returns().size();
  for (size_t i = 0; i < count && i < results.size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;  // an argument, written back already
    store((*stack)[stack->size() - count + i], results[i], ran, device);
  }
}

// The results of an operator whose shapes depend on values, to be filled in.
void push_placeholders(const Schema& schema, const Values& given, torch::jit::Stack* stack) {
  stack->erase(stack->end() - given.size(), stack->end());
  size_t count = schema.returns().size();
  for (size_t i = 0; i < count; i++) {
    const c10::Argument& returned = schema.returns()[i];
    if (returned.alias_info() && returned.alias_info()->isWrite())
      stack->push_back(given[given.size() - count + i]);
    else if (returned.type()->kind() == c10::TypeKind::TensorType) stack->push_back(at::Tensor());
    else stack->push_back(c10::IValue());
  }
}

// An index out of range is what a kernel's device-side assert is for.
void meet(const std::exception& error, const Schema& schema) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  for (const char* words : {"out of range", "out of bounds", "is out of"})
    if (text.find(words) != std::string::npos && emulated_gpu_poison) {
      emulated_gpu_poison(DEVICE_SIDE_ASSERT);
      return;
    }
  if (emulated_gpu_note)
    emulated_gpu_note(("no values: " + schema.name() + ": " + text).c_str());
}

}  // namespace

void add_operator(const Schema& schema, const Operator& added) { operators().emplace(&schema, added); }

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const Schema& schema = op.schema();
  const Operator& running = operators().at(&schema);
  if (nested && running.checks_values) {  // inside an operator there are none yet
    stack->erase(stack->end() - schema.arguments().size(), stack->end());
    return;
  }
  if (nested || running.checks_values) return running.cuda.callBoxed(op, keys, stack);
  Nested guard;
  Values given(stack->end() - schema.arguments().size(), stack->end());
  bool plain = true, integral = true;
  std::optional<c10::Device> device;
  for (const auto& each : given)
    each_tensor(each, [&](const at::Tensor& tensor) {
      plain = plain && has_plain_memory(tensor);
      integral = integral && (!tensor.defined() || tensor.numel() == 1 ||
                              at::isIntegralType(tensor.scalar_type(), true));
      if (tensor.defined() && tensor.is_cuda()) device = tensor.device();
    });
  bool has_values = integral || !integers_alone();
  if (!plain || !device || !has_values) return running.cuda.callBoxed(op, keys, stack);

  uint64_t seed = running.seeded ? seed_of(given, *device) : 0;
  Arguments arguments;
  {
    BelowModes below;
    for (size_t i = 0; i < given.size(); i++) {
      const c10::Argument& argument = schema.arguments()[i];
      if (!argument.alias_info() || !argument.alias_info()->isWrite()) continue;
      each_tensor(given[i], [&](const at::Tensor& tensor) {
        arguments.keep(tensor, argument.is_out(), running.writes_blindly);
      });
    }
  }
  if (running.sized_by_values) push_placeholders(schema, given, stack);
  else running.cuda.callBoxed(op, keys, stack);
  try {
    std::optional<Seeded> seeded;
    if (running.seeded) seeded.emplace(arguments, seed);
    compute_values(op, running, arguments, given, *device, stack);
  } catch (const std::exception& error) {
    meet(error, schema);
  }
}

}  // namespace emulated_gpu
