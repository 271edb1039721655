"""Rotary embeddings as a ``config.json`` says: how far they reach, and what no pod can build.

Owns the keys that each of transformers' types of them needs (``modeling_rope_utils.py``). Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fairlead_runtime.sizing.config_json import LARGEST_OTHER, ConfigReader, ShapeError
from fairlead_runtime.sizing.families.rotaries import ROTARIES, Rotary

# The numbers above 0 that each type needs, and those of which it takes another for null or 0.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_BETAS = ("beta_fast", "beta_slow")
_LISTS = ("short_factor", "long_factor")
LARGEST_NUMBER = 3.4e38  # tables are float32
_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GROWTH, _SECTIONS = "llama_4_scaling_beta", "mrope_section"


def check_rope(s: ConfigReader) -> None:
    """Raise ShapeError for settings of rotary embeddings of which transformers builds none."""
    if s.family.positions and not (s.get("rope_scaling") or s.get("rope_parameters")):
        return
    _thetas(s)
    for kind, (field, parameters) in _settings(s).items():
        _check(s, kind, field, parameters)


def _rotary(s: ConfigReader) -> Rotary:
    return ROTARIES.get(str(s.get("model_type")), Rotary())


def _settings(s: ConfigReader) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """By the type of layers, "" for all: the name of the setting, and what it says."""
    scaling, parameters = s.get("rope_scaling"), s.get("rope_parameters")
    by_type = _rotary(s).by_type
    if parameters is not None:
        _mapping("rope_parameters", parameters)
    if by_type in ("added", "both"):
        return _added(scaling, parameters, both=by_type == "both")
    if by_type == "raw":
        return _raw(s, parameters)
    field = "rope_scaling" if scaling else "rope_parameters"
    settings = _mapping(field, scaling or parameters or {})
    nests = [kind for kind in (_FULL, _SLIDING) if kind in settings] if by_type else []
    if nests and by_type == "never":
        problem = f"must be the settings of all layers: this family has none for {nests[0]} alone"
        raise ShapeError(field, problem)
    if by_type != "each" or not settings:
        return {"": (field, settings)}
    used = s.get("layer_types")
    for kind in used if isinstance(used, list) else nests:
        if kind in (_FULL, _SLIDING) and kind not in settings:
            raise ShapeError(f"{field}.{kind}", "must be set: this family has one for each type")
    return {
        kind: (field, _mapping(f"{field}.{kind}", settings[kind]))
        for kind in nests
        if settings[kind] is not None
    }


def _added(
    scaling: object, parameters: Any, *, both: bool
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    default = {"rope_type": "default"}
    nests = {_FULL: default, _SLIDING: default} if parameters is None else parameters
    for kind in nests if both else ():
        if kind not in (_FULL, _SLIDING):
            problem = f"{str(kind)[:40]!r} is neither {_FULL} nor {_SLIDING}"
            raise ShapeError("rope_parameters", problem)
        _mapping(f"rope_parameters.{kind}", nests[kind])
    settings = {kind: ("rope_parameters", _nest(nests, kind)) for kind in (_FULL, _SLIDING)}
    if scaling is None or (scaling in ("", []) and not both):
        return settings
    added = _mapping("rope_scaling", scaling)
    for kind in (_FULL, _SLIDING) if both else (_FULL,):
        if not isinstance(nests.get(kind), Mapping):
            problem = f"must have settings for {kind}, to which rope_scaling is added"
            raise ShapeError("rope_parameters", problem)
        settings[kind] = ("rope_scaling", {**settings[kind][1], **added})
    return settings


def _raw(s: ConfigReader, parameters: Any) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The settings of the types that layers have, as they stand."""
    field = "rope_scaling" if s.says("rope_scaling") else "rope_parameters"
    if field == "rope_scaling":
        parameters = s.get(field)
    elif parameters is None and _rotary(s).defaults:
        return {}
    nests = _mapping(field, {} if parameters is None else parameters)
    kinds = s.get("layer_types")
    if not isinstance(kinds, list | tuple):
        kinds = (_FULL,)
    elif s.family.last_full:
        kinds = (*kinds[:-1], _FULL)
    used = [kind for kind in (_FULL, _SLIDING) if kind in kinds]
    for kind in used:
        if kind not in nests:
            raise ShapeError(f"{field}.{kind}", "must be set: this family has one for each type")
    return {
        kind: (field, _mapping(f"{field}.{kind}", nests[kind]))
        for kind in used
        if nests[kind] is not None or not _rotary(s).nulls
    }


