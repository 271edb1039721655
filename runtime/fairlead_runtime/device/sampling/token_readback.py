"""What a step sampled, on its way from the device to the host.

Owns the host memory that it arrives in, and the one wait of a step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.sampling.sample_rows import RowLogprobs
from fairlead_runtime.device.sampling.host_sampler import FAILURES
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import Failure
from fairlead_runtime.scheduling.plan import Result, Row


class TokenReadback:
    """Host memory for what is sampled in one step of at most ``max_rows`` rows, with the
    log-probabilities of at most ``likeliest`` tokens.
    """

    def __init__(self, max_rows: int, likeliest: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tokens = torch.empty(max_rows, dtype=torch.int64, pin_memory=on_gpu)
        shape = max_rows, 1 + likeliest
        self._logprobs = RowLogprobs(
            torch.empty(shape, pin_memory=on_gpu),
            torch.empty(shape, dtype=torch.int64, pin_memory=on_gpu),
        )
        # torch does not annotate it.
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._count = 0

    def fetch(self, tokens: Tensor, logprobs: RowLogprobs | None) -> None:
        """Queue the copy of ``tokens`` [B] and of their ``logprobs``, if the step has some. All may
        be written again behind it.
        """
        self._count = len(tokens)
        self._tokens[: self._count].copy_(tokens, non_blocking=True)
        for target, source in zip(self._logprobs, logprobs or (), strict=False):
            target[: self._count].copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[int]:
        """The tokens; the log-probabilities are here as well."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[int] = self._tokens[: self._count].tolist()
        return values

    def logprobs(self, place: int, token: int, count: int) -> TokenLogprobs:
        """Log-probabilities of the row's token and of the ``count`` likeliest, where the step had
        some.
        """
        values: list[float] = self._logprobs.values[place, : 1 + count].tolist()
        numbers: list[int] = self._logprobs.numbers[place, : 1 + count].tolist()
        return TokenLogprobs(token, values[0], numbers[0], tuple(numbers[1:]), tuple(values[1:]))


class SampledStep(NamedTuple):
    """What a step's rows take, queued; ``failed``: by sequence id, why some can get no token."""

    readback: TokenReadback
    failed: Mapping[int, Failure]


def results_of(rows: Sequence[Row], sampled: SampledStep) -> dict[int, Result]:
    """Results of the step's rows by sequence id; waits for them."""
    readback, failed = sampled
    tokens = readback.wait()  # the one wait for the device
    by_id: dict[int, Result] = {}
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        count = row.sequence.request.params.logprobs
        failure = failed.get(row.sequence.id) or FAILURES.get(token)
        if failure is not None:
            by_id[row.sequence.id] = Result(-1, failure=failure)
        elif count is None:
            by_id[row.sequence.id] = Result(token)
        else:
            by_id[row.sequence.id] = Result(token, readback.logprobs(place, token, count))
    return by_id
