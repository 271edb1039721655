"""Elements of a token that are alive beside a layer, in its attention, and in a slab of the C++
kernels. Measured, see the profiling run. Pure.
"""

from collections.abc import Iterable, Sequence

from fairlead_runtime.sizing.config_json import ConfigReader
from fairlead_runtime.sizing.family import Family
from fairlead_runtime.sizing.groups import NO_KEYS
from fairlead_runtime.sizing.layer_heads import GATES, WIDE_GATES, WIDE_NORMS, WIDE_ROTARY
from fairlead_runtime.sizing.parameters import has_flat_norm, layer_input_width

FRAME = 4  # elements of a token's ids and masks that a whole's own code keeps


def live_layers(windows: Sequence[int | None], sources: Sequence[int]) -> Iterable[int]:
    """Layers whose keys and values transformers' code holds until a pass ends: where layers read
    those of others, the last of each kind that keeps its own.
    """
    own = {window: layer for layer, window in enumerate(windows) if sources[layer] == layer}
    shared = any(source not in (layer, NO_KEYS) for layer, source in enumerate(sources))
    return own.values() if shared else ()


def widths_beside(s: ConfigReader, family: Family, layers: int, keys: int) -> tuple[int, int]:
    """Elements of each token that lie beside a layer, with ``keys`` that later layers may read, and
    the most of them at other times than an MLP's; measured, see the profiling run.
    """
    hidden = s.integer("hidden_size")
    inputs = layer_input_width(s, family) * layers
    streams = s.integer(family.streams) if family.streams else 0
    frame = FRAME + (inputs and inputs + hidden) if family.framed else 0
    # Of all streams: those of the embedding, of the layer's input and as it predicts them.
    of_streams = (3 * streams + 4) * hidden * bool(streams) + streams**2
    beside = keys + inputs + of_streams + family.more_hidden * hidden + frame
    # All of them corrected, with the change of each. The inputs of layers are made before them, and
    # normalized in float32.
    return beside, max((2 * streams + 2) * hidden * bool(streams), 6 * inputs + hidden - beside)


def moments_of(
    s: ConfigReader, family: Family, *, half: bool = False
) -> tuple[tuple[int, int], ...]:
    """What attention keeps, ``half`` in a model in 16 bits, as multiples of queries and keys."""
    gates = GATES if s.flag_or_constant(family.out_gate) else ()
    if not half:
        return gates + family.moments
    norms = bool(family.qk_norm) and (not family.qk_norm_if or s.flag(family.qk_norm_if))
    wide = (WIDE_NORMS if norms else ()) + WIDE_ROTARY.get(family.wide_rotary, ())
    gates = WIDE_GATES if gates and family.wide_gates else gates
    return wide + gates + family.moments + family.half_moments


def slab_width(s: ConfigReader, family: Family, inner: int) -> int:
    """Elements that a layer in the C++ kernels keeps of each token of a slab for attention or for
    an MLP of this ``inner`` width; 0 where they do not compute it.
    """
    if has_flat_norm(s, family):
        return 0
    # Queries, keys, values and what attention returns; gate and up, or the digits of what the
    # activation returns, beside that.
    attention = 2 * (s.heads + s.kv_heads) * s.head_dim
    return max(attention, 3 * inner if family.gated else 3 * inner // 2)
