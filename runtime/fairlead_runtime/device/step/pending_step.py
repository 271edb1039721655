"""A step between its launch and its tokens.

Owns the two halves of a launched step whose tokens depend on masks: its forward pass is queued at
its launch, the choice of its tokens when the masks are there, at the latest when it is collected.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.sampling_mode import Way
from fairlead_runtime.device.sampling.token_readback import Drawn, results
from fairlead_runtime.scheduling.plan import Result, Row


class Launched:
    """A step of these rows, sampled in this ``way``, whose tokens ``draw`` queues: at once where it
    needs no masks. Raises what that raises.
    """

    def __init__(
        self, rows: Sequence[Row], sampler: RowSampler, way: Way, draw: Callable[[], Drawn]
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        self._draw: Callable[[], Drawn] | None = draw
        self._drawn: Drawn | None = None
        if not way.masked:
            self.draw()

    @torch.inference_mode()
    def draw(self) -> None:
        """Queue the choice of its tokens, unless that was done. Raises what that raises, and
        ``collect`` then raises RuntimeError.
        """
        draw, self._draw = self._draw, None
        if draw is not None:
            with self._sampler.forgetting(self._rows):
                self._drawn = draw()

    def collect(self) -> Mapping[int, Result]:
        """Wait for it: a Result for each of its rows."""
        self.draw()
        if self._drawn is None:
            raise RuntimeError("its tokens could not be chosen")
        rows, self._rows = self._rows, ()  # whoever still has this keeps no sequence
        with self._sampler.forgetting(rows):
            return results(rows, self._drawn)
