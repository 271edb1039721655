#include "attention.h"

#include <algorithm>

#include "export.h"
#include "product.h"

using namespace fairlead;

namespace fairlead {
namespace {

constexpr int TILE = KEY_TILE;
static_assert(TILE % P == 0);
constexpr float NONE = -__builtin_inff();

int padded(int n, int to) { return (n + to - 1) / to * to; }

// Where the tokens of one row are in a cache [blocks, block_size, kv, dim].
template <class T>
struct Paged {
  const T* data;
  const int32_t* table;
  int block_size;
  int64_t token;  // elements of one token

  const T* at(int position) const {
    const int64_t block = table[position / block_size];
    return data + (block * block_size + position % block_size) * token;
  }
};

template <class T>
FL_INLINE Vec load_up_to(const T* p, int count) {
  return count >= W ? load(p) : load_part(p, count);
}

// Copies `count` floats times `factor` and fills up with zeros to a whole vector.
void copy_scaled(const float* from, int count, float factor, float* to) {
  for (int i = 0; i < count; i += W) store(to + i, load_up_to(from + i, count - i) * factor);
}

// The keys of a tile that a row sees.
struct Span {
  int low;
  int high;
};

// Scores of TILE keys, with the cap, and NONE where a key is not seen. Returns the highest ones.
Vec mask_scores(float* scores, Span seen, float softcap) {
  const bool all = seen.low <= 0 && seen.high >= TILE;
  Vec highest = splat(NONE);
  for (int i = 0; i < TILE; i += W) {
    Vec s = load(scores + i);
    if (softcap != 0) s = softcap * tanh(s * (1.0f / softcap));
    if (!all) s = (below(i, seen.high) & ~below(i, seen.low)) ? s : splat(NONE);
    store(scores + i, s);
    highest = max(s, highest);
  }
  return highest;
}

// Scores [rows, TILE] of at most W rows become weights exp(score - maximum), zero for a row that
// sees no key. `factor`: for what was summed before. Each of the last three has W elements: those
// beyond `rows` keep their maximum and total, and have factor 1.
void weigh(float* scores, int rows, const Span* seen, float softcap, float* maximum, float* total,
           float* factor) {
  Vec found[W];
  for (int i = 0; i < W; i++) {
    const bool sees = i < rows && seen[i].low < seen[i].high;
    found[i] = sees ? mask_scores(scores + i * TILE, seen[i], softcap) : splat(NONE);
  }
  const Vec before = load(maximum), highest = largest(found);
  const auto grows = highest > before;
  store(maximum, grows ? highest : before);
  const Vec scale = grows ? exp(before - highest) : splat(1.0f);
  store(factor, scale);
  for (int i = 0; i < W; i++) {
    found[i] = Vec{};
    if (i >= rows) continue;
    const bool sees = seen[i].low < seen[i].high;
    const Vec most = splat(maximum[i]);
    float* row = scores + i * TILE;
    for (int at = 0; at < TILE; at += W) {
      const Vec weight = sees ? exp(load(row + at) - most) : Vec{};
      store(row + at, weight);
      found[i] += weight;
    }
  }
  store(total, load(total) * scale + sums(found));
}

// A tile: where each of its first `count` tokens is. The other places are the last token's again.
template <class T>
struct Tile {
  const T* keys[TILE];
  const T* values[TILE];
  int count;
};

// Memory that is needed soon, fetched into the second-level cache a few lines at a time and in the
// order of its addresses while something else is computed: the hardware cannot know where the next
// block is, and too much at once would wait for memory.
class Ahead {
 public:
  void add(const void* from, int64_t bytes) {
    const char* begin = static_cast<const char*>(from);
    lines_ += (bytes + LINE - 1) / LINE;
    if (count_ > 0 && runs_[count_ - 1].end == begin) {
      runs_[count_ - 1].end += bytes;
    } else {
      runs_[count_++] = {begin, begin + bytes};
    }
  }

  // Spreads it over so many calls of `fetch`.
  void spread(int64_t calls) { rate_ = (lines_ + calls - 1) / calls; }

