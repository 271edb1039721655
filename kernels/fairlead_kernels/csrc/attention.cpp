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

// Scores of `keys` keys, with the cap, and NONE where a key is not seen. Returns the highest ones.
Vec mask_scores(float* scores, int keys, Span seen, float softcap) {
  const bool all = seen.low <= 0 && seen.high >= padded(keys, W);
  Vec highest = splat(NONE);
  for (int i = 0; i < keys; i += W) {
    Vec s = load(scores + i);
    if (softcap != 0) s = softcap * tanh(s * (1.0f / softcap));
    if (!all) s = (below(i, seen.high) & ~below(i, seen.low)) ? s : splat(NONE);
    store(scores + i, s);
    highest = max(s, highest);
  }
  return highest;
}

// The first `keys` of scores [rows, TILE] of at most W rows become weights exp(score - maximum),
// zero for a row that sees no key. `factor`: for what was summed before. Each of the last three has
// W elements: those beyond `rows` keep their maximum and total, and have factor 1.
void weigh(float* scores, int rows, int keys, const Span* seen, float softcap, float* maximum,
           float* total, float* factor) {
  Vec found[W];
  for (int i = 0; i < W; i++) {
    const bool sees = i < rows && seen[i].low < seen[i].high;
    found[i] = sees ? mask_scores(scores + i * TILE, keys, seen[i], softcap) : splat(NONE);
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
    for (int at = 0; at < keys; at += W) {
      const Vec weight = sees ? exp(load(row + at) - most) : Vec{};
      store(row + at, weight);
      found[i] += weight;
    }
  }
  store(total, load(total) * scale + sums(found));
}

// sums [rows, width] times each row's factor.
void rescale(float* sums, int rows, int width, const float* factor) {
  for (int i = 0; i < rows; i++) {
    if (factor[i] == 1.0f) continue;
    float* row = sums + int64_t(i) * width;
    for (int d = 0; d < width; d += W) store(row + d, load(row + d) * factor[i]);
  }
}

// A tile: where each of its first `count` tokens is. The other places are the last token's again.
template <class T>
struct Tile {
  const T* keys[TILE];
  const T* values[TILE];
  int count;
};

// Memory that is needed soon is fetched into the second-level cache, a vector for each one that is
// loaded. Where the next block is the hardware cannot know, and a processor seems to drop what it
// is asked to fetch while too many lines are on their way (benchmarks/README.md).

// Queries of a key-value head that a decode computes at a time: registers hold the sums of so many.
constexpr int SHARE = W == 16 ? 8 : 2;
// Keys whose values are added for one head after the other: little enough memory that the hardware
// sees it read in order, and enough for what the sums cost that are loaded and stored for them.
constexpr int VALUES = 8;
// A decode fetches this far ahead, but at least VALUES keys, and so few that a tile and the one
// after it have places for them.
constexpr int AHEAD_BYTES = 8 << 10, MOST_AHEAD = TILE / 2;
static_assert(MOST_AHEAD % VALUES == 0 && MOST_AHEAD + W <= TILE && MOST_AHEAD + VALUES <= TILE);

// Results of W keys in their order, where W / K times K keys were summed by `sums`.
template <int K, int... I>
FL_INLINE Vec in_order(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I / K + W / K * (I % K))...);
}

// What a decode knows of a layer. Queries [kv, shares of a head, ceil(dim / W), Q of a share, W]
// are padded with zeros; `dots` is memory for a share's products with W keys. `ahead`: keys from a
// load to what it fetches.
struct Decode {
  const Heads& heads;
  int ahead;
  float* query;
  float* scores;  // [query heads, TILE]
  float* sums;    // [query heads, value_dim], padded
  float* dots;
};

