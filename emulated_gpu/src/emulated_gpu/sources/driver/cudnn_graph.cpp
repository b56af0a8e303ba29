// cuDNN's graph API: descriptors that remember what they were given, and for every convolution the
// engines that PyTorch chooses from: with the workspace that NVIDIA's takes, and without.
#include "cudnn.h"

#include <cstring>
#include <map>
#include <memory>

namespace emulated_gpu::cudnn {
namespace {

// cudnnBackendDescriptorType_t
constexpr int ENGINE = 2, ENGINE_CONFIG = 3, FORWARD_OPERATION = 10, WEIGHT_OPERATION = 11,
              DATA_OPERATION = 12;
// cudnnBackendAttributeType_t
constexpr int TYPE_INT64 = 3, TYPE_NUMERICAL_NOTE = 11, TYPE_DESCRIPTOR = 15, TYPE_INT32 = 23;
// cudnnBackendAttributeName_t
constexpr int DILATIONS = 102, STRIDES = 103, HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202,
              CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402,
              GRAPH_OPERATIONS = 801, TENSOR_TYPE = 901, TENSOR_SIZES = 902, TENSOR_STRIDES = 903,
              ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301, ENGINE_NOTES = 1303;
constexpr u64 ATTENTION_BYTES = 256;  // of every recorded training, forward and backward
constexpr int NOTE_TENSOR_CORE = 0;  // cudnnBackendNumericalNote_t

struct Content;
using Shared = std::shared_ptr<Content>;

struct Attribute {
  std::vector<char> bytes;
  long long count = 0;
  std::vector<Shared> descriptors;
};
struct Content {
  int type;
  std::map<int, Attribute> attributes;

  const Shared* descriptor(int name) const {
    auto found = attributes.find(name);
    bool is_there = found != attributes.end() && !found->second.descriptors.empty();
    return is_there ? &found->second.descriptors[0] : nullptr;
  }
  std::vector<u64> integers(int name) const {
    auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    const auto* first = reinterpret_cast<const long long*>(found->second.bytes.data());
    return {first, first + found->second.bytes.size() / sizeof(long long)};
  }
  template <class Value>
  void set(int name, Value value) {
    Attribute& attribute = attributes[name];
    attribute.bytes.assign(reinterpret_cast<char*>(&value),
                           reinterpret_cast<char*>(&value) + sizeof value);
    attribute.count = 1;
  }
};
struct Descriptor {  // what the caller holds; others may still hold its content
  Shared content;
};

struct OperationNames {
  int type, convolution, weight, data, result;
  Direction direction;
};
constexpr OperationNames OPERATIONS[] = {
    {FORWARD_OPERATION, 702, 703, 704, 705, Direction::FORWARD},
    {DATA_OPERATION, 708, 709, 710, 711, Direction::DATA},
    {WEIGHT_OPERATION, 714, 715, 716, 717, Direction::WEIGHT},
};

Tensor tensor_of(const Content& content) {
  int type = 0;
  auto found = content.attributes.find(TENSOR_TYPE);
  if (found != content.attributes.end()) memcpy(&type, found->second.bytes.data(), sizeof type);
  return {type, content.integers(TENSOR_SIZES), content.integers(TENSOR_STRIDES)};
}

// Reads the convolution of a graph; false where it has none, as attention and normalization.
bool read_convolution(const Content& graph, Convolution* out) {
  auto operations = graph.attributes.find(GRAPH_OPERATIONS);
  if (operations == graph.attributes.end()) return false;
  for (const Shared& operation : operations->second.descriptors)
    for (const OperationNames& names : OPERATIONS) {
      if (operation->type != names.type) continue;
      const Shared *convolution = operation->descriptor(names.convolution),
                   *weight = operation->descriptor(names.weight),
                   *data = operation->descriptor(names.data),
                   *result = operation->descriptor(names.result);
      if (!convolution || !weight || !data || !result) return false;
      *out = {tensor_of(**data),
              tensor_of(**weight),
              tensor_of(**result),
              (*convolution)->integers(STRIDES),
              (*convolution)->integers(DILATIONS),
              names.direction};
      return out->data.sizes.size() >= 3;
    }
  return false;
}

struct Engine {
  u64 workspace_bytes;
  bool noted_tensor_cores;  // PyTorch leaves it out where TF32 is not allowed
};

// The engines for a graph, best first. Only float32 has some with tensor cores and some without.
std::vector<Engine> engines_for(const Content& graph) {
  Convolution convolution;
  if (!read_convolution(graph, &convolution)) {
    note_estimate("cuDNN: a graph without a convolution, as if it were attention");
    return {{ATTENTION_BYTES, false}};
  }
  int type = convolution.data.data_type, major = card(current_device()).major;
  bool is_half = type == HALF || type == BFLOAT16;
  note_estimate(is_half ? "cuDNN: workspaces of convolutions in half precision"
                        : "cuDNN: workspaces of convolutions in float32");
  std::vector<Engine> engines;
  auto offer = [&](bool tensor_cores, bool noted) {
    Workspaces sizes = workspaces(convolution, tensor_cores);
    engines.push_back({sizes.preferred_bytes, noted});
    if (sizes.least_bytes) engines.push_back({sizes.least_bytes, noted});
    engines.push_back({0, noted});  // recorded trainings never lacked one that takes nothing
  };
  if (type == FLOAT && major >= 8) offer(true, true);
  offer(is_half && major >= 7, false);
  return engines;
}

std::vector<Shared> configurations_for(const Shared& graph) {
  std::vector<Shared> all;
  for (const Engine& each : engines_for(*graph)) {
    auto engine = std::make_shared<Content>(Content{ENGINE, {}});
    engine->attributes[ENGINE_GRAPH].descriptors = {graph};
    engine->set<long long>(ENGINE_INDEX, static_cast<long long>(all.size()));
    if (each.noted_tensor_cores) engine->set<int>(ENGINE_NOTES, NOTE_TENSOR_CORE);
    auto configuration = std::make_shared<Content>(Content{ENGINE_CONFIG, {}});
    configuration->attributes[CONFIG_ENGINE].descriptors = {engine};
    configuration->set<long long>(CONFIG_WORKSPACE, static_cast<long long>(each.workspace_bytes));
    all.push_back(configuration);
  }
  return all;
}

// Derives what cuDNN works out from the rest: results of heuristics, the workspace of a plan.
void derive(Content& content, int name) {
  if (name == HEURISTIC_RESULTS && !content.attributes.count(name))
    if (const Shared* graph = content.descriptor(HEURISTIC_GRAPH))
      content.attributes[name].descriptors = configurations_for(*graph);
  if (name == PLAN_WORKSPACE)
    if (const Shared* configuration = content.descriptor(PLAN_CONFIG)) {
      std::vector<u64> bytes = (*configuration)->integers(CONFIG_WORKSPACE);
      content.set<long long>(name, bytes.empty() ? 0 : static_cast<long long>(bytes[0]));
    }
}

}  // namespace
}  // namespace emulated_gpu::cudnn

