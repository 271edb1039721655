// What the machine's processor can run. Of the libraries, the one for the baseline is asked.

#include "export.h"

#ifndef FAIRLEAD_SOURCES
#define FAIRLEAD_SOURCES ""
#endif

// A hash of the sources that this library was built from, given by hatch_build.py.
FL_EXPORT const char* fairlead_sources() { return FAIRLEAD_SOURCES; }

FL_EXPORT int fairlead_supports(const char* instruction_set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const bool vnni = v4 && __builtin_cpu_supports("avx512vnni");
  if (__builtin_strcmp(instruction_set, "avx512+vnni") == 0) return vnni;
  if (__builtin_strcmp(instruction_set, "avx512") == 0) return v4;
  if (__builtin_strcmp(instruction_set, "avx2") == 0) return v3;
#endif
  return __builtin_strcmp(instruction_set, "baseline") == 0;
}
