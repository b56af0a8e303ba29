// Reads the settings of the emulated machine from the environment, once, at the first call.
//
//   EMULATED_GPU_CARDS    a card each, apart by ";", as "name=NVIDIA L4,total=23654301204,
//                              context=650117120,capability=8.9,multiprocessors=58,others=0"
//   EMULATED_GPU_MACHINE  processes with the same name share the memory of the cards
//   EMULATED_GPU_FAULTS   see faults.cpp
//   EMULATED_GPU_NVML     words that limit NVML: refuse, noproc, nomem, hostpid, nouuid, mig
//   EMULATED_GPU_DRIVER   version of CUDA that the driver supports
//   EMULATED_GPU_CUDNN    version of cuDNN, as in cudnnGetVersion
//   EMULATED_GPU_VALUES   1: kernels compute; integers: those of integers alone; 0: none
//   EMULATED_GPU_LOG      a file to which errors, contexts and allocations are appended
#include "emulated_gpu.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <unistd.h>

namespace emulated_gpu {
namespace {

std::string text_of(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

Card parse_card(const std::string& text) {
  Card card;
  std::stringstream fields(text);
  for (std::string field; std::getline(fields, field, ',');) {
    size_t at = field.find('=');
    if (at == std::string::npos) continue;
    std::string key = field.substr(0, at), value = field.substr(at + 1);
    if (key == "name") card.name = value;
    if (key == "total") card.total_bytes = std::stoull(value);
    if (key == "context") card.context_bytes = std::stoull(value);
    if (key == "others") card.held_by_others_bytes = std::stoull(value);
    if (key == "multiprocessors") card.multiprocessors = std::stoi(value);
    if (key == "capability") sscanf(value.c_str(), "%d.%d", &card.major, &card.minor);
  }
  return card;
}

std::vector<Card> parse_cards(const std::string& text) {
  std::vector<Card> cards;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ';') && cards.size() < MAX_DEVICES;)
    if (!part.empty()) cards.push_back(parse_card(part));
  return cards;
}

Settings read_settings() {
  Settings read;
  read.cards = parse_cards(text_of("EMULATED_GPU_CARDS", ""));
  read.machine = text_of("EMULATED_GPU_MACHINE", "default");
  read.faults = text_of("EMULATED_GPU_FAULTS", "");
  read.nvml = text_of("EMULATED_GPU_NVML", "");
  read.driver_version = std::stoi(text_of("EMULATED_GPU_DRIVER", "13000"));
  read.cudnn_version = std::stoi(text_of("EMULATED_GPU_CUDNN", "91900"));
  read.values = text_of("EMULATED_GPU_VALUES", "1");
  return read;
}

}  // namespace

const Settings& settings() {
  static const auto* read = new Settings(read_settings());  // outlives destructors at exit
  return *read;
}

void write_log(const char* format, ...) {
  static FILE* const log = [] {
    const char* path = getenv("EMULATED_GPU_LOG");
    return path && *path ? fopen(path, "ae") : nullptr;
  }();
  if (!log) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(log, "[%d] ", getpid());
  vfprintf(log, format, arguments);
  fputc('\n', log);
  fflush(log);
  va_end(arguments);
}

std::recursive_mutex& global_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

}  // namespace emulated_gpu
