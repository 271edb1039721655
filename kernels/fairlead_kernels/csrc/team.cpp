#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <new>

#include "export.h"

namespace fairlead {
namespace {

// The functions of torch's OpenMP runtime; GNU's, LLVM's and Intel's all export these names.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Number = int (*)();
Parallel openmp_parallel = nullptr;
Number openmp_thread_num = nullptr;
Number openmp_num_threads = nullptr;

// OpenMP's threads do not exist in a forked child, and waiting for them would never end.
bool forked = false;

struct Call {
  Body body;
  void* argument;
  Shared shared;
};

void enter(void* argument) {
  Call& call = *static_cast<Call*>(argument);
  // OpenMP may start fewer threads than asked for.
  Team team(call.shared, openmp_thread_num(), openmp_num_threads());
  call.body(team, call.argument);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A phase's part of one thread: items [head, tail) are not taken yet.
uint64_t part_of(uint32_t phase, uint32_t head, uint32_t tail) {
  return uint64_t(phase & 0xffff) << 48 | uint64_t(tail) << 24 | head;
}

}  // namespace

void run(int threads, Body body, void* argument) {
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  Call call{body, argument, {}};
  if (threads <= 1 || openmp_parallel == nullptr || forked) {
    Team alone(call.shared, 0, 1);
    body(alone, argument);
    return;
  }
  openmp_parallel(enter, &call, unsigned(threads), 0);
}

// Spins for a few microseconds, which is what a phase's threads differ by; then sleeps, so that a
// thread which was taken from its core gets it back.
void Team::barrier() {
  if (size == 1) return;
  const uint32_t generation = shared_.generation.load(std::memory_order_relaxed);
  if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == uint32_t(size - 1)) {
    shared_.arrived.store(0, std::memory_order_relaxed);
    shared_.generation.store(generation + 1);
    if (shared_.sleepers.load() != 0) {
      syscall(SYS_futex, &shared_.generation, FUTEX_WAKE_PRIVATE, size, nullptr, nullptr, 0);
    }
    return;
  }
  for (int spin = 0; spin < 2000; spin++) {
    if (shared_.generation.load(std::memory_order_acquire) != generation) return;
    pause();
  }
  shared_.sleepers.fetch_add(1);
  while (shared_.generation.load() == generation) {
    syscall(SYS_futex, &shared_.generation, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
  }
  shared_.sleepers.fetch_sub(1);
}

bool Team::take(int count, int grain, int& begin, int& end) {
  for (int step = 0; step < size; step++) {
    const int owner = (index + step) % size;
    std::atomic<uint64_t>& part = shared_.parts[owner].state;
    uint64_t seen = part.load(std::memory_order_relaxed);
    for (;;) {
      uint32_t head = seen & 0xffffff, tail = seen >> 24 & 0xffffff;
      if (seen >> 48 != (phase_ & 0xffff)) {  // nobody has taken from it in this phase
        head = uint32_t(int64_t(count) * owner / size);
        tail = uint32_t(int64_t(count) * (owner + 1) / size);
      }
      const uint32_t taken = tail - head < uint32_t(grain) ? tail - head : uint32_t(grain);
      if (step == 0) {
        begin = int(head);
        head += taken;
        end = int(head);
      } else {
        end = int(tail);
        tail -= taken;
        begin = int(tail);
      }
      if (step != 0 && taken == 0) break;
      if (part.compare_exchange_weak(seen, part_of(phase_, head, tail))) {
        if (taken == 0) break;
        return true;
      }
    }
  }
  return false;
}

float* scratch(size_t floats) {
  struct Memory {
    float* data = nullptr;
    size_t size = 0;
    ~Memory() { free(data); }
  };
  thread_local Memory memory;
  if (memory.size < floats) {
    free(memory.data);
    memory.size = (floats + 1023) / 1024 * 1024;
    memory.data = static_cast<float*>(aligned_alloc(64, memory.size * sizeof(float)));
    if (memory.data == nullptr) throw std::bad_alloc();
  }
  return memory.data;
}

}  // namespace fairlead

// Gives the library torch's OpenMP runtime. Without it every call runs on its caller's thread.
FL_EXPORT void fairlead_use_openmp(void* parallel, void* thread_num, void* num_threads) {
  using namespace fairlead;
  openmp_parallel = reinterpret_cast<Parallel>(parallel);
  openmp_thread_num = reinterpret_cast<Number>(thread_num);
  openmp_num_threads = reinterpret_cast<Number>(num_threads);
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)registered;
}

// The number of threads that a call with `threads` runs on, for tests.
FL_EXPORT int fairlead_team_size(int threads) {
  std::atomic<int> size{0};
  fairlead::run(threads, [&](fairlead::Team& team) { size.store(team.size); });
  return size.load();
}