def _nest(nests: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    value = nests.get(kind)
    return {} if value is None else _mapping(f"rope_parameters.{kind}", value)


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ShapeError(field, f"must be an object, not {str(value)[:40]}")
    return value


def _check(s: ConfigReader, layers: str, field: str, parameters: Mapping[str, Any]) -> None:
    name = _name(parameters)
    kind = s.family.rope_names.get(str(name), name)
    types = s.family.rope_types or tuple(_NUMBERS)
    if kind not in types:
        words = ", ".join(sorted({*types, *s.family.rope_names}))
        raise ShapeError(field, f"rope_type {str(name)[:40]!r} is not one of {words}")
    _check_theta(s, layers, field, parameters)
    scales = s.family.rope_scales if kind != "default" else ()
    for key in (*_NUMBERS[kind], *scales):
        _check_number(f"{field}.{key}", parameters.get(key))
    share = _share(s, kind, field, parameters)
    if kind == "proportional" and "factor" in parameters:
        _check_number(f"{field}.factor", parameters["factor"])
    if kind == "yarn":
        _check_yarn(field, parameters)
    if kind == "longrope":
        for key in ("factor", "attention_factor"):
            if parameters.get(key) is not None:
                _check_number(f"{field}.{key}", parameters[key], low=-LARGEST_NUMBER)
        for key in _LISTS:
            _check_list(s, f"{field}.{key}", parameters.get(key), share)
    if _rotary(s).grows and parameters:
        _check_number(f"{field}.{_GROWTH}", parameters.get(_GROWTH), low=-LARGEST_NUMBER)
    if kind in ("yarn", "longrope", "llama3"):
        _check_original(s, layers, field, parameters, name)
    elif _rotary(s).grows and parameters:
        _check_number(f"{field}.{_ORIGINAL}", parameters.get(_ORIGINAL))
    rotary = _rotary(s)
    if rotary.sections and (_SECTIONS in parameters or rotary.own_sections):
        width = int(s.head_dim * (1 if kind == "proportional" else share))
        pairs = -(-width // 2) if rotary.sections == "all" else None
        sections = parameters.get(_SECTIONS, rotary.own_sections)
        _check_sections(f"{field}.{_SECTIONS}", sections, pairs, given=_SECTIONS in parameters)


def _name(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _check_theta(s: ConfigReader, layers: str, field: str, parameters: Mapping[str, Any]) -> None:
    """That of the settings, else the model's, as null where it says null."""
    name, value = _theta(s, layers, field, parameters)
    if name and (value is not None or not _rotary(s).null_theta):
        _check_number(name, value)


def _theta(
    s: ConfigReader, layers: str, field: str, parameters: Mapping[str, Any]
) -> tuple[str, Any]:
    """The setting that says it, "" for none, and what it says."""
    rotary = _rotary(s)
    outer = rotary.sliding_theta if layers == _SLIDING else rotary.theta
    if "rope_theta" in parameters or rotary.by_type == "raw":
        return f"{field}.rope_theta", parameters.get("rope_theta")
    return (outer, s.get(outer)) if outer and s.says(outer) else ("", None)


def _share(s: ConfigReader, kind: str, field: str, parameters: Mapping[str, Any]) -> float:
    """The share of a head that is rotated, where it is read."""
    rotary = _rotary(s)
    scaled = kind != "default" or (rotary.scaled and not parameters)
    if not scaled and not rotary.reads_share:
        return 1.0
    completed = kind == "default" or rotary.by_type != "raw"
    name, value = rotary.share_name, rotary.share if completed else 1.0
    if _PARTIAL in parameters:
        name, value = f"{field}.{_PARTIAL}", parameters[_PARTIAL]
    elif name and s.says(name):
        value = s.get(name)
        if value is None and not (rotary.strict or rotary.needs_share):
            return 1.0
    elif rotary.width_name and s.get(rotary.width_name) is not None:
        name, value = rotary.width_name, s.get(rotary.width_name)
        _check_number(name, value)
        value /= s.head_dim
    _check_number(name, value)
    share = float(value)
    whole = kind != "proportional" and (rotary.whole_heads or not rotary.reads_share)
    if share > 1 or (whole and share != 1):
        problem = "must be 1: its layers rotate whole heads" if whole else "must be at most 1"
        raise ShapeError(name, f"{problem}, not {str(value)[:40]}")
    return share


def _check_yarn(field: str, parameters: Mapping[str, Any]) -> None:
    """Its class takes the ratio of lengths for a factor of null, and defaults for betas of 0."""
    if "factor" not in parameters or parameters["factor"] is not None:
        _check_number(f"{field}.factor", parameters.get("factor"))
    for key in _BETAS:
        if parameters.get(key):
            _check_number(f"{field}.{key}", parameters[key])
    if parameters.get("attention_factor") is not None:
        value = parameters["attention_factor"]
        _check_number(f"{field}.attention_factor", value, low=-LARGEST_NUMBER)
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        for key in ("mscale", "mscale_all_dim"):
            _check_number(f"{field}.{key}", parameters[key], low=-LARGEST_NUMBER)


def _check_original(
    s: ConfigReader, layers: str, field: str, parameters: Mapping[str, Any], name: object
) -> None:
    """The tokens before scaling: those of the model, if it says any, come first."""
    if s.says(_ORIGINAL) and not layers:
        if _rotary(s).strict:
            s.integer(_ORIGINAL)
        _check_number(_ORIGINAL, s.get(_ORIGINAL))
    elif _ORIGINAL in parameters or (_rotary(s).by_type == "raw" and _rotary(s).defaults):
        _check_number(f"{field}.{_ORIGINAL}", parameters.get(_ORIGINAL))
    if name == "su" and _ORIGINAL not in parameters:
        raise ShapeError(f"{field}.{_ORIGINAL}", f"must be set beside rope_type {name!r}")


def _check_number(field: str, value: object, low: float = 0) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low < value <= LARGEST_NUMBER:  # type: ignore[operator]
        above = "" if low else " above 0"
        raise ShapeError(field, f"must be a number{above}, not {str(value)[:40]}")


def _check_list(s: ConfigReader, field: str, value: object, share: float) -> None:
    """A factor for each pair of a head's rotated elements."""
    if not isinstance(value, list | tuple):
        raise ShapeError(field, f"must be a list of numbers, not {str(value)[:40]}")
    for factor in value:
        _check_number(field, factor)
    hidden = s.integer("hidden_size") // s.heads
    widths = {s.head_dim, hidden} if _rotary(s).strict else {s.head_dim}
    pairs = {int(width * share) // 2 for width in widths}
    if pairs != {len(value)}:
        counts = " and ".join(str(count) for count in sorted(pairs))
        raise ShapeError(field, f"must have {counts} numbers, one per pair, not {len(value)}")


def _check_sections(field: str, value: object, pairs: int | None, *, given: bool) -> None:
    """Numbers of ``pairs`` for each axis of positions; None: any, of three axes. ``given``: in the
    settings; else they are those that the class has of its own.
    """
    counts = value if isinstance(value, list | tuple) else ()
    whole = all(type(count) is int and count >= 0 for count in counts)
    if not whole or len(counts) < (3 if pairs is None else 1):
        raise ShapeError(field, f"must be a list of whole numbers, not {str(value)[:40]}")
    if pairs is not None and sum(counts) != pairs:
        problem = f"must be the {pairs} pairs of a head together, not {sum(counts)}"
        if not given:
            problem += f", as those of its class are, {list(counts)}: set it"
        raise ShapeError(field, problem)


def count_frequencies(s: ConfigReader, dims: Mapping[str, int]) -> int:
    """Numbers in float32 that rotary embeddings keep beside a model's parameters: a frequency for
    each pair of a head's rotated elements, twice, since some change them. ``dims``: elements of a
    head, by the types of its layers. Raises ShapeError for heads without a pair for each element.
    """
    rotary = _rotary(s)
    name, value = rotary.switch
    if s.family.positions or rotary.absent or (name and s.get(name) != value):
        return 0
    if not s.family.reads_head_dim and s.get("head_dim") not in (None, s.head_dim):
        problem = f"must be {s.head_dim}, hidden_size over the heads: only rotations read it"
        raise ShapeError("head_dim", problem)
    tables = s.integer("num_hidden_layers") if s.family.layer_rotary else 1 + len(_thetas(s))
    widths = [*_rotated(s, rotary, dims)]
    for dim, width in widths:
        if width % 2 and (width == dim or rotary.even_width):
            problem = f"{width} of {dim} elements of a head do not make pairs to rotate"
            raise ShapeError("head_dim", problem)
    return tables * sum(2 * -(-width // 2) for _, width in widths)


def _thetas(s: ConfigReader) -> set[float]:
    """Those that layers have by a list of their own, but of layers without: 0."""
    name, layers = _rotary(s).thetas, s.integer("num_hidden_layers")
    thetas = s.get(name) if name else []
    if thetas is None:
        return {1.0}  # one for all
    if not isinstance(thetas, list | tuple) or (name and len(thetas) < layers):
        raise ShapeError(name, f"must be a list of {layers} numbers, one per layer")
    for theta in thetas:
        if theta != 0 or isinstance(theta, bool):
            _check_number(name, theta)
    return {float(theta) for theta in thetas if theta}


def _rotated(s: ConfigReader, rotary: Rotary, dims: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The elements of a head, and those that have a frequency, of each type of layers."""
    said = s.get("rope_parameters") or s.get("rope_scaling")
    if rotary.by_type in ("each", "raw") and not said:
        for kind, share in zip((_FULL, _SLIDING), rotary.shares, strict=True):
            yield dims.get(kind, 0), int(dims.get(kind, 0) * share)
        return
    for kind, (field, parameters) in _settings(s).items():
        setting, theta = _theta(s, kind, field, parameters)
        if rotary.null_theta and setting and theta is None:
            continue
        name = str(_name(parameters))
        scaled = s.family.rope_names.get(name, name)
        share = 1.0 if scaled == "proportional" else _share(s, scaled, field, parameters)
        dim = dims.get(kind, 0) if kind else s.head_dim
        yield dim, int(dim * share)


def longest_text(s: ConfigReader, *, rotary: bool = True) -> int:
    """Tokens that the model reads: those of its positions, and where its ``rotary`` embedding is
    scaled beyond these by ``yarn`` or ``dynamic``, as many times more as the factor says.

    Follows vLLM's derivation of a model's length; transformers has no limit. ``longrope`` and
    ``llama3`` name the scaled length in max_position_embeddings, ``linear`` either one.
    """
    positions = s.integer("max_position_embeddings")
    if not rotary:
        return positions
    lengths = [_scaled(layer, positions) for _, layer in _settings(s).values()]
    return min(max(positions, *lengths) if lengths else positions, LARGEST_OTHER)


def _scaled(parameters: Mapping[str, Any], positions: int) -> int:
    """The tokens that scaled rotary embeddings reach; 0 where they are not scaled beyond these."""
    kind, factor = parameters.get("rope_type", parameters.get("type")), parameters.get("factor")
    if kind not in ("yarn", "dynamic") or isinstance(factor, bool):
        return 0
    if not isinstance(factor, int | float) or not 1 <= factor <= LARGEST_OTHER:
        return 0
    original = parameters.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int | float):
        # More than all positions: the default of a class, for a larger model.
        return int(original * factor) if 0 < original <= positions else 0
    return int(positions * factor)
