// Reads the settings of the emulated machine from the environment, once, at the first call.
//
//   AUTOFIT_EMULATION_CARDS    a card each, apart by ";", as "name=NVIDIA L4,total=23654301204,
//                              context=650117120,capability=8.9,multiprocessors=58,others=0"
//   AUTOFIT_EMULATION_MACHINE  processes with the same name share the memory of the cards
//   AUTOFIT_EMULATION_FAULTS   see faults.cpp
//   AUTOFIT_EMULATION_NVML     words that limit NVML: refuse, noproc, nomem, hostpid, nouuid, mig
//   AUTOFIT_EMULATION_DRIVER   version of CUDA that the driver supports
//   AUTOFIT_EMULATION_CUDNN    version of cuDNN, as in cudnnGetVersion
//   AUTOFIT_EMULATION_VALUES   0: kernels write nothing
//   AUTOFIT_EMULATION_LOG      a file to which errors, contexts and allocations are appended
#include "emulation.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <unistd.h>

namespace emulation {
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
  read.cards = parse_cards(text_of("AUTOFIT_EMULATION_CARDS", ""));
  read.machine = text_of("AUTOFIT_EMULATION_MACHINE", "default");
  read.faults = text_of("AUTOFIT_EMULATION_FAULTS", "");
  read.nvml = text_of("AUTOFIT_EMULATION_NVML", "");
  read.driver_version = std::stoi(text_of("AUTOFIT_EMULATION_DRIVER", "13000"));
  read.cudnn_version = std::stoi(text_of("AUTOFIT_EMULATION_CUDNN", "91900"));
  read.values = text_of("AUTOFIT_EMULATION_VALUES", "1") != "0";
  return read;
}

}  // namespace

const Settings& settings() {
  static const auto* read = new Settings(read_settings());  // outlives destructors at exit
  return *read;
}

void write_log(const char* format, ...) {
  static FILE* const log = [] {
    const char* path = getenv("AUTOFIT_EMULATION_LOG");
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

}  // namespace emulation
