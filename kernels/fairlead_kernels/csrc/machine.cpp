// What the machine's processor can run. The library for the baseline is asked, or one of this file
// alone.

#include "export.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef FAIRLEAD_SOURCES
#define FAIRLEAD_SOURCES ""
#endif

// A hash of the sources that this library was built from, given by compilation.py.
FL_EXPORT const char* fairlead_sources() { return FAIRLEAD_SOURCES; }

#if defined(__x86_64__)
namespace {

// Whether the processor multiplies bytes in tiles and the system lets this process use them. Linux
// does so for a whole process, on demand, since tiles make what a signal saves larger.
bool may_use_tiles() {
#if defined(FAIRLEAD_AMX_EMULATED)
  return true;
#else
  unsigned a, b, c, d;
  constexpr unsigned OSXSAVE = 1u << 27, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & OSXSAVE) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & AMX_TILE) == 0 || (d & AMX_INT8) == 0) return false;
  constexpr unsigned TILE_STATE = 3u << 17;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & TILE_STATE) != TILE_STATE) return false;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#endif
}

}  // namespace
#endif

FL_EXPORT int fairlead_supports(const char* instruction_set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const bool vnni = v4 && __builtin_cpu_supports("avx512vnni");
  if (__builtin_strcmp(instruction_set, "avx512+amx") == 0) return vnni && may_use_tiles();
  if (__builtin_strcmp(instruction_set, "avx512+vnni") == 0) return vnni;
  if (__builtin_strcmp(instruction_set, "avx512+bf16") == 0) {
    return v4 && __builtin_cpu_supports("avx512bf16");
  }
  if (__builtin_strcmp(instruction_set, "avx512") == 0) return v4;
  if (__builtin_strcmp(instruction_set, "avx2") == 0) return v3;
#endif
  return __builtin_strcmp(instruction_set, "baseline") == 0;
}
