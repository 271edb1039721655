"""Layer groups: equal shares of a model's layers with one kind of attention each.

Owns how layers become groups, after vLLM's hybrid cache manager and Jenga (arXiv:2503.18292): every
group draws blocks of the same size from one shared pool, so blocks that window layers free serve
full layers too. Knows neither blocks nor sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_runtime.sizing.arithmetic import ceil_div

NULL = -1  # a table entry whose block the window has freed


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """``layers`` share one block table. ``window`` W: position p sees keys p-W+1..p; None: all keys
    to p.
    """

    index: int
    window: int | None
    layers: tuple[int, ...]

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at ``position`` or later can still read."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Split layers, given each layer's window, into groups of equal size.

    The size is the largest at which the empty slots (layers per group times groups, less the
    layers) are at most an eighth of the layers: few groups mean few tables, and empty slots waste
    memory. Layers with one window make one group.
    """
    if not windows:
        raise ValueError("windows: a model has at least one layer")
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if window is not None and window < 1:
            raise ValueError(
                f"windows: layer {layer} has window {window}; it must be at least 1 or None"
            )
        layers_of.setdefault(window, []).append(layer)
    total = len(windows)
    size = next(
        n
        for n in range(total, 0, -1)
        if 8 * sum(ceil_div(len(layers), n) * n for layers in layers_of.values()) <= 9 * total
    )
    groups: list[LayerGroup] = []
    for window, layers in layers_of.items():
        for at in range(0, len(layers), size):
            groups.append(LayerGroup(len(groups), window, tuple(layers[at : at + size])))
    return tuple(groups)


def layers_per_unit(groups: Sequence[LayerGroup]) -> int:
    """Layers whose keys and values one unit holds: the size of the largest group."""
    return max(len(group.layers) for group in groups)
