// How a step's attention is cut into tasks, and a step into slabs.
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <vector>

#include "attention.h"
#include "export.h"

using namespace fairlead;

namespace fairlead {
namespace {

constexpr int ROWS = 192;  // of a prefill task, or a shared decode
// A shared decode has at least so many rows and keys: it copies keys before it uses them.
constexpr int SHARERS = 3, SHARED_KEYS = 128;
// What a part of a decode costs, and a merge of parts with the barrier before it, as bytes of keys
// and values that a thread reads meanwhile: 0.4 and 2 microseconds.
constexpr int64_t PART_BYTES = 10 << 10, MERGE_BYTES = 50 << 10;
// Parts a thread that are tried, at most. More decodes than that are even enough as they are.
constexpr int MOST_PARTS = 8;

// Queries of a prefill task or a shared decode, at most: so many rows of scores and sums stay in
// the second-level cache.
int queries_of(const Heads& heads) {
  const int per_kv = heads.query / heads.kv;
  return per_kv < ROWS ? ROWS / per_kv : 1;
}

bool decodes(const Rows& rows, int row) {
  return !rows.fixed && rows.starts[row + 1] - rows.starts[row] == 1;
}

// The tasks of a step.
class Plan {
 public:
  Plan(const Heads& heads, const Rows& rows, int threads) : heads_(heads), rows_(rows) {
    const int queries = queries_of(heads);
    for (int row = 0; row < rows.count;) {
      row = decodes(rows, row) ? find_sharers(row, queries) : row + 1;
    }
    std::vector<int> own;  // keys that each decode has alone
    int64_t shared = 0;    // keys that are shared, of each head
    for (const Sharers& some : sharers_) {
      shared += int64_t(some.keys) * heads.kv;
      for (int row = some.row; row < some.end; row++) own.push_back(keys_of(row) - some.keys);
    }
    most_ = most_even(own, threads);
    most_shared_ = largest_part(shared, threads);
    auto next = sharers_.begin();
    for (int row = 0; row < rows.count;) {
      if (decodes(rows, row)) {
        put_decodes(*next);
        row = next++->end;
      } else {
        put_prefill(row++, queries);
      }
    }
  }

  std::vector<Task> tasks, merges;
  int parts = 0;

 private:
  // The decodes [row, end) and how many keys they share, from the first one on.
  struct Sharers {
    int row;
    int end;
    int keys;
  };

  // Four tasks a thread even out; a part of fewer than 256 keys costs more than it helps.
  static int64_t largest_part(int64_t keys, int threads) {
    const int64_t most = threads > 1 ? keys / (4 * threads) : keys;
    return whole_tiles(std::max<int64_t>(most, 256));
  }

  // The largest part of decodes with which the threads are done first: two threads need as long for
  // three whole decodes as for four. Of many decodes only a long one is cut.
  int64_t most_even(const std::vector<int>& decodes, int threads) const {
    const int64_t keys = std::accumulate(decodes.begin(), decodes.end(), int64_t(0));
    if (int64_t(decodes.size()) > int64_t(MOST_PARTS) * threads) {
      return largest_part(keys, threads);
    }
    int64_t best = whole_tiles(keys), least = time_of(decodes, best, threads);
    for (int parts = 1; parts <= MOST_PARTS; parts++) {
      const int64_t most = whole_tiles(keys / (int64_t(parts) * threads));
      const int64_t time = time_of(decodes, most, threads);
      if (time < least) best = most, least = time;
    }
    return best;
  }

  // The time until all parts are done, in bytes that one thread reads meanwhile. A thread takes the
  // next part as soon as it is free.
  int64_t time_of(const std::vector<int>& decodes, int64_t most, int threads) const {
    const int64_t key_bytes = int64_t(heads_.kv) * (heads_.dim + heads_.value_dim) * 4;
    std::priority_queue<int64_t, std::vector<int64_t>, std::greater<int64_t>> ends;
    for (int thread = 0; thread < threads; thread++) ends.push(0);
    int64_t last = 0, merging = 0;
    for (const int keys : decodes) {
      if (keys > most) merging = MERGE_BYTES;
      each_part(0, keys, most, [&](int, int, int count) {
        const int64_t end = ends.top() + count * key_bytes + PART_BYTES;
        ends.pop();
        ends.push(end);
        last = std::max(last, end);
      });
    }
    return last + merging;
  }

  static int64_t whole_tiles(int64_t keys) {
    return std::max<int64_t>(1, (keys + KEY_TILE - 1) / KEY_TILE) * KEY_TILE;
  }

  int first_key(int row) const {
    const int len = rows_.lens[row];
    return rows_.window != 0 && len > rows_.window ? len - rows_.window : 0;
  }

  int keys_of(int row) const { return rows_.lens[row] - first_key(row); }

  // Blocks that two rows begin with, at most so many.
  int common_blocks(int row, int other, int most) const {
    const int32_t* table = rows_.tables + int64_t(row) * rows_.table_width;
    const int32_t* same = rows_.tables + int64_t(other) * rows_.table_width;
    return int(std::mismatch(table, table + most, same).first - table);
  }

  // Whole blocks before a decode's last key, whose block is its own; none where the window has
  // passed some.
  int blocks_before(int row) const {
    return first_key(row) > 0 ? 0 : (rows_.lens[row] - 1) / rows_.block_size;
  }

