// Accounts the device memory of all processes of one emulated machine.
//
// A file in /dev/shm, which processes lock and map, holds a row for each. Rows of processes that
// died are swept, as the driver frees the memory of a killed process. The last process to leave
// removes the file. `machine.py` reads and writes the same layout.
#include "emulated_gpu.h"

#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace emulated_gpu {
namespace {

constexpr int MAX_PROCESSES = 128;

struct Row {
  u64 pid, started;  // the start time tells a process from a later one with the same pid
  u64 bytes[MAX_DEVICES];
};
struct Table {
  u64 held_by_others[MAX_DEVICES];
  Row rows[MAX_PROCESSES];
};

u64 start_time(int pid) {  // in clock ticks since boot; 0 where the process has ended
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  char* at = strrchr(text, ')');  // the command's name before it may hold anything
  if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; field < 22 && at; field++) at = strchr(at + 1, ' ');
  return at ? strtoull(at, nullptr, 10) : 0;
}

struct Mapping {
  int file = -1;
  Table* table = nullptr;
  std::string path;
  Row own_before_exit{};
};

void register_process(Table& table);

Mapping open_table() {
  Mapping made;
  made.path = "/dev/shm/emulated-gpu-" + std::to_string(getuid()) + "-" + settings().machine;
  for (;;) {
    made.file = open(made.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct stat opened, there;
    if (made.file < 0 || flock(made.file, LOCK_EX) || ftruncate(made.file, sizeof(Table)) ||
        fstat(made.file, &opened)) {
      fprintf(stderr, "emulated-gpu: cannot open %s: %s\n", made.path.c_str(), strerror(errno));
      abort();
    }
    if (!stat(made.path.c_str(), &there) && there.st_ino == opened.st_ino) break;
    close(made.file);  // the last process of the machine removed it in between
  }
  void* at = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, made.file, 0);
  if (at == MAP_FAILED) abort();
  made.table = static_cast<Table*>(at);
  register_process(*made.table);
  flock(made.file, LOCK_UN);
  return made;
}

Mapping* opened = nullptr;
int opened_by = 0;

Mapping& mapping() {
  Lock lock(global_mutex());
  if (opened_by != getpid()) {  // also in a forked process: locks of a shared descriptor are shared
    opened = new Mapping(open_table());
    opened_by = getpid();
  }
  return *opened;
}

class Exclusive {
 public:
  Exclusive() : lock_(global_mutex()), file_(mapping().file) { flock(file_, LOCK_EX); }
  ~Exclusive() { flock(file_, LOCK_UN); }

 private:
  Lock lock_;
  int file_;
};

void sweep(Table& table) {
  for (Row& row : table.rows)
    if (row.pid && start_time(static_cast<int>(row.pid)) != row.started) row = Row{};
}

Row* row_of(Table& table, u64 pid) {
  for (Row& row : table.rows)
    if (row.pid == pid) return &row;
  return nullptr;
}

void register_process(Table& table) {
  sweep(table);
  u64 pid = getpid();
  Row* row = row_of(table, pid);
  if (!row) row = row_of(table, 0);
  if (!row) {
    fprintf(stderr, "emulated-gpu: more than %d processes use one emulated machine\n", MAX_PROCESSES);
    abort();
  }
  if (!row->pid) *row = Row{pid, start_time(static_cast<int>(pid)), {}};
}

u64 used(const Table& table, int physical) {
  u64 sum = settings().cards[physical].held_by_others_bytes + table.held_by_others[physical];
  for (const Row& row : table.rows)
    if (row.pid) sum += row.bytes[physical];
  return sum;
}

__attribute__((destructor)) void leave_machine() {
  if (opened_by != getpid()) return;
  Exclusive guard;
  Table& table = *mapping().table;
  if (Row* row = row_of(table, getpid())) *row = Row{};
  sweep(table);
  for (const Row& row : table.rows)
    if (row.pid) return;
  for (u64 bytes : table.held_by_others)
    if (bytes) return;
  unlink(mapping().path.c_str());
}

}  // namespace

bool reserve_bytes(int physical, u64 bytes) {
  Exclusive guard;
  Table& table = *mapping().table;
  u64 total = settings().cards[physical].total_bytes;
  if (used(table, physical) + bytes > total) {
    sweep(table);
    if (used(table, physical) + bytes > total) return false;
  }
  if (Row* row = row_of(table, getpid())) row->bytes[physical] += bytes;
  return true;
}

void release_bytes(int physical, u64 bytes) {
  Exclusive guard;
  if (Row* row = row_of(*mapping().table, getpid()))
    row->bytes[physical] -= bytes < row->bytes[physical] ? bytes : row->bytes[physical];
}

u64 used_bytes(int physical) {
  Exclusive guard;
  sweep(*mapping().table);
  return used(*mapping().table, physical);
}

std::vector<Holder> holders(int physical) {
  Exclusive guard;
  sweep(*mapping().table);
  std::vector<Holder> found;
  for (const Row& row : mapping().table->rows)
    if (row.pid && row.bytes[physical])
      found.push_back({static_cast<int>(row.pid), row.bytes[physical]});
  return found;
}

}  // namespace emulated_gpu
