// All decoder layers of one step in one call.
//
// One team of threads runs the whole chain, with a barrier where an operation needs the results of
// all threads. That saves what a call per operation costs: for a small model this is more than the
// operations themselves.
//
// A step of many tokens runs each layer over one slab of them after the other: what the operations
// of a slab pass on stays in the caches, where that of all tokens would go through memory. Slabs
// are in the order of tokens, so a slab's queries find the keys before them in the layer's cache.
#include <algorithm>

#include "attention.h"
#include "export.h"
#include "mlp.h"
#include "rope.h"

using namespace fairlead;

namespace {

// One decoder layer; `layer.Layer` in Python says what each part does. A norm without a weight and
// a bias of null are left out. `rope` and `group` are places in the step's lists.
struct Layer {
  Norm input_norm, q_norm, k_norm, after_attention, mlp_norm, after_mlp;
  Weight qkv, out, gate_up, down;
  Caches caches;
  const float* sinks;
  float scale;
  float softcap;
  int32_t activation;
  int32_t parallel;
  int32_t rope;
  int32_t group;
};

// The tokens of one layer group: their rows, and their slots [T] in the caches.
struct Group {
  Rows rows;
  const int64_t* slots;
};

// One step of `count` tokens. `x` [T, width] are the embeddings, and at the end what the last layer
// returns: of all tokens, or one after the other of those in `keep`, which ascend (keep_count -1:
// all). The other buffers are overwritten: normed [T, width], qkv [T, rows of qkv], attended
// [T, query · value_dim], gate_up [T, rows of gate_up] where there is a gate, gated [T, columns of
// down], and parts for attention. Where weights need an input's digits they are in normed_digits;
// those of attended and gated are in digits, which may be the memory of qkv and gate_up. Slab i
// ends where token slabs[i] begins, and cuts no task of attention. All buffers but x have room for
// the largest slab only: a layer runs on the part of a step that is a slab, whose tokens are those
// from `first` on.
struct Step {
  int64_t count;
  int64_t width;
  Heads heads;
  int32_t threads;
  const Rope* ropes;
  const Group* groups;
  float* x;
  float* normed;
  float* qkv;
  float* attended;
  float* gate_up;
  float* gated;
  float* parts;
  char* normed_digits;
  char* digits;
  const int32_t* slabs;
  int64_t slab_count;
  const int64_t* keep;
  int64_t keep_count;
  int64_t first;

  Input input() const { return {normed, normed_digits}; }