using namespace emulated_gpu;
using namespace emulated_gpu::cudnn;

EXPORT int cudnnBackendCreateDescriptor(int type, void** out) {
  *out = new Descriptor{std::make_shared<Content>(Content{type, {}})};
  return SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(void* made) {
  delete static_cast<Descriptor*>(made);
  return SUCCESS;
}
EXPORT int cudnnBackendSetAttribute(void* made, int name, int type, long long count,
                                    const void* values) {
  Attribute& attribute = static_cast<Descriptor*>(made)->content->attributes[name];
  attribute = {};
  attribute.count = count;
  if (type == TYPE_DESCRIPTOR) {
    auto* given = static_cast<Descriptor* const*>(values);
    for (long long at = 0; at < count; at++) attribute.descriptors.push_back(given[at]->content);
  } else if (type == TYPE_INT64) {
    auto* given = static_cast<const char*>(values);
    attribute.bytes.assign(given, given + count * sizeof(long long));
  } else if (name == TENSOR_TYPE) {
    auto* given = static_cast<const char*>(values);
    attribute.bytes.assign(given, given + sizeof(int));
  }
  return SUCCESS;
}
EXPORT int cudnnBackendFinalize(void*) { return SUCCESS; }
EXPORT int cudnnBackendGetAttribute(void* made, int name, int type, long long wanted,
                                    long long* count, void* out) {
  Content& content = *static_cast<Descriptor*>(made)->content;
  derive(content, name);
  auto found = content.attributes.find(name);
  long long there = 0;
  if (found != content.attributes.end()) {
    const Attribute& attribute = found->second;
    bool is_list = type == TYPE_DESCRIPTOR;
    there = is_list ? static_cast<long long>(attribute.descriptors.size()) : attribute.count;
    for (long long at = 0; out && is_list && at < wanted && at < there; at++)
      static_cast<Descriptor**>(out)[at]->content = attribute.descriptors[at];
    u64 size = type == TYPE_NUMERICAL_NOTE ? sizeof(int) : sizeof(long long);
    if (out && !is_list && wanted > 0)
      memcpy(out, attribute.bytes.data(), std::min<u64>(attribute.bytes.size(), wanted * size));
  } else if (out && wanted > 0) {  // such as the shared memory that an engine takes
    if (type == TYPE_INT64) *static_cast<long long*>(out) = 0;
    if (type == TYPE_INT32) *static_cast<int*>(out) = 0;
  }
  if (count) *count = out ? std::min(there, wanted) : there;
  return SUCCESS;
}
EXPORT int cudnnBackendExecute(void* handle, void*, void*) {
  return execute(static_cast<Handle*>(handle));
}
