"""Sequences of a model with states, fed to it by hand: no scheduler, and every unit taken once."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row

VERSIONS = 2


class StateRows:
    """A cache of NaN of ``units`` units, drawn in a random order, and a model's steps on it."""

    def __init__(self, model: PagedModel, *, block_size: int = 4, units: int = 400) -> None:
        self.model, self.block_size = model, block_size
        layout = model.state_layout
        assert layout is not None
        self.cache = CacheStorage(
            model.groups,
            model.cache_heads,
            units=units,
            block_size=block_size,
            device=model.device,
            states=layout,
        )
        self.cache.fill(torch.nan)
        assert self.cache.states is not None
        self.state_units = self.cache.states.count
        self.free = np.random.default_rng(1).permutation(units).tolist()
        self.builder = BatchBuilder(model.groups, block_size)
        self.attention = TorchAttention(model.heads, model.device)
        self._made = 0

    def sequence(self, tokens: Rows[int], prompt: int) -> Sequence:
        """A sequence of these tokens, of which the first are its ``prompt``, with blocks for all of
        them and its versions of a state.
        """
        own = tuple(tokens[:prompt])
        request = Request(str(self._made), own, SamplingParams(), max_tokens=1)
        sequence = Sequence(self._made, request, 0, list(tokens))
        self._made += 1
        blocks = -(-len(tokens) // self.block_size)
        sequence.tables = [self.take(blocks) for _ in self.model.groups]
        sequence.states = [self.take(self.state_units) for _ in range(VERSIONS)]
        return sequence

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def step(self, rows: Iterable[tuple[Sequence, int]], *, times: int = 1) -> list[Tensor]:
        """Compute so many more tokens of each sequence, ``times`` over, and collect the step: the
        logits of each one's last token.
        """
        step = [Row(sequence, sequence.computed, count, True) for sequence, count in rows]
        for _ in range(times):
            batch = self.builder.build(step)
            logits = self.model.forward(batch, self.cache, self.attention)
        for row in step:
            row.sequence.computed += row.count
            row.sequence.turn += 1
        return list(logits)


def expected(model: PagedModel, tokens: Rows[int]) -> Tensor:
    """Logits [T, vocabulary] of transformers' own pass over a whole sequence."""
    with model.plain() as plain, torch.inference_mode():
        logits: Tensor = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