// Scores of a tile's keys and the queries [first, first + Q) of each head, all heads of one key
// after the other. A key that is not there is the last one again: its score is masked, and no
// foreign byte is read.
template <int Q, class T>
void score_tile(const Decode& decode, const Tile<T>& tile, int first) {
  // Keys at a time: registers hold their products with all queries.
  constexpr int K = Q > 4 ? 2 : 4;
  static_assert(W % K == 0);
  const Heads& heads = decode.heads;
  const int per_kv = heads.query / heads.kv, dim = heads.dim, width = padded(dim, W);
  for (int from = 0; from < tile.count; from += W) {
    for (int part = 0; part < W / K; part++) {
      const int at = from + part * K, soon = at + decode.ahead;
      const T* const* fetched =
          soon < tile.count ? tile.keys + soon : tile.values + (soon - tile.count);
      for (int kv = 0; kv < heads.kv; kv++) {
        const float* query = decode.query + (kv * per_kv + first) * width;
        const T *keys[K], *later[K];
        for (int j = 0; j < K; j++) {
          keys[j] = tile.keys[at + j] + kv * dim;
          later[j] = fetched[j] + kv * dim;
        }
        Vec dot[Q][K] = {};
        const auto add = [&](int d, auto load_keys) __attribute__((always_inline)) {
          const float* queries = query + d * Q;
#pragma GCC unroll 4
          for (int j = 0; j < K; j++) {
            const Vec key = load_keys(keys[j] + d);
            __builtin_prefetch(later[j] + d, 0, 2);
#pragma GCC unroll 8
            for (int q = 0; q < Q; q++) dot[q][j] += load(queries + q * W) * key;
          }
        };
        int d = 0;
        for (; d + W <= dim; d += W) add(d, [](const T* p) { return load(p); });
        if (d < dim) add(d, [&](const T* p) { return load_part(p, dim - d); });
        float* dots = decode.dots + int64_t(kv) * Q * W / K * W + part * W;
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) store(dots + q * (W / K) * W, sums(dot[q]));
      }
    }
    const float* dots = decode.dots;
    for (int kv = 0; kv < heads.kv; kv++) {
      for (int q = 0; q < Q; q++, dots += W / K * W) {
        Vec parts[W / K];
        for (int i = 0; i < W / K; i++) parts[i] = load(dots + i * W);
        store(decode.scores + (kv * per_kv + first + q) * TILE + from,
              in_order<K>(sums(parts), std::make_integer_sequence<int, W>()));
      }
    }
  }
}

// out[q] += weights[q] · values, for Q queries, `count` keys and D vectors of each value. The only
// vector of D = 1 has `width` elements in the cache, and is padded in `out`.
template <int Q, int D, class T>
FL_INLINE void add_vectors(const float* weights, const T* const* values, const T* const* fetched,
                           int count, int at, int width, float* out, int out_stride) {
  Vec added[Q][D];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) added[q][v] = load(out + q * out_stride + v * W);
  }
  for (int j = 0; j < count; j++) {
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) {
      const T* from = values[j] + at + v * W;
      const Vec value = D == 1 ? load_up_to(from, width) : load(from);
      __builtin_prefetch(fetched[j] + at + v * W, 0, 2);
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) added[q][v] += weights[q * TILE + j] * value;
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) store(out + q * out_stride + v * W, added[q][v]);
  }
}

// Adds a tile's values, weighted by the scores of the queries [first, first + Q) of each head, as
// many vectors at a time as registers hold sums of. `next`: the tile that is needed after it.
template <int Q, class T>
void add_values(const Decode& decode, const Tile<T>& tile, const Tile<T>& next, int first) {
  const Heads& heads = decode.heads;
  const int per_kv = heads.query / heads.kv, dim = heads.value_dim, stride = padded(dim, W);
  for (int from = 0; from < tile.count; from += VALUES) {
    const int count = std::min(VALUES, tile.count - from), soon = from + decode.ahead;
    const T* const* values = tile.values + from;
    const T* const* fetched =
        soon < tile.count ? tile.values + soon : next.keys + (soon - tile.count);
    for (int kv = 0; kv < heads.kv; kv++) {
      const float* weights = decode.scores + (kv * per_kv + first) * TILE + from;
      float* out = decode.sums + (kv * per_kv + first) * stride;
      const int offset = kv * dim;
      int d = 0;
      for (; Q <= 4 && d + 4 * W <= dim; d += 4 * W) {
        add_vectors<Q, 4>(weights, values, fetched, count, offset + d, W, out + d, stride);
      }
      for (; d + 2 * W <= dim; d += 2 * W) {
        add_vectors<Q, 2>(weights, values, fetched, count, offset + d, W, out + d, stride);
      }
      for (; d < dim; d += W) {
        add_vectors<Q, 1>(weights, values, fetched, count, offset + d, dim - d, out + d, stride);
      }
    }
  }
}

// Calls `work(first, count)` for each share of the queries of a key-value head, even ones.
template <class Work>
void each_share(int per_kv, Work work) {
  for (int first = 0; first < per_kv;) {
    const int count = block_of(per_kv - first, SHARE);
    work(first, count);
    first += count;
  }
}

