// A team of threads for one call: who am I, wait for the others, take the next piece of work.
//
// The threads are torch's own: `run` asks the OpenMP runtime that torch has loaded for a parallel
// region. So there is one pool in the process, of the size that torch was told, and no second one
// that spins while torch computes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fairlead {

constexpr int MAX_THREADS = 256;

// What the threads of one call share.
struct Shared {
  struct alignas(64) Part {
    std::atomic<uint64_t> state{0};
  };
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  std::atomic<uint32_t> sleepers{0};
  Part parts[MAX_THREADS];
};

class Team {
 public:
  Team(Shared& shared, int index, int size) : index(index), size(size), shared_(shared) {}

  const int index;
  const int size;

  // Returns when all threads of the team have called it.
  void barrier();

  // Calls `work(begin, end)` until the `count` items of this phase are done, at most `grain` of
  // them at a time. Each thread owns consecutive items and takes them in order; one that has none
  // left takes from the end of another's. All threads must call it with the same arguments, with a
  // barrier between two calls.
  template <class Work>
  void share(int count, int grain, Work work) {
    phase_++;
    for (int begin, end; take(count, grain, begin, end);) work(begin, end);
  }

 private:
  bool take(int count, int grain, int& begin, int& end);

  Shared& shared_;
  uint32_t phase_ = 0;
};

using Body = void (*)(Team&, void*);

// Calls `body` on at most `threads` threads at once, the caller's among them, and returns when all
// are done.
void run(int threads, Body body, void* argument);

template <class Function>
void run(int threads, Function function) {
  run(
      threads, [](Team& team, void* f) { (*static_cast<Function*>(f))(team); }, &function);
}

// Memory of the calling thread, kept for the next call: at least `floats`, on a cache line's
// boundary. Its content does not survive the next call of `scratch`.
float* scratch(size_t floats);

}  // namespace fairlead
