"""The window of each layer, as a ``config.json`` says, and the layer whose keys it reads.

Owns the settings by which families tell windowed layers from full ones. Pure.
"""

from collections.abc import Sequence

from fairlead_runtime.sizing.config_json import ConfigReader, ShapeError
from fairlead_runtime.sizing.family import Family
from fairlead_runtime.sizing.layer_kinds import FULL, SLIDING
from fairlead_runtime.sizing.parameters import first_mixture

# Of a window of one token transformers' cache keeps all keys, over which the mask of a decode is
# spread: its text is another with the cache than without it.
NARROWEST = 2
_CACHED = "transformers' own text with a window of one token depends on its cache"


def narrow_window(window: int, factor: int = 1) -> str:
    """What is wrong with a window of so many tokens, in words behind the name of a setting that is
    ``factor`` times it; "" for one that is served.
    """
    if window >= NARROWEST:
        return ""
    reason = _CACHED if window == 1 else "null is no window"
    return f"must be at least {factor * NARROWEST} where layers slide: {reason}"


def windows_of(s: ConfigReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """One entry per layer: with W, position p sees the keys p-W+1..p; with None, all of 0..p.
    Raises ShapeError.
    """
    switch = s.flag(family.window_if) if family.window_if else True
    listed = family.listed_slide and s.get("layer_types") is not None
    on = family.window in ("all", "types") and (switch or listed)
    # Which layers share keys is told by their kinds, which only a window tells apart here.
    read = s.integer if family.shared else s.optional
    # Classes take 0 and -1 where no layer slides.
    window = read("sliding_window", low=-1) if on else None
    if on and family.window_before and s.get(family.window_before) is not None:
        window = s.integer(family.window_before) + 1
    if on and family.window_twice and not s.says("sliding_window"):
        window = s.integer(family.window_twice, low=2) // 2
    if family.window not in ("types", "none"):
        return (_check_window(s, family, window),) * layers
    types = s.get("layer_types")
    if types is None and window is None and family.window_if and not (on and family.window_below):
        return (None,) * layers  # the class has windows in none then
    if types is None:
        types = [SLIDING if _slides(s, family, i, layers) else FULL for i in range(layers)]
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise ShapeError("layer_types", f"must be a list of {layers} names, one per layer")
    for kind in types:
        if family.window == "none" and kind != FULL:
            raise ShapeError("layer_types", f"{str(kind)[:40]!r} is not supported: {FULL} is")
        if kind not in (FULL, SLIDING):
            raise ShapeError("layer_types", f"{str(kind)[:40]!r} is neither {FULL} nor {SLIDING}")
    kinds = [*types[:-1], FULL] if family.last_full else types
    if window is None and any(kind != FULL for kind in kinds):
        # The same name for the first layer that slides as for those that say so by themselves.
        field, need = ("sliding_window", "set") if on else (family.window_if, "true")
        problem = f"must be {need}, or all of layer_types full_attention: some slide"
        raise ShapeError(field, problem)
    return tuple(_check_window(s, family, window) if kind == SLIDING else None for kind in kinds)


def _check_window(s: ConfigReader, family: Family, window: int | None) -> int | None:
    twice = family.window_twice and not s.says("sliding_window")
    field, factor = (family.window_twice, 2) if twice else ("sliding_window", 1)
    if window is not None and (problem := narrow_window(window, factor)):
        raise ShapeError(field, problem)
    return window


def windows_by_kind(s: ConfigReader, kinds: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(
        s.integer("sliding_window", low=NARROWEST) if kind == SLIDING else None for kind in kinds
    )


def sources_of(windows: Sequence[int | None], kept: int, setting: str) -> tuple[int, ...]:
    """By layer the one whose keys it reads, where the first ``kept`` keep theirs: of the others
    each reads those of the last one of its kind.
    """
    last = {window: layer for layer, window in enumerate(windows[:kept])}
    if missing := set(windows) - last.keys():
        raise ShapeError(
            setting,
            f"no layer before the last {len(windows) - kept} has "
            + ("full attention" if None in missing else "a window")
            + ", whose keys a later one would read",
        )
    return (*range(kept), *(last[window] for window in windows[kept:]))


def _slides(s: ConfigReader, family: Family, index: int, layers: int) -> bool:
    if family.full_rule is not None:
        return not family.full_rule(index, layers)
    if family.full_first:
        return index % s.integer(family.full_first) != 0
    if family.window_from:
        return index >= s.integer(family.window_from, low=0)
    if family.window_below and index >= s.integer(family.window_below, low=0):
        return False
    if family.slides_without:
        numbers = s.get(family.slides_without)
        if numbers is None:
            return (index + 1) % s.integer(str(family.full_every)) == 0
        if not isinstance(numbers, list | tuple) or len(numbers) != layers:
            raise ShapeError(family.slides_without, f"must be a list of {layers} numbers")
        return not numbers[index]
    every = family.full_every
    if family.prefix_every:
        prefix = first_mixture(s, family)
        every, index = (family.prefix_every, index) if index < prefix else (every, index - prefix)
    return (index + 1) % (every if isinstance(every, int) else s.integer(every)) != 0