// What a decode calls for a share of so many queries.
template <class T>
struct ShareCalls {
  void (*score)(const Decode&, const Tile<T>&, int);
  void (*add)(const Decode&, const Tile<T>&, const Tile<T>&, int);
};

template <class T, int... I>
constexpr ShareCalls<T> calls_of(int queries, std::integer_sequence<int, I...>) {
  constexpr ShareCalls<T> of[] = {{score_tile<I + 1, T>, add_values<I + 1, T>}...};
  return of[queries - 1];
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
void locate(const Rows& rows, const Caches& caches, int row, int at, int end, int lowest,
            Tile<T>& tile) {
  const int32_t* table = rows.tables + int64_t(row) * rows.table_width;
  const T* keys = static_cast<const T*>(caches.keys);
  const T* values = static_cast<const T*>(caches.values);
  tile.count = end - at < TILE ? end - at : TILE;
  int position = std::max(at, lowest);
  int64_t block = position / rows.block_size, inside = position % rows.block_size;
  for (int i = 0; i < TILE; i++) {
    const int64_t slot = table[block] * int64_t(rows.block_size) + inside;
    tile.keys[i] = keys + slot * caches.key_stride;
    tile.values[i] = values + slot * caches.value_stride;
    if (position > at + i || position == end - 1) continue;
    position++;
    if (++inside == rows.block_size) {
      inside = 0;
      block++;
    }
  }
}

// `following`: the decode that this thread probably takes next, or null.
template <class T>
void decode(const Heads& heads, const Rows& rows, const Attention& layer, const Task& task,
            const Task* following) {
  const int per_kv = heads.query / heads.kv;
  const int dim = padded(heads.dim, W), value_dim = padded(heads.value_dim, W);
  float* query = scratch(size_t(heads.query) * (dim + value_dim + 2 + TILE + W / 2 * W) + W);
  float* sums = query + heads.query * dim;
  float *maximum = sums + heads.query * value_dim, *total = maximum + heads.query;
  float* scores = total + heads.query + W;
  const int token_bytes = int(heads.kv * heads.dim * sizeof(T));
  const int ahead = std::clamp(AHEAD_BYTES / token_bytes / VALUES, 1, MOST_AHEAD / VALUES) * VALUES;
  const Decode work{heads, ahead, query, scores, sums, scores + heads.query * TILE};
  const int64_t token = rows.starts[task.row] - layer.first;
  for (int kv = 0; kv < heads.kv; kv++) {
    each_share(per_kv, [&](int first, int count) {
      float* to = query + (kv * per_kv + first) * dim;
      for (int i = 0; i < count; i++) {
        const int head = kv * per_kv + first + i;
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
  const auto shares = std::make_integer_sequence<int, SHARE>();
  const int end = task.first + task.count;
  Tile<T> tile, next;
  locate(rows, layer.caches, task.row, task.first, end, task.first, tile);
  for (int at = task.first; at < end; at += TILE, tile = next) {
    if (at + TILE < end) {
      locate(rows, layer.caches, task.row, at + TILE, end, task.first, next);
    } else if (following != nullptr) {
      const int first = following->first;
      locate(rows, layer.caches, following->row, first, first + following->count, first, next);
    } else {
      next = tile;
    }
    each_share(per_kv, [&](int first, int count) {
      calls_of<T>(count, shares).score(work, tile, first);
    });
    Span seen[W];
    float factor[W];
    std::fill(seen, seen + W, Span{0, tile.count});
    for (int head = 0; head < heads.query; head += W) {
      const int some = std::min(W, heads.query - head);
      weigh(scores + head * TILE, some, tile.count, seen, layer.softcap, maximum + head,
            total + head, factor);
      rescale(sums + head * value_dim, some, value_dim, factor);
    }
    each_share(per_kv, [&](int first, int count) {
      calls_of<T>(count, shares).add(work, tile, next, first);
    });
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

// A tile's keys as panels for `product`: [TILE / P][dim][P], zero where there is no key. Fetches
// those of `next` meanwhile.
template <class T>
void transpose_keys(const Tile<T>& tile, const Tile<T>& next, int offset, int dim,
                    float* panels) {
  for (int at = 0; at < padded(tile.count, P); at += W) {
    float* panel = panels + int64_t(at / P) * dim * P + at % P;
    for (int d = 0; d < dim; d += W) {
      Vec block[W];
      for (int i = 0; i < W; i++) {
        __builtin_prefetch(next.keys[at + i] + offset + d, 0, 2);
        block[i] = at + i < tile.count ? load_up_to(tile.keys[at + i] + offset + d, dim - d)
                                       : Vec{};
      }
      transpose(block);
      for (int i = 0; i < W && d + i < dim; i++) store(panel + (d + i) * P, block[i]);
    }
  }
}

// A tile's values as panels: [ceil(dim / P)][TILE][P], zero beyond `dim`. Fetches those of `next`
// meanwhile.
template <class T>
void copy_values(const Tile<T>& tile, const Tile<T>& next, int offset, int dim, float* panels) {
  for (int j = 0; j < tile.count; j++) {
    const T* from = tile.values[j] + offset;
    for (int d = 0; d < padded(dim, P); d += W) {
      const Vec v = d < dim ? load_up_to(from + d, dim - d) : Vec{};
      __builtin_prefetch(next.values[j] + offset + d, 0, 2);
      store(panels + (int64_t(d / P) * TILE + j) * P + d % P, v);
    }
  }
}

// A prefill, or a shared decode: its queries see all of its keys.
template <class T>
void prefill(const Heads& heads, const Rows& rows, const Attention& layer, const Task& task) {
  const bool shared = task.rows > 0;
  const int per_kv = heads.query / heads.kv, n = (shared ? task.rows : task.count) * per_kv;
  const int dim = heads.dim, q_width = padded(dim, W), out_width = padded(heads.value_dim, P);
  float* query = scratch(size_t(n) * (q_width + TILE + out_width + 2) + W +
                         size_t(TILE) * (dim + out_width));
  float* scores = query + size_t(n) * q_width;
  float* sums = scores + size_t(n) * TILE;
  float* key_panels = sums + size_t(n) * out_width;
  float* value_panels = key_panels + size_t(TILE) * dim;
  float *maximum = value_panels + size_t(TILE) * out_width, *total = maximum + n;
  const int64_t token = rows.starts[task.row] + (shared ? 0 : task.first) - layer.first;
  // Row i is query i / per_kv of the task, for head i % per_kv of those that share this kv head.
  for (int i = 0; i < n; i++) {
    const float* from = layer.query + (token + i / per_kv) * layer.q_stride +
                        int64_t(task.kv_head * per_kv + i % per_kv) * dim;
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
  Tile<T> tile, next;
  locate(rows, layer.caches, task.row, begin, end, lowest, next);
  for (int at = begin; at < end; at += TILE) {
    tile = next;
    const int count = tile.count;
    if (at + TILE < end) locate(rows, layer.caches, task.row, at + TILE, end, lowest, next);
    transpose_keys(tile, next, task.kv_head * dim, dim, key_panels);
    copy_values(tile, next, task.kv_head * heads.value_dim, heads.value_dim, value_panels);
    // Queries before the tile's first key see none of it.
    const int skip = at > position ? (at - position) * per_kv : 0;
    for (int key = 0; key < count; key += P) {
      product(n - skip, query + int64_t(skip) * q_width, q_width, key_panels + int64_t(key) * dim,
              dim, scores + int64_t(skip) * TILE + key, TILE, false);
    }
    for (int i = skip; i < n; i += W) {
      const int some = n - i < W ? n - i : W;
      Span seen[W];
      float factor[W];
      for (int j = 0; j < some; j++) {
        const int high = position + (i + j) / per_kv + 1 - at;
        const int low = window == 0 ? 0 : high - window;
        seen[j] = {low, high < count ? high : count};
      }
      weigh(scores + int64_t(i) * TILE, some, count, seen, layer.softcap, maximum + i, total + i,
            factor);
      rescale(sums + int64_t(i) * out_width, some, out_width, factor);
    }
    for (int d = 0; d < out_width; d += P) {
      product(n - skip, scores + int64_t(skip) * TILE, TILE, value_panels + int64_t(d) * TILE,
              count, sums + int64_t(skip) * out_width + d, out_width, true);
    }
  }
  for (int i = 0; i < n; i++) {
    const int head = task.kv_head * per_kv + i % per_kv;
    if (shared) {
      const int64_t part = task.part + int64_t(i / per_kv) * task.parts;
      put_head(heads, head, sums + int64_t(i) * out_width, maximum[i], total[i],
               layer.parts + part * part_floats(heads));
      continue;
    }
    finish_head(sums + int64_t(i) * out_width, maximum[i], total[i], layer, head, heads.value_dim,
                layer.out + ((token + i / per_kv) * heads.query + head) * heads.value_dim);
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
  if (layer.caches.half) {
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