  FL_INLINE void fetch() {
    for (int64_t left = rate_; left > 0 && at_ < count_;) {
      Run& run = runs_[at_];
      for (; left > 0 && run.begin < run.end; left--, run.begin += LINE) {
        __builtin_prefetch(run.begin, 0, 2);
      }
      if (run.begin >= run.end) at_++;
    }
  }

 private:
  static constexpr int LINE = 64;
  struct Run {
    const char* begin;
    const char* end;
  };
  Run runs_[2 * TILE];  // of a tile's keys and values
  int count_ = 0, at_ = 0;
  int64_t lines_ = 0, rate_ = 0;
};

// scores[q][TILE] = Q queries, [ceil(dim / W)][Q][W] floats, padded with zeros, times the tile's
// keys. A key that is not there is the last one again: its score is masked, and no foreign byte is
// read.
template <int Q, class T>
void score_tile(const float* query, const Tile<T>& tile, Ahead& ahead, int offset, int dim,
                float* scores) {
  // Keys at a time: registers hold their products with all queries.
  constexpr int K = Q > 4 ? 2 : 4;
  for (int first = 0; first < tile.count; first += W) {
    Vec dots[Q][W];
    for (int at = 0; at < W; at += K) {
      const T* keys[K];
      for (int j = 0; j < K; j++) keys[j] = tile.keys[first + at + j] + offset;
      if (at % 4 == 0) ahead.fetch();
      Vec dot[Q][K] = {};
      const auto add = [&](int d, auto load_keys) __attribute__((always_inline)) {
        const float* queries = query + d * Q;
#pragma GCC unroll 4
        for (int j = 0; j < K; j++) {
          const Vec key = load_keys(keys[j] + d);
#pragma GCC unroll 8
          for (int q = 0; q < Q; q++) dot[q][j] += load(queries + q * W) * key;
        }
      };
      int d = 0;
      for (; d + W <= dim; d += W) add(d, [](const T* p) { return load(p); });
      if (d < dim) add(d, [&](const T* p) { return load_part(p, dim - d); });
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
        for (int j = 0; j < K; j++) dots[q][at + j] = dot[q][j];
      }
    }
    for (int q = 0; q < Q; q++) store(scores + q * TILE + first, sums(dots[q]));
  }
}

// out[q] = out[q] * factor[q] + weights[q] · values, for Q queries and D vectors of each value.
// The only vector of D = 1 has `width` elements in the cache, and is padded in `out`.
template <int Q, int D, class T>
FL_INLINE void add_vectors(const float* weights, const float* factor, const Tile<T>& tile,
                           Ahead& ahead, int offset, int at, int width, float* out,
                           int out_stride) {
  Vec added[Q][D];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) added[q][v] = load(out + q * out_stride + at + v * W) * factor[q];
  }
  for (int j = 0; j < tile.count; j++) {
    const T* from = tile.values[j] + offset + at;
    if (j % 4 == 0) ahead.fetch();
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) {
      const Vec value = D == 1 ? load_up_to(from, width) : load(from + v * W);
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) added[q][v] += weights[q * TILE + j] * value;
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) store(out + q * out_stride + at + v * W, added[q][v]);
  }
}

// The same for values of `dim` elements, as many vectors at a time as registers hold sums of.
template <int Q, class T>
void add_values(const float* weights, const float* factor, const Tile<T>& tile,
                Ahead& ahead, int offset, int dim, float* out, int out_stride) {
  int d = 0;
  for (; Q <= 4 && d + 4 * W <= dim; d += 4 * W) {
    add_vectors<Q, 4>(weights, factor, tile, ahead, offset, d, W, out, out_stride);
  }
  for (; d + 2 * W <= dim; d += 2 * W) {
    add_vectors<Q, 2>(weights, factor, tile, ahead, offset, d, W, out, out_stride);
  }
  for (; d < dim; d += W) {
    add_vectors<Q, 1>(weights, factor, tile, ahead, offset, d, dim - d, out, out_stride);
  }
}