  Step slab(int64_t index) const {
    Step part = *this;
    part.first = index == 0 ? 0 : slabs[index - 1];
    part.count = slabs[index] - part.first;
    part.x = x + part.first * width;
    return part;
  }
};

void add_row(float* x, const float* y, int width) {
  int i = 0;
  for (; i + W <= width; i += W) store(x + i, load(x + i) + load(y + i));
  for (; i < width; i++) x[i] += y[i];
}

// x += after(normed) where `after` has a weight, then normed = next(x) where `next` has one.
void settle(Team& team, const Step& step, const Norm& after, const Norm& next) {
  if (after.weight == nullptr && next.weight == nullptr) return;
  const int width = int(step.width);
  team.share(int(step.count), 2, [&](int begin, int end) {
    for (int64_t t = begin; t < end; t++) {
      float *x = step.x + t * width, *normed = step.normed + t * width;
      if (after.weight != nullptr) {
        normalize(normed, after, width, normed);
        add_row(x, normed, width);
      }
      if (next.weight != nullptr) normalize(x, next, width, normed);
    }
  });
  team.barrier();
}

// The product of an output matrix: added to x, or put into `normed` where a norm follows.
void project(Team& team, const Step& step, const Weight& weight, const float* in,
             const Norm& after) {
  const bool add = after.weight == nullptr;
  float* out = add ? step.x : step.normed;
  share_product(team, weight, Input{in, step.digits}, int(step.count),
                [&](int panel, int row, int rows, const float* tile) {
                  store_tile(weight, panel, row, rows, tile, out, add);
                });
  team.barrier();
}

template <class T>
void rope_write(Team& team, const Step& step, const Layer& layer) {
  const Rope& rope = step.ropes[layer.rope];
  const int64_t* slots = step.groups[layer.group].slots + step.first;
  const float* cos = rope.cos + step.first * rope.rotated;
  const float* sin = rope.sin + step.first * rope.rotated;
  team.share(int(step.count), 1, [&](int begin, int end) {
    for (int64_t t = begin; t < end; t++) {
      rope_write_token<T>(step.qkv + t * layer.qkv.rows, step.heads.query, step.heads.kv,
                          step.heads.dim, cos + t * rope.rotated, sin + t * rope.rotated,
                          rope.rotated, layer.q_norm, layer.k_norm, slots[t], layer.caches);
    }
  });
  team.barrier();
}

// gated = the first half of the MLP. Where a panel holds rows of the gate and of the other half they
// are combined afterwards.
void gate_up(Team& team, const Step& step, const Layer& layer) {
  const Weight& weight = layer.gate_up;
  const int64_t width = weight.rows / 2;
  const int count = int(step.count);
  if (weight.rows == layer.down.columns) {
    share_activated(team, weight, layer.activation, step.input(), count, step.gated);
    team.barrier();
    return;
  }
  if (width % P != 0) {
    share_product(team, weight, step.input(), count,
                  [&](int panel, int row, int rows, const float* tile) {
                    store_tile(weight, panel, row, rows, tile, step.gate_up, false);
                  });
    team.barrier();
    team.share(count, 1, [&](int begin, int end) {
      for (int64_t t = begin; t < end; t++) {
        const float* gate = step.gate_up + t * weight.rows;
        combine(gate, gate + width, int(width), layer.activation, step.gated + t * width);
      }
    });
    team.barrier();
    return;
  }
  share_gated(team, weight.from(0, width), weight.from(width, width), layer.activation,
              step.input(), count, step.gated);
  team.barrier();
}

// The part of a step that is left when only the tokens `keep` go on. Moves their rows of x behind
// those that earlier slabs have kept, and their rows of attended to its front.
Step keep_tokens(Team& team, const Step& step) {
  const int64_t *keep_end = step.keep + step.keep_count, last = step.first + step.count;
  const int64_t* begin = std::lower_bound(step.keep, keep_end, step.first);
  const int64_t* end = std::lower_bound(begin, keep_end, last);
  Step left = step;
  left.count = end - begin;
  left.x = step.x + (begin - step.keep - step.first) * step.width;
  const auto move = [&](const float* rows, int64_t width, float* to) {
    for (int64_t i = 0; i < left.count; i++) {
      memmove(to + i * width, rows + (begin[i] - step.first) * width, size_t(width) * 4);
    }
  };
  // A row's place is taken when it has been moved: one thread moves all of a matrix, in order.
  team.share(2, 1, [&](int matrix, int) {
    if (matrix == 0) {
      move(step.x, step.width, left.x);
    } else {
      move(step.attended, int64_t(step.heads.query) * step.heads.value_dim, step.attended);
    }
  });
  team.barrier();
  return left;
}

// `next`: the norm that follows the layer in the same pass. `last`: nothing reads its results but
// those of the tokens that the step keeps.
void run_layer(Team& team, const Step& step, const Layer& layer, const Norm& next, bool last) {
  share_product(team, layer.qkv, step.input(), int(step.count),
                [&](int panel, int row, int rows, const float* tile) {
                  store_tile(layer.qkv, panel, row, rows, tile, step.qkv, false);
                });
  team.barrier();
  if (layer.caches.half) {
    rope_write<bfloat16>(team, step, layer);
  } else {
    rope_write<float>(team, step, layer);
  }
  const bool keeps = last && step.keep_count >= 0;
  const Attention attention{step.qkv,       layer.caches,   layer.sinks,    step.attended,
                            step.parts,     layer.qkv.rows, step.first,     layer.scale,
                            layer.softcap,  step.keep,      keeps ? step.keep_count : -1};
  const Rows& rows = step.groups[layer.group].rows;
  const Tasks tasks = tasks_of(rows, int(step.first), int(step.first + step.count));
  attend(team, step.heads, rows, tasks, attention);
  team.barrier();
  const Step left = keeps ? keep_tokens(team, step) : step;
  if (left.count == 0) return;
  // A parallel layer's MLP begins with x as it was before attention.
  if (layer.parallel) settle(team, left, Norm{}, layer.mlp_norm);
  project(team, left, layer.out, left.attended, layer.after_attention);
  if (!layer.parallel) settle(team, left, layer.after_attention, layer.mlp_norm);
  gate_up(team, left, layer);
  project(team, left, layer.down, left.gated, layer.after_mlp);
  settle(team, left, layer.after_mlp, next);
}

}  // namespace

FL_EXPORT void fairlead_layers(const Layer* layers, int count, const Step* step) {
  const Norm none{};
  // Of one slab a layer's input norm is made in the pass that ends the layer before.
  const bool alone = step->slab_count == 1;
  run(step->threads, [&](Team& team) {
    if (alone) settle(team, *step, none, layers[0].input_norm);
    for (int i = 0; i < count; i++) {
      const bool last = i + 1 == count;
      const Norm& next = alone && !last ? layers[i + 1].input_norm : none;
      for (int64_t at = 0; at < step->slab_count; at++) {
        const Step slab = step->slab(at);
        if (!alone) settle(team, slab, none, layers[i].input_norm);
        run_layer(team, slab, layers[i], next, last);
      }
    }
  });
}
