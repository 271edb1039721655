// Paged attention of one step, cut into tasks that any thread can take.
//
// Three kinds of task. A *decode* is one row's only query, for all heads, over a part of its keys:
// it reads keys and values once, in order. A *prefill* is a block of a row's queries for one
// key-value head: it computes scores as a product of matrices, KEY_TILE keys at a time. A *shared*
// decode is the queries of several rows for one key-value head, over keys that all of them have in
// the same blocks: it reads these once, and computes them as a prefill does (Juravsky et al.,
// "Hydragen", 2024; Ye et al., "Cascade inference", 2024). All keep a running maximum and sum, so
// no row of scores is ever held whole (online softmax: Milakov and Gimelshein, 2018; Dao et al.,
// "FlashAttention", 2022). A decode over many keys is cut into parts whose results are merged
// afterwards (split KV: Dao et al., "Flash-Decoding", 2023), shared ones are such parts.
//
// With `fixed` rows every query is computed by a prefill, whose tiles begin at multiples of
// KEY_TILE: a query's sums then have one order, whatever else is in the step and however its row is
// cut.
#pragma once

#include "team.h"

namespace fairlead {

constexpr int KEY_TILE = 64;  // keys at a time: a multiple of P on every instruction set

// The next block of `left` items that are cut into as few as possible of at most `most`, all of
// about the same size.
inline int block_of(int left, int most) {
  const int blocks = (left + most - 1) / most;
  return (left + blocks - 1) / blocks;
}

// One task, or one merge: then `kv_head` is MERGE and the parts are [part, part + parts).
struct Task {
  int32_t row;      // of a shared decode the first one
  int32_t kv_head;  // of a prefill or a shared decode; DECODE: all heads
  int32_t first;    // the first query of a prefill, within the row; the first key of a decode
  int32_t count;    // queries, or keys
  int32_t part;     // where a decode puts its part, of its first row; -1: it has all keys
  int32_t parts;    // of a shared decode: from the part of one row to that of the next
  int32_t rows;     // of a shared decode, one after the other; 0: it is none
};
constexpr int32_t DECODE = -1, MERGE = -2;

struct Heads {
  int32_t query;
  int32_t kv;
  int32_t dim;
  int32_t value_dim;
};

// The rows of a step; `attention.RaggedRows` says what the tensors are. window 0: none. Tasks are
// in the order of their tokens, and so are merges.
struct Rows {
  const int32_t* starts;
  const int32_t* lens;
  const int32_t* tables;
  const Task* tasks;
  int32_t count;
  int32_t table_width;
  int32_t block_size;
  int32_t window;
  int32_t task_count;   // without merges
  int32_t merge_count;  // they follow the tasks
  int32_t fixed;
};

// The tasks and merges of some consecutive tokens of a step.
struct Tasks {
  const Task* tasks;
  const Task* merges;
  int32_t count;
  int32_t merge_count;
};

// Those of the tokens [begin, end), which cut no task. attention_plan.cpp has this and the plan.
Tasks tasks_of(const Rows& rows, int begin, int end);

// Where a layer's keys and values are: those of a slot so many elements after those of the slot
// before, each slot's heads in one piece. `half`: they are bfloat16.
struct Caches {
  void* keys;
  void* values;
  int64_t key_stride;
  int64_t value_stride;
  int32_t half;
};

// One layer. `query` and `out` begin with token `first` of the step. softcap 0: none. Queries of a token are `q_stride` floats after those of the token before
// it. `parts`: (dim of all values + 2 · heads) floats a part. `keep`: tokens of the step whose
// results are needed, ascending; keep_count -1: all are. Other results may be missing.
struct Attention {
  const float* query;
  Caches caches;
  const float* sinks;
  float* out;
  float* parts;
  int64_t q_stride;
  int64_t first;
  float scale;
  float softcap;
  const int64_t* keep;
  int64_t keep_count;
};

// Two phases of a team's work, the second only where there are merges; a barrier must follow.
void attend(Team& team, const Heads& heads, const Rows& rows, const Tasks& share,
            const Attention& layer);

}  // namespace fairlead