// One key-value head's share of a decode's tile, for Q of the queries that share it.
template <int Q, class T>
void decode_tile(const float* query, const Tile<T>& tile, Ahead& ahead, int kv, const Heads& heads,
                 float softcap, float* maximum, float* total, float* out, int out_stride) {
  float scores[Q * TILE];
  float factor[W];
  Span seen[Q];
  const int count = tile.count;
  score_tile<Q>(query, tile, ahead, kv * heads.dim, heads.dim, scores);
  for (int q = 0; q < Q; q++) {
    for (int i = padded(count, W); i < TILE; i += W) store(scores + q * TILE + i, Vec{});
    seen[q] = {0, count};
  }
  weigh(scores, Q, seen, softcap, maximum, total, factor);
  add_values<Q>(scores, factor, tile, ahead, kv * heads.value_dim, heads.value_dim, out, out_stride);
}

// Queries that a decode computes at a time: registers hold the sums of so many.
constexpr int SHARE = W == 16 ? 8 : 2;

// Calls `work(first, count)` for each share of the queries of a group, even ones.
template <class Work>
void each_share(int group, Work work) {
  for (int first = 0; first < group;) {
    const int count = block_of(group - first, SHARE);
    work(first, count);
    first += count;
  }
}

template <class T>
using DecodeTile = void (*)(const float*, const Tile<T>&, Ahead&, int, const Heads&, float, float*,
                            float*, float*, int);

template <class T, int... I>
constexpr DecodeTile<T> decode_tile_of(int queries, std::integer_sequence<int, I...>) {
  constexpr DecodeTile<T> tiles[] = {decode_tile<I + 1, T>...};
  return tiles[queries - 1];
}

// out = sum / total of one head, its sink included.
void finish_head(const float* sums, float maximum, float total, const Attention& layer, int head,
                 int dim, float* out) {
  float factor = 1.0f;
  if (layer.sinks != nullptr) {
    const float sink = layer.sinks[head];
    if (sink > maximum) {
      factor = __builtin_expf(maximum - sink);
      total = total * factor + 1.0f;
    } else {
      total += __builtin_expf(sink - maximum);
    }
  }
  factor /= total;
  for (int d = 0; d < dim; d += W) {
    if (dim - d >= W) {
      store(out + d, load(sums + d) * factor);
    } else {
      store_part(out + d, load(sums + d) * factor, dim - d);
    }
  }
}

int64_t part_floats(const Heads& heads) {
  return int64_t(heads.query) * (padded(heads.value_dim, W) + 2);
}

// Puts one head's share of a part where `decode` leaves it.
void put_head(const Heads& heads, int head, const float* sums, float maximum, float total,
              float* part) {
  const int value_dim = padded(heads.value_dim, W);
  memcpy(part + int64_t(head) * value_dim, sums, size_t(value_dim) * 4);
  float* maxima = part + int64_t(heads.query) * value_dim;
  maxima[head] = maximum;
  maxima[heads.query + head] = total;
}

// The tile of a row's tokens in the positions [at, end). Places before position `lowest`, whose
// block may be freed, are that token again.
template <class T>
void locate(const Heads& heads, const Rows& rows, const Attention& layer, int row, int at, int end,
            int lowest, Tile<T>& tile) {
  const int32_t* table = rows.tables + int64_t(row) * rows.table_width;
  const Paged<T> keys{static_cast<const T*>(layer.keys), table, rows.block_size,
                      int64_t(heads.kv) * heads.dim};
  const Paged<T> values{static_cast<const T*>(layer.values), table, rows.block_size,
                        int64_t(heads.kv) * heads.value_dim};
  tile.count = end - at < TILE ? end - at : TILE;
  for (int i = 0; i < TILE; i++) {
    const int position = std::max(at + i < end ? at + i : end - 1, lowest);
    tile.keys[i] = keys.at(position);
    tile.values[i] = values.at(position);
  }
}

// Elements of each token's keys and values in a cache.
struct Part {
  int key, keys;
  int value, values;
};

// Fetches this part of a tile's tokens.
template <class T>
void fetch(const Tile<T>& tile, Part part) {
  constexpr int LINE = 64 / int(sizeof(T));
  for (int i = 0; i < tile.count; i++) {
    for (int d = 0; d < part.keys; d += LINE) __builtin_prefetch(tile.keys[i] + part.key + d, 0, 2);
    for (int d = 0; d < part.values; d += LINE) {
      __builtin_prefetch(tile.values[i] + part.value + d, 0, 2);
    }
  }
}

