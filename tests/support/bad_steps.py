"""A device on which steps fail, and what the engine does with it: no text may tell."""

import random
from collections.abc import Mapping

from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.engine.isolate import run_isolated
from fairlead_runtime.scheduling.plan import Result, Work


class BadSteps:
    """A device of whose steps a third fail once they have computed and written everything."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._runner, self._draw = runner, random.Random(seed)
        self.failed = 0

    def copy(self, work: Work) -> None:
        self._runner.copy(work)

    def execute(self, work: Work) -> Mapping[int, Result]:
        results = self._runner.execute(work)
        if len(work.rows) > 1 and self._draw.random() < 1 / 3:
            self.failed += 1
            raise RuntimeError("injected")
        return results


class Isolating:
    """A device that halves the rows of a step that fails, as the engine does."""

    def __init__(self, device: BadSteps) -> None:
        self._device = device

    def copy(self, work: Work) -> None:
        self._device.copy(work)

    def execute(self, work: Work) -> Mapping[int, Result]:
        outcome = run_isolated(self._device, work)
        assert not outcome.failed
        return outcome.results
