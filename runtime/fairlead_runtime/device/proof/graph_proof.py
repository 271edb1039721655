"""A captured step, proven where it will run: replayed once and compared with the step itself.

Owns the rows of that step and the comparison. A graph is captured of padding alone; the rows that
it is replayed for have other tokens, lengths and blocks. So what it reads from where these were at
its capture is found before a request gets it.
"""

import math

import torch

from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.sampling.sampling_mode import HEAVIEST
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.sizing.groups import LayerGroup

ROWS, BLOCKS = 8, 3  # at most, of such a step; blocks of a row in each layer group


def units_of(groups: tuple[LayerGroup, ...]) -> int:
    """Units of the cache that the proof writes to, from the first on."""
    return ROWS * BLOCKS * len(groups)


@torch.inference_mode()
def replay_error(
    steps: DecodeSteps, cache: CacheStorage, size: int, max_model_len: int, *, median: bool
) -> float:
    """How far the log-probabilities of the captured step of ``size`` rows in the HEAVIEST mode are
    from those of its logits without the graph: the worst row's, in units of its logits' spread, or
    with ``median`` that of the median, where rounding may choose another expert.
    """
    generator = torch.Generator().manual_seed(0)
    units = units_of(cache.groups)
    for tensor in (slot for slots in cache.tensors for slot in slots):
        units_data = tensor[:units]
        units_data.copy_(torch.randn(units_data.shape, generator=generator))
    longest = min(BLOCKS * cache.block_size, max_model_len)
    rows = [
        _row(place, 1 + place * 5 % longest, cache, generator)
        for place in range(min(ROWS, steps.table.sequences, size))
    ]
    logits, tokens, captured = steps.run_and_replay(rows, size, HEAVIEST)
    reference = logits.float().log_softmax(dim=1)
    ids = torch.cat([tokens[:, None], captured.numbers[:, 1:]], dim=1)
    apart = (captured.values - reference.gather(1, ids)).square().mean(dim=1).sqrt()
    errors = apart / logits.float().std(dim=1).clamp(min=1e-6)
    worst = float(errors.median() if median else errors.max())
    return math.inf if math.isnan(worst) else worst


def _row(place: int, length: int, cache: CacheStorage, generator: torch.Generator) -> Row:
    """The decode of a sequence of so many tokens, in blocks that no other row has."""
    tokens = torch.randint(3, 100, (length,), generator=generator).tolist()
    request = Request(f"{place}", tuple(tokens), SamplingParams(temperature=0), 1)
    first, count = place * BLOCKS * len(cache.groups), -(-length // cache.block_size)
    tables = [
        list(range(first + group * BLOCKS, first + group * BLOCKS + count))
        for group in range(len(cache.groups))
    ]
    return Row(Sequence(place, request, 0, tokens, tables=tables), length - 1, 1, samples=True)
