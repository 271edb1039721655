"""What each layer of a family with states is: attention, a mixer that keeps a state, both, an MLP.

Owns the names of kinds, as transformers has them, and the settings that tell them. Pure.
"""

from collections.abc import Sequence

from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family import Family

FULL, SLIDING, HYBRID = "full_attention", "sliding_attention", "hybrid"
MLPS = ("moe", "mlp")
_OLDER = {"attention": FULL, "mamba": "linear_attention"}


def kinds_of(s: ConfigReader, family: Family, layers: int) -> tuple[str, ...]:
    """The kind of each layer of a family with states. Raises ShapeError."""
    state = family.state_kind
    if family.kinds == "all":
        return (state,) * layers
    if family.kinds == "numbers":
        numbers = s.get("attn_layer_indices") or ()
        if not isinstance(numbers, list | tuple):
            raise ShapeError("attn_layer_indices", "must be a list of layer numbers")
        return tuple(FULL if i in numbers else state for i in range(layers))
    if family.kinds == "period":
        period, offset = s.integer("attn_layer_period"), s.integer("attn_layer_offset", low=0)
        return tuple(FULL if i % period == offset else state for i in range(layers))
    field = family.aliases.get("layer_types", "layer_types")
    kinds = s.get("layer_types")
    if kinds is None:
        if family.full_rule is None and not family.full_every:
            raise ShapeError(field, f"must be a list of {layers} names, one per layer")
        kinds = [_default(s, family, i, layers) for i in range(layers)]
    return _checked(field, family, kinds, layers)


def _default(s: ConfigReader, family: Family, index: int, layers: int) -> str:
    if family.full_rule is not None:
        full = family.full_rule(index, layers)
    else:
        every = family.full_every
        full = (index + 1) % (every if isinstance(every, int) else s.integer(every)) == 0
    slides = family.slides_rule is not None and family.slides_rule(index, layers)
    return FULL if full else SLIDING if slides else family.state_kind


def _checked(field: str, family: Family, kinds: object, layers: int) -> tuple[str, ...]:
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise ShapeError(field, f"must be a list of {layers} names, one per layer")
    known: Sequence[str] = (FULL, family.state_kind)
    known = (*known, *((SLIDING,) if family.window else ()), *(MLPS if family.one_part else ()))
    names = [_OLDER.get(kind, kind) if isinstance(kind, str) else str(kind) for kind in kinds]
    for name in names:
        if name not in known:
            raise ShapeError(field, f"{name[:40]!r} is none of {', '.join(known)}")
    if family.needs_both and len({*names}) == 1:
        raise ShapeError(field, f"must have both {FULL} and {family.state_kind}")
    return tuple(names)


def attends(kind: str) -> bool:
    """Whether a layer of this kind keeps keys."""
    return kind in (FULL, SLIDING, HYBRID)


def mixes(family: Family, kind: str) -> bool:
    """Whether it keeps a state."""
    return kind == family.state_kind
