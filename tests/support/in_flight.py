"""A scheduler and a runner whose steps are launched by hand, two of them in flight at most."""

from collections.abc import Callable, Mapping
from typing import Any

from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.grammar.guides import Guides
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.scheduling.plan import Result, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from support.engine_rig import Rig, Setting

Collect = Callable[[], Mapping[int, Result]]


class InFlight:
    """``guides`` are compiled for requests that ask for a structured output."""

    def __init__(
        self, engine: Rig, setting: Setting, *asked: Request, guides: Guides | None = None
    ) -> None:
        self.scheduler = Scheduler(engine.limits(setting), engine.groups, b"rig")
        self.runner: ModelRunner = engine.runner(setting, guides)
        self.flying: list[tuple[Work, Collect]] = []
        for request in asked:
            for sequence in self.scheduler.add(request):
                if guides is not None and request.params.guided is not None:
                    sequence.guide = guides.compile(request.params.guided).fork()

    def launch(self) -> Work | None:
        """Start the next step, ahead of one that is in flight; None where there is none."""
        plan = self.scheduler.plan_ahead() if self.flying else self.scheduler.plan()
        if plan is None:
            return None
        work = self.scheduler.commit(plan)
        assert self.runner.launches(work.rows)
        self.flying.append((work, self.runner.launch(work)))
        self.scheduler.launch(work)
        return work

    def collect(self) -> list[Any]:
        work, collect = self.flying.pop(0)
        return self.scheduler.update(work, collect())

    def finish(self) -> list[Any]:
        """The events of all steps that are left."""
        events: list[Any] = []
        while self.scheduler.has_work:
            if len(self.flying) == 2 or self.launch() is None:
                events += self.collect()
        return events