// `following`: the decode that this thread probably takes next, or null.
template <class T>
void decode(const Heads& heads, const Rows& rows, const Attention& layer, const Task& task,
            const Task* following) {
  const int group = heads.query / heads.kv;
  const int dim = padded(heads.dim, W), value_dim = padded(heads.value_dim, W);
  float* query = scratch(size_t(heads.query) * (dim + value_dim + 2) + W);
  float* sums = query + heads.query * dim;
  float *maximum = sums + heads.query * value_dim, *total = maximum + heads.query;
  const int64_t token = rows.starts[task.row] - layer.first;
  for (int kv = 0; kv < heads.kv; kv++) {
    each_share(group, [&](int first, int count) {
      float* to = query + (kv * group + first) * dim;
      for (int i = 0; i < count; i++) {
        const int head = kv * group + first + i;
        const float* from = layer.query + token * layer.q_stride + int64_t(head) * heads.dim;
        for (int d = 0; d < heads.dim; d += W) {
          store(to + d * count + i * W, load_up_to(from + d, heads.dim - d) * layer.scale);
        }
        maximum[head] = NONE;
        total[head] = 0;
      }
    });
  }
  for (int i = 0; i < heads.query * value_dim; i += W) store(sums + i, Vec{});
  const int end = task.first + task.count;
  Tile<T> tile, next;
  locate(heads, rows, layer, task.row, task.first, end, task.first, tile);
  for (int at = task.first; at < end; at += TILE) {
    if (at + TILE < end) {
      locate(heads, rows, layer, task.row, at + TILE, end, task.first, next);
    } else if (following != nullptr) {
      const int first = following->first;
      locate(heads, rows, layer, following->row, first, first + following->count, first, next);
    } else {
      next.count = 0;
    }
    Ahead ahead;
    for (int i = 0; i < next.count; i++) {
      ahead.add(next.keys[i], heads.kv * heads.dim * int64_t(sizeof(T)));
    }
    for (int i = 0; i < next.count; i++) {
      ahead.add(next.values[i], heads.kv * heads.value_dim * int64_t(sizeof(T)));
    }
    // Each share fetches for every four keys, with the scores and at least once with the values.
    const int shares = (group + SHARE - 1) / SHARE;
    ahead.spread(int64_t(heads.kv) * shares * 2 * ((tile.count + 3) / 4));
    for (int kv = 0; kv < heads.kv; kv++) {
      each_share(group, [&](int first, int count) {
        const int head = kv * group + first;
        decode_tile_of<T>(count, std::make_integer_sequence<int, SHARE>())(
            query + head * dim, tile, ahead, kv, heads, layer.softcap, maximum + head, total + head,
            sums + head * value_dim, value_dim);
      });
    }
    tile = next;
  }
  if (task.part >= 0) {
    memcpy(layer.parts + task.part * part_floats(heads), sums, size_t(part_floats(heads)) * 4);
    return;
  }
  for (int head = 0; head < heads.query; head++) {
    finish_head(sums + head * value_dim, maximum[head], total[head], layer, head, heads.value_dim,
                layer.out + (token * heads.query + head) * heads.value_dim);
  }
}

// The result of a row whose keys were cut into parts.
void merge(const Heads& heads, const Rows& rows, const Attention& layer, const Task& task) {
  const int value_dim = padded(heads.value_dim, W);
  const int64_t size = part_floats(heads), token = rows.starts[task.row] - layer.first;
  const float* parts = layer.parts + task.part * size;
  float* sums = scratch(size_t(value_dim));
  for (int head = 0; head < heads.query; head++) {
    const float* maxima = parts + int64_t(heads.query) * value_dim + head;
    float maximum = NONE, total = 0;
    for (int i = 0; i < task.parts; i++) {
      if (maxima[i * size] > maximum) maximum = maxima[i * size];
    }
    for (int d = 0; d < value_dim; d += W) store(sums + d, Vec{});
    for (int i = 0; i < task.parts; i++) {
      const float factor = __builtin_expf(maxima[i * size] - maximum);
      const float* from = parts + i * size + int64_t(head) * value_dim;
      total += factor * maxima[i * size + heads.query];
      for (int d = 0; d < value_dim; d += W) {
        store(sums + d, load(sums + d) + factor * load(from + d));
      }
    }
    finish_head(sums, maximum, total, layer, head, heads.value_dim,
                layer.out + (token * heads.query + head) * heads.value_dim);
  }
}

