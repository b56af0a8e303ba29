// Registers the operators that get values, when the library is loaded.
#include "values.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <unordered_set>

namespace emulated_gpu {
namespace {

const std::string NAMESPACE = "aten::";

// Operators that only make or look at memory, and those whose tensors have no plain memory.
const char* const WITHOUT_VALUES[] = {
    "empty",       "set_",          "resize",     "_resize",     "as_strided",
    "view",        "_view",         "_reshape",   "alias",       "unfold",
    "is_set_to",   "record_stream", "is_pinned",  "_pin_memory", "_local_scalar_dense",
    "_nested",     "_sparse",       "sparse_",    "_to_sparse",  "_coalesce",
    "_cslt",       "_fill_mem",     "_use_",      "_to_copy",    "_efficientzerotensor",
    "_cudnn_init", "_cudnn_rnn_fl", "cudnn_is_acceptable",       "miopen",
    "_make_per",   "q_",            "int_repr",   "dequantize",  "_masked_scale"};

const char* const CHECK = "aten::_linalg_check_errors";  // of what a solver said of its success

const std::unordered_set<std::string> COMPOSITE = {  // no CUDA kernel of their own, and yet one unit
    "aten::copy_", "aten::convolution", "aten::_convolution", CHECK};

// The fused optimizers do read what they overwrite, in place and once, as does their CPU kernel.
const std::unordered_set<std::string> BLIND_WRITERS = {
    "aten::zero_",         "aten::fill_",        "aten::normal_",     "aten::uniform_",
    "aten::random_",       "aten::exponential_", "aten::copy_",       "aten::set_data",
    "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_"};

bool returns_a_view(const Schema& schema) {
  for (const c10::Argument& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return false;
}
bool has_values(const Schema& schema) {
  std::string name = schema.name().substr(NAMESPACE.size());
  for (const char* prefix : WITHOUT_VALUES)
    if (name.rfind(prefix, 0) == 0) return false;
  return !returns_a_view(schema);
}

const Kernel* own_kernel(const std::string& name) {
  for (const auto* kernels : {&special_kernels(), &recurrent_kernels()})
    if (auto found = kernels->find(name); found != kernels->end()) return &found->second;
  return nullptr;
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
// The operator's entry, which is private before torch 2.9. Naming it here as an argument of a template
// that is instantiated is what the language lets one do with a private member.
auto& entry_of(const c10::OperatorHandle& op);
template <auto Definition>
struct Opened {
  friend auto& entry_of(const c10::OperatorHandle& op) { return (op.*Definition)->op; }
};
template struct Opened<&c10::OperatorHandle::operatorDef_>;
CudaKernel cuda_kernel(const c10::OperatorHandle& op) {
  return entry_of(op).lookup(c10::DispatchKeySet(c10::DispatchKey::CUDA));
}
#else
CudaKernel cuda_kernel(const c10::OperatorHandle& op) {
  return op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
}
#endif

struct Quiet : c10::WarningHandler {  // about operators that have a kernel already
  void process(const c10::Warning&) override {}
};

bool register_operators() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  using c10::DispatchKey;
  auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind(NAMESPACE, 0)) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !has_values(op->schema())) continue;
    std::string full = c10::toString(name);
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && !COMPOSITE.count(full)) continue;
    const Kernel* kernel = own_kernel(full);
    if (!kernel && !op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) continue;
    add_operator(op->schema(), {cuda_kernel(*op),
                                op->hasTag(at::Tag::nondeterministic_seeded),
                                BLIND_WRITERS.count(name.name) > 0,
                                op->hasTag(at::Tag::dynamic_output_shape), full == CHECK, kernel});
    library->impl(full.substr(NAMESPACE.size()).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  return true;
}
const bool REGISTERED = register_operators();

}  // namespace
}  // namespace emulated_gpu
