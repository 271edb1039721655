"""A step between its launch and its tokens.

Owns the two halves of a launched step whose tokens depend on masks: its forward pass is queued at
its launch, the choice of its tokens when the masks are there, at the latest when it is collected.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.sampling_mode import SamplingMode
from fairlead_runtime.device.sampling.token_readback import SampledStep, results_of
from fairlead_runtime.scheduling.plan import Result, Row


class PendingStep:
    """A step of these rows, sampled in this ``mode``, whose tokens ``sample`` queues: at once where
    it needs no masks. Raises what that raises.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        sampler: RowSampler,
        mode: SamplingMode,
        sample: Callable[[], SampledStep],
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        self._sample: Callable[[], SampledStep] | None = sample
        self._sampled: SampledStep | None = None
        if not mode.masked:
            self.sample()

    @torch.inference_mode()
    def sample(self) -> None:
        """Queue the choice of its tokens, unless that was done. Raises what that raises, and
        ``collect`` then raises RuntimeError.
        """
        sample, self._sample = self._sample, None
        if sample is not None:
            with self._sampler.forgetting(self._rows):
                self._sampled = sample()

    def collect(self) -> Mapping[int, Result]:
        """Wait for it: a Result for each of its rows."""
        self.sample()
        if self._sampled is None:
            raise RuntimeError("its tokens could not be chosen")
        rows, self._rows = self._rows, ()  # whoever still has this keeps no sequence
        with self._sampler.forgetting(rows):
            return results_of(rows, self._sampled)