// A tile's keys as panels for `product`: [TILE / P][dim][P], zero where there is no key.
template <class T>
void transpose_keys(const Tile<T>& tile, int offset, int dim, float* panels) {
  for (int at = 0; at < padded(tile.count, P); at += W) {
    float* panel = panels + int64_t(at / P) * dim * P + at % P;
    for (int d = 0; d < dim; d += W) {
      Vec block[W];
      for (int i = 0; i < W; i++) {
        block[i] = at + i < tile.count ? load_up_to(tile.keys[at + i] + offset + d, dim - d)
                                       : Vec{};
      }
      transpose(block);
      for (int i = 0; i < W && d + i < dim; i++) store(panel + (d + i) * P, block[i]);
    }
  }
}

// A tile's values as panels: [ceil(dim / P)][TILE][P], zero beyond `dim`.
template <class T>
void copy_values(const Tile<T>& tile, int offset, int dim, float* panels) {
  for (int j = 0; j < tile.count; j++) {
    const T* from = tile.values[j] + offset;
    for (int d = 0; d < padded(dim, P); d += W) {
      const Vec v = d < dim ? load_up_to(from + d, dim - d) : Vec{};
      store(panels + (int64_t(d / P) * TILE + j) * P + d % P, v);
    }
  }
}

// A prefill, or a shared decode: its queries see all of its keys.
template <class T>
void prefill(const Heads& heads, const Rows& rows, const Attention& layer, const Task& task) {
  const bool shared = task.rows > 0;
  const int group = heads.query / heads.kv, n = (shared ? task.rows : task.count) * group;
  const int dim = heads.dim, q_width = padded(dim, W), out_width = padded(heads.value_dim, P);
  float* query = scratch(size_t(n) * (q_width + TILE + out_width + 2) + W +
                         size_t(TILE) * (dim + out_width));
  float* scores = query + size_t(n) * q_width;
  float* sums = scores + size_t(n) * TILE;
  float* key_panels = sums + size_t(n) * out_width;
  float* value_panels = key_panels + size_t(TILE) * dim;
  float *maximum = value_panels + size_t(TILE) * out_width, *total = maximum + n;
  const int64_t token = rows.starts[task.row] + (shared ? 0 : task.first) - layer.first;
  // Row i is query i / group of the task, for head i % group of those that share this kv head.
  for (int i = 0; i < n; i++) {
    const float* from = layer.query + (token + i / group) * layer.q_stride +
                        int64_t(task.kv_head * group + i % group) * dim;
    copy_scaled(from, dim, layer.scale, query + int64_t(i) * q_width);
    maximum[i] = NONE;
    total[i] = 0;
  }
  for (int64_t i = 0; i < int64_t(n) * out_width; i += W) store(sums + i, Vec{});
  const int row_count = rows.starts[task.row + 1] - rows.starts[task.row];
  const int before = shared ? 0 : rows.lens[task.row] - row_count;
  const int end = before + task.first + task.count;
  const int position = shared ? end : end - task.count, window = shared ? 0 : rows.window;
  const int unseen = window == 0 || position < window ? 0 : position - window + 1;
  const int lowest = shared ? task.first : unseen;
  const int begin = rows.fixed ? lowest / TILE * TILE : lowest;
  const Part part{task.kv_head * dim, dim, task.kv_head * heads.value_dim, heads.value_dim};
  Tile<T> tile, next;
  locate(heads, rows, layer, task.row, begin, end, lowest, next);
  for (int at = begin; at < end; at += TILE) {
    tile = next;
    const int count = tile.count;
    transpose_keys(tile, part.key, dim, key_panels);
    copy_values(tile, part.value, part.values, value_panels);
    if (at + TILE < end) {
      locate(heads, rows, layer, task.row, at + TILE, end, lowest, next);
      fetch(next, part);
    }
    // Queries before the tile's first key see none of it.
    const int skip = at > position ? (at - position) * group : 0;
    for (int key = 0; key < count; key += P) {
      product(n - skip, query + int64_t(skip) * q_width, q_width, key_panels + int64_t(key) * dim,
              dim, scores + int64_t(skip) * TILE + key, TILE, false);
    }
    for (int i = skip; i < n; i += W) {
      const int some = n - i < W ? n - i : W;
      Span seen[W];
      float factor[W];
      for (int j = 0; j < some; j++) {
        const int high = position + (i + j) / group + 1 - at;
        const int low = window == 0 ? 0 : high - window;
        seen[j] = {low, high < count ? high : count};
      }
      weigh(scores + int64_t(i) * TILE, some, seen, layer.softcap, maximum + i, total + i, factor);
      for (int j = 0; j < some; j++) {
        if (factor[j] == 1.0f) continue;
        float* out = sums + int64_t(i + j) * out_width;
        for (int d = 0; d < out_width; d += W) store(out + d, load(out + d) * factor[j]);
      }
    }
    for (int d = 0; d < out_width; d += P) {
      product(n - skip, scores + int64_t(skip) * TILE, TILE, value_panels + int64_t(d) * TILE,
              count, sums + int64_t(skip) * out_width + d, out_width, true);
    }
  }
  for (int i = 0; i < n; i++) {
    const int head = task.kv_head * group + i % group;
    if (shared) {
      const int64_t part = task.part + int64_t(i / group) * task.parts;
      put_head(heads, head, sums + int64_t(i) * out_width, maximum[i], total[i],
               layer.parts + part * part_floats(heads));
      continue;
    }
    finish_head(sums + int64_t(i) * out_width, maximum[i], total[i], layer, head, heads.value_dim,
                layer.out + ((token + i / group) * heads.query + head) * heads.value_dim);
  }
}

