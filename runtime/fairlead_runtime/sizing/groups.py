"""Layer groups: equal shares of a model's layers with one kind of attention each.

Owns how layers become groups, after vLLM's hybrid cache manager and Jenga (arXiv:2503.18292): every
group draws blocks of the same size from one shared pool, so blocks that window layers free serve
full layers too. A layer that reads another one's keys and values has no slot of its own: it reads
that layer's. Knows neither blocks nor sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_runtime.sizing.arithmetic import ceil_div

NULL = -1  # a table entry whose block the window has freed


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """``layers`` keep keys under one block table, the i-th in slot i. ``window`` W: position p sees
    keys p-W+1..p; None: all keys to p. ``readers``: layers that keep none, each with the slot that
    it reads.
    """

    index: int
    window: int | None
    layers: tuple[int, ...]
    readers: tuple[tuple[int, int], ...] = ()

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at ``position`` or later can still read."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


def group_layers(
    windows: Sequence[int | None], sources: Sequence[int] | None = None
) -> tuple[LayerGroup, ...]:
    """Split the layers that keep keys, given each layer's window, into groups of equal size.
    ``sources``: by layer the one whose keys it reads, its own number where it keeps them; None: all
    keep theirs.

    The size is the largest at which the empty slots (layers per group times groups, less the
    layers) are at most an eighth of the layers: few groups mean few tables, and empty slots waste
    memory. Layers with one window make one group.
    """
    if not windows:
        raise ValueError("windows: a model has at least one layer")
    sources = range(len(windows)) if sources is None else sources
    check_sources(windows, sources)
    layers_of: dict[int | None, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for layer, (window, source) in enumerate(zip(windows, sources, strict=True)):
        if window is not None and window < 1:
            raise ValueError(
                f"windows: layer {layer} has window {window}; it must be at least 1 or None"
            )
        if source == layer:
            layers_of.setdefault(window, []).append(layer)
        else:
            readers.setdefault(source, []).append(layer)
    total = sum(map(len, layers_of.values()))
    size = next(
        n
        for n in range(total, 0, -1)
        if 8 * sum(ceil_div(len(layers), n) * n for layers in layers_of.values()) <= 9 * total
    )
    groups: list[LayerGroup] = []
    for window, layers in layers_of.items():
        for at in range(0, len(layers), size):
            kept = tuple(layers[at : at + size])
            reading = [
                (r, slot) for slot, kept_by in enumerate(kept) for r in readers.get(kept_by, ())
            ]
            groups.append(LayerGroup(len(groups), window, kept, tuple(reading)))
    return tuple(groups)


def check_sources(windows: Sequence[int | None], sources: Sequence[int]) -> None:
    """Raise ValueError unless every layer reads its own keys or those of an earlier layer that
    keeps them, as long as this one sees them.
    """
    for layer, source in enumerate(sources):
        if source == layer:
            continue
        if not 0 <= source < layer or sources[source] != source:
            raise ValueError(f"layer {layer} reads the keys of layer {source}, which keeps none")
        if windows[source] != windows[layer]:
            raise ValueError(
                f"layer {layer}, with window {windows[layer]}, reads the keys of layer {source}, "
                f"with window {windows[source]}"
            )


def layers_per_unit(groups: Sequence[LayerGroup]) -> int:
    """Layers whose keys and values one unit holds: the size of the largest group."""
    return max(len(group.layers) for group in groups)
