"""The steps between their commit and their tokens: one, or two where the device can be given a step
before the tokens of the last one are known.

Owns which of them are launched, and the way back: where one cannot be launched, or fails, it and
those behind it are computed one after another, as without launches. Decides nothing about rows.
"""

import logging
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fairlead_runtime.engine.isolate import Executor, Outcome, run_isolated
from fairlead_runtime.scheduling.plan import DeviceLostError, Result, Row, Work
from fairlead_runtime.scheduling.scheduler import Scheduler

log = logging.getLogger("fairlead.engine")

# Waits for a launched step: a Result for each of its rows that samples, by sequence id.
Collect = Callable[[], Mapping[int, Result]]


class Launcher(Protocol):
    """A device that takes a step without anybody waiting for the one before."""

    def launches(self, rows: abc.Sequence[Row]) -> bool:
        """Whether ``launch`` can take these rows: the device samples all that they sample."""
        ...

    def launch(self, work: Work) -> Collect:
        """Queue the step behind all that was queued before. Steps are collected in the order of
        their launches, and at most two are launched and not collected. Raises DeviceLostError, as
        the returned function does, when the device has ended.
        """
        ...


@dataclass(slots=True)
class _Step:
    work: Work
    collect: Collect | None  # None: it is not launched


class Pipeline:
    """The committed steps, oldest first. Without a ``launcher`` there is one, which runs when it is
    taken.
    """

    def __init__(self, launcher: Launcher | None) -> None:
        self._launcher = launcher
        self._steps: deque[_Step] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def tokens(self) -> int:
        """Tokens of all queued steps. The oldest step may still wait for earlier work, so health
        allows time for all of them.
        """
        return sum([row.count for step in self._steps for row in step.work.rows])

    @property
    def in_flight(self) -> bool:
        """Whether one step is in flight: another may follow."""
        return len(self._steps) == 1 and self._steps[0].collect is not None

    def takes(self, rows: abc.Sequence[Row]) -> bool:
        return self._launcher is not None and self._launcher.launches(rows)

    def add(self, work: Work, scheduler: Scheduler) -> bool:
        """Launch a committed step, whose copies are made, where that is possible: whether it is.
        Behind another step it must be of rows that ``takes`` holds for.
        """
        collect = None
        if self._launcher is not None and (self._steps or self._launcher.launches(work.rows)):
            try:
                collect = self._launcher.launch(work)
            except DeviceLostError:
                raise
            except Exception:
                log.exception("a step could not be launched: it is computed after the one before")
            else:
                scheduler.launch(work)
        self._steps.append(_Step(work, collect))
        return collect is not None

    def take(self, executor: Executor, scheduler: Scheduler) -> Iterator[Outcome]:
        """The outcome of the oldest step and, if one could not be launched or has failed, of those
        behind it. The scheduler must be updated with each before the next is asked for.
        """
        yield self._take(executor, scheduler)
        while self._steps and self._steps[0].collect is None:
            yield self._take(executor, scheduler)

    def _take(self, executor: Executor, scheduler: Scheduler) -> Outcome:
        step = self._steps.popleft()
        if step.collect is not None:
            try:
                return Outcome(step.work, step.collect(), ())
            except DeviceLostError:
                raise
            except Exception:
                log.exception("a launched step failed: it is computed again, as what follows it")
                self._ground()
                scheduler.recall()
        work = step.work.living()
        # Without a row nothing is left of a step whose sequences have all ended.
        return run_isolated(executor, work) if work is step.work or work.rows else _nothing(work)

    def _ground(self) -> None:
        """The steps that are left follow from tokens that are not known: their own do not count."""
        for step in self._steps:
            if step.collect is not None:
                with suppress(Exception):
                    step.collect()
                step.collect = None

    def clear(self) -> None:
        """Forget all steps: whoever asked for them has been answered otherwise."""
        self._steps.clear()


def _nothing(work: Work) -> Outcome:
    return Outcome(work, {}, ())
