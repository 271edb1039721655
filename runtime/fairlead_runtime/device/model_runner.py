"""Runs a step's work on the device and returns its tokens.

Owns the path batch → forward pass → logits → sampling, and the cache's copies. Decides nothing.
"""

from collections.abc import Callable, Mapping

import torch

from fairlead_kernels.backend import BackendChoice, pick
from fairlead_runtime.device.batch import BatchBuilder
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.device.sampling import SampledTokens, SamplingBatch, sample
from fairlead_runtime.scheduling.plan import Result, Work

Sampler = Callable[[torch.Tensor, SamplingBatch], SampledTokens]


class ModelRunner:
    """Executes steps of one model on one cache. ``kernels`` says which kernels it runs on and why.

    One step at a time, from one thread at a time.
    """

    def __init__(self, model: PagedModel, cache: CacheStorage, sampler: Sampler = sample) -> None:
        self.kernels: BackendChoice = pick(model.heads, model.device)
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._batches = BatchBuilder(
            cache.groups, cache.block_size, pinned=model.device.type == "cuda"
        )

    def copy(self, work: Work) -> None:
        """The step's offload, restore and copy-on-write copies: once, before ``execute``, however
        often that runs.
        """
        self._cache.copy(work)

    @torch.inference_mode()
    def execute(self, work: Work) -> Mapping[int, Result]:
        """The forward pass of ``work.rows``; a Result per sampling row, by sequence id.

        Writes the same keys and values to the same slots when called again with the same rows, or
        with a part of them. A row whose logits are not finite gets a Result with ``error``; the
        others are unaffected.
        """
        if not work.rows:
            return {}
        batch = self._batches.build(work.rows)
        logits = self._model.forward(batch, self._cache, self.kernels.attention)
        if not batch.sampling:
            if self._model.device.type == "cuda":
                # The next build writes the host buffers that this step may still be reading;
                # sampling waits anyway.
                torch.cuda.current_stream(self._model.device).synchronize()
            return {}
        outcomes = self._sampler(logits, SamplingBatch.of(batch.sampling)).outcomes()
        return {
            sequence.id: Result(token, logprobs, error)
            for sequence, (token, logprobs, error) in zip(batch.sampling, outcomes, strict=True)
        }