  // Finds the decodes from `row` on that share keys, at most `most`: each more of them saves keys.
  // This one alone where too few share. Returns where they end.
  int find_sharers(int row, int most) {
    int end = row + 1, blocks = blocks_before(row);
    for (; end < rows_.count && end - row < most && decodes(rows_, end); end++) {
      const int common = common_blocks(row, end, std::min(blocks, blocks_before(end)));
      // Blocks that are not read again: with this row, and without it.
      const int64_t with = int64_t(common) * (end - row);
      const int64_t without = int64_t(blocks) * (end - row - 1);
      if (common * rows_.block_size < SHARED_KEYS || with < without) break;
      blocks = common;
    }
    if (end - row < SHARERS) {
      end = row + 1;
      blocks = 0;
    }
    sharers_.push_back({row, end, blocks * rows_.block_size});
    return end;
  }

  static int parts_of(int keys, int64_t most) { return int((keys + most - 1) / most); }

  // Calls `put(number, first, count)` for even parts of `keys` from `begin` on.
  template <class Put>
  static void each_part(int begin, int keys, int64_t most, Put put) {
    const int number = parts_of(keys, most);
    for (int part = 0; part < number; part++) {
      const int from = int(int64_t(keys) * part / number);
      const int to = int(int64_t(keys) * (part + 1) / number);
      put(part, begin + from, to - from);
    }
  }

  void put_decodes(const Sharers& some) {
    const int rows = some.end - some.row;
    const int shared = parts_of(some.keys, most_shared_);
    int stride = 0;  // parts of a row, at most
    for (int row = some.row; row < some.end; row++) {
      stride = std::max(stride, shared + parts_of(keys_of(row) - some.keys, most_));
    }
    each_part(0, some.keys, most_shared_, [&](int part, int first, int count) {
      for (int kv = 0; kv < heads_.kv; kv++) {
        tasks.push_back({some.row, kv, first, count, parts + part, stride, rows});
      }
    });
    for (int row = some.row; row < some.end; row++) {
      const int begin = std::max(first_key(row), some.keys), keys = rows_.lens[row] - begin;
      const bool whole = stride == 1;
      each_part(begin, keys, most_, [&](int part, int first, int count) {
        tasks.push_back({row, DECODE, first, count, whole ? -1 : parts + shared + part, 0, 0});
      });
      if (whole) continue;
      merges.push_back({row, MERGE, 0, 0, parts, shared + parts_of(keys, most_), 0});
      parts += stride;
    }
  }

  void put_prefill(int row, int queries) {
    const int count = rows_.starts[row + 1] - rows_.starts[row];
    for (int first = 0; first < count;) {
      const int block = block_of(count - first, queries);
      for (int kv = 0; kv < heads_.kv; kv++) tasks.push_back({row, kv, first, block, -1, 0, 0});
      first += block;
    }
  }

  const Heads& heads_;
  const Rows& rows_;
  std::vector<Sharers> sharers_;
  int64_t most_ = 0, most_shared_ = 0;
};

}  // namespace

Tasks tasks_of(const Rows& rows, int begin, int end) {
  const auto before = [&](const Task* tasks, int count, int token) {
    return std::partition_point(tasks, tasks + count, [&](const Task& task) {
      const bool prefill = task.kv_head >= 0 && task.rows == 0;
      return rows.starts[task.row] + (prefill ? task.first : 0) < token;
    });
  };
  const Task* merges = rows.tasks + rows.task_count;
  const Task* from = before(rows.tasks, rows.task_count, begin);
  const Task* to = before(rows.tasks, rows.task_count, end);
  const Task* first = before(merges, rows.merge_count, begin);
  return {from, first, int(to - from), int(before(merges, rows.merge_count, end) - first)};
}

}  // namespace fairlead

// Cuts a step's rows into tasks, then merges, for about `threads` threads. Writes them to `tasks`
// unless that is null. Sets rows->task_count and rows->merge_count; returns the number of parts.
FL_EXPORT int fairlead_attention_plan(const Heads* heads, Rows* rows, int threads, Task* tasks) {
  const Plan plan(*heads, *rows, threads);
  if (tasks != nullptr) {
    std::copy(plan.merges.begin(), plan.merges.end(),
              std::copy(plan.tasks.begin(), plan.tasks.end(), tasks));
  }
  rows->task_count = int32_t(plan.tasks.size());
  rows->merge_count = int32_t(plan.merges.size());
  return plan.parts;
}

// Cuts a step's tokens into slabs of at most `most`, even ones where that takes no more of them. A
// slab cuts no task of attention of any of the layer groups, whose rows differ in their tasks of
// decodes only, so one task may make a larger slab. Writes where each ends, at most one end a
// token, and returns their number: all layers have the same.
FL_EXPORT int fairlead_slabs(const Heads* heads, const Rows* const* groups, int group_count,
                             int most, int32_t* ends) {
  const Rows* rows = groups[0];
  const int queries = queries_of(*heads), total = rows->starts[rows->count];
  std::vector<bool> tied(total + 1);  // tokens that share keys with the one before
  for (int i = 0; i < group_count; i++) {
    for (int j = 0; j < groups[i]->task_count; j++) {
      const Task& task = groups[i]->tasks[j];
      const int first = rows->starts[task.row];
      for (int token = 1; token < task.rows; token++) tied[first + token] = true;
    }
  }
  const int number = (total + most - 1) / most, even = (total + number - 1) / number;
  int count = 0, begin = 0, end = 0;
  const auto cut = [&] {
    if (end > begin) ends[count++] = begin = end;
  };
  for (int row = 0; row < rows->count; row++) {
    while (end < rows->starts[row + 1]) {
      int block = block_of(rows->starts[row + 1] - end, queries);
      while (tied[end + block]) block++;
      if (end + block - begin > most) cut();
      end += block;
      if (end - begin >= even) cut();
    }
  }
  cut();
  return count;
}