// Whether a result of these tokens is needed.
bool needed(const Attention& layer, int64_t first, int count) {
  if (layer.keep_count < 0) return true;
  const int64_t* end = layer.keep + layer.keep_count;
  const int64_t* at = std::lower_bound(layer.keep, end, first);
  return at != end && *at < first + count;
}

template <class T>
void attend_typed(Team& team, const Heads& heads, const Rows& rows, const Tasks& share,
                  const Attention& layer) {
  team.share(share.count, 1, [&](int begin, int end) {
    for (int i = begin; i < end; i++) {
      const Task& task = share.tasks[i];
      if (task.kv_head == DECODE) {
        const bool follows = i + 1 < share.count && share.tasks[i + 1].kv_head == DECODE;
        decode<T>(heads, rows, layer, task, follows ? &share.tasks[i + 1] : nullptr);
      } else if (task.rows > 0 ||
                 needed(layer, rows.starts[task.row] + task.first, task.count)) {
        prefill<T>(heads, rows, layer, task);
      }
    }
  });
  if (share.merge_count == 0) return;
  team.barrier();
  team.share(share.merge_count, 1, [&](int begin, int end) {
    for (int i = begin; i < end; i++) merge(heads, rows, layer, share.merges[i]);
  });
}

}  // namespace

void attend(Team& team, const Heads& heads, const Rows& rows, const Tasks& share,
            const Attention& layer) {
  if (layer.half) {
    attend_typed<bfloat16>(team, heads, rows, share, layer);
  } else {
    attend_typed<float>(team, heads, rows, share, layer);
  }
}

}  // namespace fairlead

// Floats of one part of a decode.
FL_EXPORT int64_t fairlead_attention_part(const Heads* heads) { return part_floats(*heads); }

// One layer's attention; out [T, query heads, value_dim].
FL_EXPORT void fairlead_attend(const Heads* heads, const Rows* rows, const Attention* layer,
                                int threads) {
  const Tasks all = tasks_of(*rows, 0, rows->starts[rows->count]);
  run(threads, [&](Team& team) { attend(team, *heads, *rows, all, *layer); });
}
