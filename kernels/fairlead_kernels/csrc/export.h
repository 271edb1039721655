// The functions that Python calls: plain C, so that one library serves every version of torch.
#pragma once

#define FL_EXPORT extern "C" __attribute__((visibility("default")))
