"""A request with structured output waits in the engine until its grammar is compiled, and no step
waits for that.
"""

from collections.abc import Callable
from typing import Any

import pytest

from fairlead_runtime.engine.inbox import Guide
from fairlead_runtime.outputs import QueueTimeout, RequestView
from fairlead_runtime.request.sequence import Failure, FailureKind, FinishReason, Request
from fairlead_runtime.request.structured import StructuredOutputs
from fairlead_runtime.scheduling.plan import Work
from support.fake_engine import Clock, FakeRunner, request, rig, run

ASKED = {"regex": "[a-z]+"}


class Compiler:
    """Compiles when it is told to, as a thread would later. Its guides count their forks."""

    def __init__(self) -> None:
        self.waiting: list[tuple[object, Callable[[Guide | Failure], None]]] = []
        self.forks = 0

    def __call__(self, outputs: object, done: Callable[[Guide | Failure], None]) -> None:
        self.waiting.append((outputs, done))

    def finish(self, failure: Failure | None = None) -> None:
        outputs, done = self.waiting.pop(0)
        assert outputs == StructuredOutputs.of(ASKED)
        done(failure or self)

    def fork(self) -> Any:
        self.forks += 1
        return self.forks


def guided(name: str = "guided", **params: Any) -> Request:
    return request(name, structured_outputs=ASKED, **params)


def test_other_requests_run_while_a_grammar_is_compiled() -> None:
    compiler = Compiler()
    engine = rig(prepare=compiler)
    engine.submit(guided(n=2))
    engine.submit(request("free"))
    collected = run(engine)
    assert collected.finish == {("free", 0): [FinishReason.LENGTH]}
    views: list[RequestView] = []
    engine.inspect(lambda answer: views.extend(answer or []))
    engine.step()
    assert [view.waits_for for view in views] == ["its structured output is being compiled"]
    compiler.finish()
    collected = run(engine)
    assert collected.finish == {("guided", i): [FinishReason.LENGTH] for i in range(2)}
    assert compiler.forks == 2  # one for each choice


def test_each_sequence_has_its_own_guide() -> None:
    compiler = Compiler()
    seen: set[tuple[int, Any]] = set()

    def look(work: Work) -> None:
        seen.update((row.sequence.choice, row.sequence.guide) for row in work.rows)

    engine = rig(FakeRunner(look), prepare=compiler)
    engine.submit(guided(n=3))
    engine.step()
    compiler.finish()
    run(engine)
    assert seen == {(0, 1), (1, 2), (2, 3)}


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    compiler = Compiler()
    engine = rig(prepare=compiler)
    engine.submit(guided(n=2))
    engine.submit(request("free"))
    engine.step()
    failure = Failure("too complex", FailureKind.GRAMMAR)
    compiler.finish(failure)
    collected = run(engine)
    assert collected.failures["guided"] == failure
    assert collected.finish == {
        ("guided", 0): [FinishReason.ERROR],
        ("guided", 1): [FinishReason.ERROR],
        ("free", 0): [FinishReason.LENGTH],
    }


def test_a_request_can_be_aborted_while_its_grammar_is_compiled() -> None:
    compiler = Compiler()
    engine = rig(prepare=compiler)
    engine.submit(guided())
    engine.step()
    engine.abort("guided")
    collected = run(engine)
    assert collected.finish == {("guided", 0): [FinishReason.ABORT]}
    engine.submit(guided())  # the same id again, whose own grammar is not there yet
    engine.step()
    compiler.finish()
    run(engine, into=collected)
    assert collected.tokens == {}
    compiler.finish()
    run(engine, into=collected)
    assert collected.finish["guided", 0] == [FinishReason.ABORT, FinishReason.LENGTH]


def test_the_time_of_a_compilation_counts_towards_the_queue() -> None:
    clock, compiler = Clock(), Compiler()
    engine = rig(clock=clock, prepare=compiler, queue_timeout=10.0)
    engine.submit(guided())
    engine.step()
    assert (engine.snapshot().preparing, engine.snapshot().arriving) == (1, 0)
    clock.now += 11.0
    collected = run(engine)
    assert isinstance(collected.errors["guided"], QueueTimeout)
    compiler.finish()
    run(engine, into=collected)
    assert collected.tokens == {}
    assert (engine.snapshot().preparing, engine.snapshot().arriving) == (0, 0)


def test_an_engine_without_grammars_refuses_the_request() -> None:
    engine = rig()
    engine.submit(guided())
    collected = run(engine)
    assert collected.finish == {("guided", 0): [FinishReason.ERROR]}
    failure = Failure("this engine has no grammars", FailureKind.GRAMMAR)
    assert collected.failures["guided"] == failure


@pytest.mark.parametrize("failing", [True, False])
def test_an_engine_that_starts_over_forgets_what_it_compiles(failing: bool) -> None:
    compiler = Compiler()
    engine = rig(prepare=compiler)
    engine.submit(guided())
    engine.step()
    engine._recover(RuntimeError("the scheduler failed"))
    collected = run(engine)
    assert FinishReason.ERROR in collected.finish["guided", 0]
    compiler.finish(Failure("too late", FailureKind.GRAMMAR) if failing else None)
    run(engine, into=collected)
    assert collected.finish["guided", 0] == [FinishReason.ERROR]
