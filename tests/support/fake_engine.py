"""An engine with a runner that needs no model: a row's sample is a function of its own tokens.

Equal requests get equal tokens in every run and every batch, so a test can compare runs exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead_runtime.engine.engine import Bounds, Engine, Prepare
from fairlead_runtime.engine.observer import Observer
from fairlead_runtime.engine.progress import NO_TIMES, StepTimes
from fairlead_runtime.outputs import ChoiceEvent
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.seeds import mix64
from fairlead_runtime.request.sequence import Failure, FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling.plan import Limits, Result, Row, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.groups import LayerGroup
from fairlead_runtime.sizing.traffic import Bound

VOCABULARY = 1000
FULL = (LayerGroup(0, None, (0, 1)),)
MIXED = (LayerGroup(0, None, (0,)), LayerGroup(1, 8, (1,)))


class Clock:
    """Virtual seconds, which only the test and FakeRunner's ``step_time`` advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def token_after(request: Request, choice: int, tokens: Sequence[int]) -> int:
    """The token after these; depends only on them, the choice, the seed and the position."""
    value = request.seed ^ choice << 32 ^ len(tokens) << 40
    for token in (tokens[0], *tokens[-4:]):
        value = mix64(value ^ token)
    return value % (VOCABULARY - 1) + 1


class FakeRunner:
    """Calls ``fault(work)``, which may raise, before every attempt, reruns included."""

    def __init__(
        self, fault: Callable[[Work], None] | None = None, clock: Clock | None = None
    ) -> None:
        self.fault = fault
        self.clock = clock
        self.step_time = 0.0
        self.attempts = 0
        self.copied: list[int] = []  # steps whose copies were made

    def copy(self, work: Work) -> None:
        self.copied.append(work.step)

    def execute(self, work: Work) -> Mapping[int, Result]:
        self.attempts += 1
        if self.clock is not None:
            self.clock.now += self.step_time
        if self.fault is not None:
            self.fault(work)
        return {
            row.sequence.id: Result(
                token_after(row.sequence.request, row.sequence.choice, row.sequence.tokens)
            )
            for row in work.rows
            if row.samples
        }


class LaunchingRunner(FakeRunner):
    """Also launches steps, but for those that sample for a request with bad words: it stands for
    what the host samples. As a GPU does, it appends tokens itself, and computes no step in between.
    ``fault(work)`` may raise in a launch too, ``refuse(work)`` only there, and ``lost(work)`` when
    one is collected.
    """

    def __init__(
        self,
        fault: Callable[[Work], None] | None = None,
        clock: Clock | None = None,
        *,
        refuse: Callable[[Work], None] | None = None,
        lost: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__(fault, clock)
        self.refuse = refuse
        self.lost = lost
        self.log: list[tuple[str, int]] = []  # what was done, with the step
        self.flying: list[int] = []  # steps that are launched and not collected
        self.launched: list[Row] = []
        self._texts: dict[int, list[int]] = {}  # by sequence, as the device has them
        self._reached: dict[int, int] = {}  # by sequence, how many of its tokens it has computed

    def copy(self, work: Work) -> None:
        copies = work.offload or work.restore or work.copies
        assert not (copies and self.flying), "blocks are copied while a step is in flight"
        super().copy(work)

    def launches(self, rows: Sequence[Row]) -> bool:
        by_host = any(row.samples and row.sequence.request.params.bad_words for row in rows)
        return bool(rows) and not by_host

    def launch(self, work: Work) -> Callable[[], Mapping[int, Result]]:
        for check in (self.fault, self.refuse):
            if check is not None:
                check(work)
        assert len(self.flying) < 2, "a third step is in flight"
        self.log.append(("launch", work.step))
        self.flying.append(work.step)
        self.launched += work.rows
        results = {}
        for row in work.rows:
            sequence, end = row.sequence, row.start + row.count
            reached = self._reached[sequence.id] if sequence.steps_in_flight else sequence.computed
            assert reached == row.start, "the device has computed other tokens before"
            self._reached[sequence.id] = end
            text = self._texts[sequence.id] if sequence.steps_in_flight else list(sequence.tokens)
            self._texts[sequence.id] = text
            assert len(text) >= end, "the device does not have the tokens before"
            if row.samples:
                assert len(text) == end, "a row samples before its last token"
                token = token_after(sequence.request, sequence.choice, text)
                self._texts[sequence.id] = [*text, token]
                results[sequence.id] = Result(token)

        def collect() -> Mapping[int, Result]:
            assert self.flying.pop(0) == work.step, "collected out of order"
            self.log.append(("collect", work.step))
            if self.lost is not None:
                self.lost(work)
            return results

        return collect

    def execute(self, work: Work) -> Mapping[int, Result]:
        assert not self.flying, "a step runs while another is in flight"
        self.log.append(("execute", work.step))
        return super().execute(work)


def limits(**changes: Any) -> Limits:
    defaults: dict[str, Any] = {
        "policy": "fifo",
        "max_batch_tokens": 32,
        "max_requests": 8,
        "safety_margin": 0.1,
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 256,
    }
    return Limits(**(defaults | changes))


def rig(
    runner: FakeRunner | None = None,
    clock: Callable[[], float] | None = None,
    *,
    groups: Sequence[LayerGroup] = FULL,
    max_queue: int = 1024,
    queue_timeout: float = 60.0,
    waiting: Bound | None = None,
    observer: Observer | None = None,
    step_times: StepTimes = NO_TIMES,
    prepare: Prepare | None = None,
    **changes: Any,
) -> Engine:
    bounds = limits(**changes)
    return Engine(
        lambda: Scheduler(bounds, groups),
        runner or FakeRunner(),
        Bounds.of(bounds, max_queue=max_queue, queue_timeout=queue_timeout, waiting=waiting),
        now=clock or Clock(),
        observer=observer,
        step_times=step_times,
        prepare=prepare,
        launcher=runner if isinstance(runner, LaunchingRunner) else None,
    )


def request(name: str, prompt: int = 10, max_tokens: int = 6, **params: Any) -> Request:
    """A request with a prompt of ``prompt`` tokens that depend on its name."""
    start = mix64(sum(map(ord, name)) * 1009 + len(name))
    tokens = tuple(mix64(start + i) % (VOCABULARY - 1) + 1 for i in range(prompt))
    return Request(
        name, tokens, SamplingParams(max_tokens=max_tokens, **params), max_tokens, seed=7
    )


class Collected:
    """All events of an engine, by request and choice."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.finish: dict[tuple[str, int], list[FinishReason]] = {}
        self.errors: dict[str, Exception] = {}
        self.failures: dict[str, Failure | None] = {}

    def take(self, events: Sequence[ChoiceEvent]) -> None:
        for event in events:
            key = (event.request_id, event.choice)
            if event.token is not None:
                self.tokens.setdefault(key, []).append(event.token)
            if event.logprobs is not None:
                self.logprobs.setdefault(key, []).append(event.logprobs)
            if event.error is not None:
                self.errors[event.request_id] = event.error
            elif event.finish is not None:
                self.finish.setdefault(key, []).append(event.finish)
                self.failures[event.request_id] = event.failure


def run(engine: Engine, most: int = 10_000, into: Collected | None = None) -> Collected:
    """Step until the engine has no work."""
    collected = into or Collected()
    for _ in range(most):
        collected.take(engine.step())
        if engine.idle:
            return collected
    raise AssertionError(f"not done after {most} steps")
