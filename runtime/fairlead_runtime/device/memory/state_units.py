"""The states of sequences in the units of the pool.

Owns how a layer's share of a state is gathered from units and put back. A state's run of bytes lies
over its units in order (``sizing.states``), so a layer's share may begin in one and end in another.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.interface.states import StatePlace
from fairlead_runtime.sizing.states import ALIGNMENT, StateComponent, StateLayout

_WORD = torch.int64  # bytes are copied by eight
_BYTES = _WORD.itemsize


class _Span(NamedTuple):
    """Words ``begin`` to before ``end`` of the ``unit``-th unit of a state."""

    unit: int
    begin: int
    end: int


class _Share(NamedTuple):
    """A layer's share of a state: its words, where they lie, and its tensors."""

    words: int
    spans: tuple[_Span, ...]
    components: tuple[StateComponent, ...]
    first: int  # its first byte in the state


class StateUnits:
    """The states of ``layout`` in a pool ``units`` uint8 [units, bytes], whose bytes are a multiple
    of ALIGNMENT.
    """

    def __init__(self, units: Tensor, layout: StateLayout) -> None:
        self.layout = layout
        self._pool = units.view(_WORD)
        self._places = {
            layer: {part.name: StatePlace(units, part.offset) for part in components}
            for layer, components in layout.layers.items()
        }
        self.count = layout.units(units.shape[1])  # units of one state
        self._shares = {
            layer: _share(components, self._pool.shape[1])
            for layer, components in layout.layers.items()
        }

    def places(self, layer: int) -> Mapping[str, StatePlace]:
        """Where the states of one layer lie, by name."""
        return self._places[layer]

    def read(self, layer: int, units: Tensor) -> dict[str, Tensor]:
        """Copies of the states [B, ...] of one layer, by name, which may be changed. ``units``
        int64 [B, n].
        """
        share = self._shares[layer]
        parts = [
            self._pool[:, span.begin : span.end].index_select(0, units[:, span.unit])
            for span in share.spans
        ]
        return dict(_tensors(share, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)))

    def write(self, layer: int, units: Tensor, states: Mapping[str, Tensor]) -> None:
        """Keep these states [B, ...] of one layer in ``units`` int64 [B, n]."""
        share = self._shares[layer]
        words = self._pool.new_zeros(len(units), share.words)
        for name, tensor in _tensors(share, words):
            tensor.copy_(states[name])
        at = 0
        for span in share.spans:
            count = span.end - span.begin
            part = words[:, at : at + count]
            self._pool[:, span.begin : span.end].index_copy_(0, units[:, span.unit], part)
            at += count


def _share(components: tuple[StateComponent, ...], unit_words: int) -> _Share:
    first = components[0].offset
    last = components[-1]
    end = -(-(last.offset + last.nbytes) // ALIGNMENT) * ALIGNMENT
    begin_word, end_word = first // _BYTES, end // _BYTES
    spans = tuple(
        _Span(
            unit,
            max(begin_word, unit * unit_words) - unit * unit_words,
            min(end_word, (unit + 1) * unit_words) - unit * unit_words,
        )
        for unit in range(begin_word // unit_words, -(-end_word // unit_words))
    )
    return _Share(end_word - begin_word, spans, components, first)


def _tensors(share: _Share, words: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views [B, ...] of the components in a share's words [B, W]."""
    for component in share.components:
        dtype: torch.dtype = getattr(torch, component.dtype)
        begin = (component.offset - share.first) // dtype.itemsize
        count = component.nbytes // dtype.itemsize
        flat = words.view(dtype)[:, begin : begin + count]
        yield component.name, flat.view(len(words), *component.shape)
