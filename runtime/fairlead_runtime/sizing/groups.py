"""Layer groups: shares of a model's layers, equal in bytes, with one kind of attention each.

Owns how layers become groups, after vLLM's hybrid cache manager and Jenga (arXiv:2503.18292): every
group draws blocks of the same bytes from one shared pool, so blocks that window layers free serve
full layers too. A layer that reads another one's keys and values has no slot of its own: it reads
that layer's; one without attention is in no group. Knows neither blocks nor sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlead_runtime.sizing.arithmetic import ceil_div

NULL = -1  # a table entry whose block the window has freed
NO_KEYS = -1  # the source of a layer that neither keeps keys nor reads another one's


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """``layers`` keep keys under one block table, the i-th in slot i. ``window`` W: position p sees
    keys p-W+1..p; None: all keys to p. ``readers``: layers that keep none, each with the slot that
    it reads. ``width``: elements of one token's key and value in each of the layers.
    """

    index: int
    window: int | None
    layers: tuple[int, ...]
    readers: tuple[tuple[int, int], ...] = ()
    width: int = 1

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at ``position`` or later can still read."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


def group_layers(
    windows: Sequence[int | None],
    widths: Sequence[int] | None = None,
    sources: Sequence[int] | None = None,
) -> tuple[LayerGroup, ...]:
    """Split the layers that keep keys, given each layer's window and width (None: all alike), into
    groups that take one unit of the pool a block; none where no layer keeps keys. ``sources``: by
    layer the one whose keys it reads, its own number where it keeps them, NO_KEYS where it has no
    attention; None: all keep theirs.

    A unit is as wide as possible while the empty places (units' widths together, less the layers')
    are at most an eighth of what the layers keep: few groups mean few tables, and empty places
    waste memory. Where no unit wastes so little it is one that wastes least. Layers of one window
    and width make one group, as long as they fit into a unit.
    """
    if not windows:
        raise ValueError("windows: a model has at least one layer")
    sources = range(len(windows)) if sources is None else sources
    check_sources(windows, sources)
    layers_of: dict[tuple[int | None, int], list[int]] = {}
    readers: dict[int, list[int]] = {}
    for layer, (window, source) in enumerate(zip(windows, sources, strict=True)):
        if window is not None and window < 1:
            raise ValueError(
                f"windows: layer {layer} has window {window}; it must be at least 1 or None"
            )
        width = 1 if widths is None else widths[layer]
        if source == layer:
            layers_of.setdefault((window, width), []).append(layer)
        elif source != NO_KEYS:
            readers.setdefault(source, []).append(layer)
    if not layers_of:
        return ()
    unit = _unit_width(layers_of)
    groups: list[LayerGroup] = []
    for (window, width), layers in layers_of.items():
        size = unit // width
        for at in range(0, len(layers), size):
            kept = tuple(layers[at : at + size])
            reading = [
                (r, slot) for slot, kept_by in enumerate(kept) for r in readers.get(kept_by, ())
            ]
            groups.append(LayerGroup(len(groups), window, kept, tuple(reading), width))
    return tuple(groups)


def check_sources(windows: Sequence[int | None], sources: Sequence[int]) -> None:
    """Raise ValueError unless every layer with attention reads its own keys or those of an earlier
    layer that keeps them, as long as this one sees them.
    """
    for layer, source in enumerate(sources):
        if source in (layer, NO_KEYS):
            continue
        if not 0 <= source < layer or sources[source] != source:
            raise ValueError(f"layer {layer} reads the keys of layer {source}, which keeps none")
        if windows[source] != windows[layer]:
            raise ValueError(
                f"layer {layer}, with window {windows[layer]}, reads the keys of layer {source}, "
                f"with window {windows[source]}"
            )


def _unit_width(layers_of: Mapping[tuple[int | None, int], Sequence[int]]) -> int:
    """The elements of a token that a unit has room for."""
    kept = sum(width * len(layers) for (_, width), layers in layers_of.items())
    widest = max(width for _, width in layers_of)
    units = {
        width * count
        for (_, width), layers in layers_of.items()
        for count in range(1, len(layers) + 1)
        if width * count >= widest
    }

    def taken(unit: int) -> int:
        counts = (ceil_div(len(layers), unit // width) for (_, width), layers in layers_of.items())
        return unit * sum(counts)

    fitting = [unit for unit in units if 8 * taken(unit) <= 9 * kept]
    return max(fitting) if fitting else min(units, key=lambda unit: (taken(unit), -unit))


def unit_width(groups: Sequence[LayerGroup]) -> int:
    """Elements of one token's keys and values that a unit holds: those of the widest group."""
    return max((len(group.layers) * group.width for group in groups), default=0)


def pool_units(num_blocks: int, groups: int) -> int:
    """Units of the pool: a block has one for each group; without any it is one unit, for states."""
    return num_blocks * max(1, groups)
