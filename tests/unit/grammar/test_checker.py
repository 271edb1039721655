"""Grammars are compiled in a child that hostile input can exhaust, crash or hang, and nothing else
notices.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.grammar import checker as module
from fairlead_runtime.grammar.checker import Checker, CheckerBusy
from fairlead_runtime.grammar.child import MAX_FORKS
from fairlead_runtime.grammar.compile import CheckLimits
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.request.structured import StructuredOutputs
from support.grammars import HOSTILE, LARGE, facts

WITHIN = 300.0  # seconds; a limit for what hangs, long enough for a busy machine
PATIENT = CheckLimits(seconds=WITHIN)  # processor time alone decides
SHORT = CheckLimits(seconds=WITHIN, cpu_seconds=1)
SLOW = ("counts of counts", "rules of counts")
ANSWER = 60.0  # seconds; for a child that only has to start


@pytest.fixture(scope="module")
def shared() -> Iterator[Checker]:
    checker = Checker(facts(), limits=PATIENT, max_wait=WITHIN)
    yield checker
    checker.close()


@pytest.fixture
def checker() -> Iterator[Checker]:
    checker = Checker(facts(), limits=SHORT, max_wait=WITHIN)
    yield checker
    checker.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_with_a_reason(name: str, shared: Checker) -> None:
    outputs = StructuredOutputs.of(HOSTILE[name])
    with pytest.raises(RequestError) as refused:
        shared.check_now(outputs)
    assert refused.value.param == f"structured_outputs.{outputs.kind}"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(SECRET", "unclosed group"),
        ("regex", "(?P<SECRET>a)(?P<SECRET>b)", "duplicate capture group name"),
        ("grammar", "start: SECRET", "unknown name"),
        ("grammar", 'start: "SECRET', "lexer error"),
        ("grammar", "root ::= SECRET", "not found"),
        ("grammar", 'root ::= "SECRET', "Unexpected end of input"),
        ("json", '{"type": "SECRET"}', "Invalid type"),
        ("json", '{"type": "\\u0053ECRET"}', "Invalid type"),
        ("json", '{"format": "SECRET", "type": "string"}', "Unknown format"),
        ("json", '{"$ref": "#/SECRET"}', "does not exist"),
        ("json", '{"required": "SECRET", "type": "object"}', "Expected array for 'required'"),
        ("json", '{"SECRET": 1, "not": {}, "uniqueItems": true}', '["not", "uniqueItems"]'),
        ("json", '{"$schema": "https://SECRET"}', "is not present"),
    ],
)
def test_a_refusal_says_why_and_quotes_nothing(
    kind: str, source: str, reason: str, shared: Checker
) -> None:
    with pytest.raises(RequestError) as refused:
        shared.check_now(StructuredOutputs.of({kind: source}))
    assert reason in str(refused.value)
    assert "ECRET" not in str(refused.value)


@pytest.mark.parametrize("name", LARGE)
def test_what_is_only_large_is_compiled(name: str, shared: Checker) -> None:
    checked = shared.check_now(StructuredOutputs.of(LARGE[name]))
    assert checked.kind == next(iter(LARGE[name]))
    assert 0 < checked.compiled_bytes < 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("limits", "regex", "reason"),
    [
        (CheckLimits(seconds=WITHIN, cpu_seconds=1), "a{200000}", "takes too long"),  # 2 s alone
        (
            CheckLimits(seconds=WITHIN, cpu_seconds=600, memory=16 * 1024 * 1024),
            "(((a{1000}){1000}){1000}){1000}",
            "too much memory",
        ),
    ],
)
def test_each_limit_of_the_child_holds_alone(limits: CheckLimits, regex: str, reason: str) -> None:
    checker = Checker(facts(), limits=limits, max_wait=WITHIN)
    with pytest.raises(RequestError, match=reason):
        checker.check_now(StructuredOutputs(regex=regex))
    checker.close()


def test_a_check_that_lacks_the_processor_is_no_verdict() -> None:
    checker = Checker(facts(), limits=CheckLimits(seconds=0.0), max_wait=WITHIN)
    for _ in range(2):
        with pytest.raises(CheckerBusy, match="processor is busy: retry"):
            asyncio.run(checker.check(StructuredOutputs(regex="a{100000}")))
    counts = checker.counts
    assert (counts.compilations, counts.refusals, counts.hits, counts.busy) == (0, 0, 0, 2)
    checker.close()


def test_the_limits_answer_within_five_seconds() -> None:
    assert module.DEFAULT_LIMITS.seconds < module.MAX_WAIT < 5


def test_a_verdict_is_remembered_by_hash(checker: Checker) -> None:
    for _ in range(3):
        checker.check_now(StructuredOutputs(regex="[0-9]+"))
        with pytest.raises(RequestError):
            checker.check_now(StructuredOutputs(regex="["))
    checker.check_now(StructuredOutputs(json={"type": "integer"}))
    checker.check_now(StructuredOutputs(json='{ "type": "integer" }'))
    counts = checker.counts
    assert (counts.compilations, counts.refusals, counts.hits) == (3, 1, 5)
    assert counts.seconds > 0


def test_the_cache_forgets_the_verdict_that_was_used_longest_ago(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        checker.check_now(StructuredOutputs(regex=regex))
    assert (checker.counts.compilations, checker.counts.hits) == (4, 2)


def test_the_cache_forgets_by_the_texts_that_verdicts_hold(
    shared: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_TEXT", 2 * len('{"const":1}'))
    before = shared.counts.compilations
    for number in (1, 2, 1, 3, 1, 2):
        shared.check_now(StructuredOutputs(json={"const": number}))
    assert shared.counts.compilations == before + 4


@pytest.mark.parametrize(
    ("value", "enforced"),
    [
        (
            {"json": {"oneOf": [{"const": "a"}, {"const": 2}]}},
            '{"anyOf":[{"const":"a"},{"const":2}]}',
        ),
        ({"grammar": 'root ::= "a"'}, 'start: "a"'),
        ({"regex": "a"}, ""),
    ],
)
def test_the_engine_gets_what_is_enforced_from_the_check(
    value: dict[str, Any], enforced: str, shared: Checker
) -> None:
    for _ in range(2):  # also from a verdict that is known
        checked = shared.check_now(StructuredOutputs.of(value))
        assert enforced in checked.enforced
        assert bool(enforced) == bool(checked.enforced)
        assert checked.digest == StructuredOutputs.of(value).digest


@pytest.mark.parametrize(("rest", "lines"), [('"b"', 1), ('"c"', 0)])
def test_a_slower_reading_of_a_grammar_is_logged(
    rest: str, lines: int, shared: Checker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fairlead.grammar"):
        shared.check_now(StructuredOutputs(grammar=f"root ::= run {rest}\nrun ::= [ab]*"))
    assert (
        caplog.messages
        == ["a grammar is read by characters, whose masks take longer: a run gives characters back"]
        * lines
    )


def test_equal_questions_are_asked_once(checker: Checker) -> None:
    futures = [checker.ask(StructuredOutputs(regex="[0-9]+")) for _ in range(4)]
    assert [future.result() for future in futures] == [futures[0].result()] * 4
    assert checker.counts.compilations == 1


def test_a_model_without_end_of_sequence_has_no_structured_output() -> None:
    checker = Checker(None)
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        checker.check_now(StructuredOutputs(regex="a"))


def test_the_event_loop_runs_while_hostile_grammars_are_compiled(checker: Checker) -> None:
    """Counted: the loop turns at least as often while it waits as it would take to serve others."""

    async def ask() -> int:
        asked = asyncio.gather(
            *(checker.check(StructuredOutputs.of(HOSTILE[name])) for name in SLOW),
            return_exceptions=True,
        )
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert {type(answer) for answer in await asked} == {RequestError}
        return turns

    assert asyncio.run(ask()) > 1000


def stand_in(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A command that runs in place of the child."""
    program = tmp_path / "child.py"
    program.write_text(textwrap.dedent(body))
    return (sys.executable, str(program))


def test_too_many_waiting_checks_are_refused(tmp_path: Path) -> None:
    silent = stand_in(tmp_path, "import sys; sys.stdin.read()")
    checker = Checker(facts(), command=silent, max_wait=0.01)
    waiting = [
        checker.ask(StructuredOutputs(regex=f"a{number}")) for number in range(module.MAX_WAITING)
    ]
    with pytest.raises(CheckerBusy, match="retry"):
        checker.ask(StructuredOutputs(regex="b"))
    for asked in ("a0", "b"):
        with pytest.raises(CheckerBusy, match="retry"):
            asyncio.run(checker.check(StructuredOutputs(regex=asked)))
    assert checker.counts.busy == 2
    assert not any(future.done() for future in waiting)
    checker.close()
    for future in waiting:
        with pytest.raises(CheckerBusy, match="ended"):
            future.result()


@pytest.fixture
def selective(tmp_path: Path) -> Iterator[Checker]:
    """Its child answers what is not slow, and the slow ones never."""
    command = stand_in(
        tmp_path,
        """
        from fairlead_runtime.child.frames import Channel
        from fairlead_runtime.child.life import parent_socket
        from fairlead_runtime.grammar.child import ANSWER, QUESTION, Checked

        channel = Channel(parent_socket(), ANSWER, QUESTION)
        channel.receive()
        while (message := channel.receive()) is not None:
            if "slow" not in message[1].outputs:
                channel.send((message[0], Checked("", size=1)))
        """,
    )
    checker = Checker(facts(), command=command, max_wait=WITHIN)
    yield checker
    checker.close()


def test_a_tenant_with_many_slow_grammars_keeps_nobody_else_waiting(selective: Checker) -> None:
    slow = [
        selective.ask(StructuredOutputs(regex=f"slow{number}"), "a")
        for number in range(module.MAX_WAITING)
    ]
    with pytest.raises(CheckerBusy):
        selective.ask(StructuredOutputs(regex="slow"), "a")
    for number in range(3):
        assert selective.ask(StructuredOutputs(regex=f"b{number}"), "b").result(ANSWER)
    assert [future.done() for future in slow] == [False] * (module.MAX_WAITING - 1) + [True]
    assert isinstance(slow[-1].exception(), CheckerBusy)


def test_tenants_share_the_places_evenly(selective: Checker) -> None:
    def ask(tenant: str, number: int) -> bool:
        with contextlib.suppress(CheckerBusy):
            selective.ask(StructuredOutputs(regex=f"slow{number}"), tenant)
            return True
        return False

    taken = [sum(ask(tenant, number) for number in range(40)) for tenant in "abc"]
    assert taken == [32, 16, 10]
    waiting = [tenant for tenant, _ in selective._checks]
    assert sorted(map(waiting.count, "abc")) == [10, 11, 11]
    assert len(selective._running) == MAX_FORKS


def test_without_tenants_a_caller_may_have_the_whole_child(selective: Checker) -> None:
    for name, running in (("a", 1), ("", MAX_FORKS)):
        for number in range(3):
            selective.ask(StructuredOutputs(regex=f"slow{name}{number}"), name)
        assert len(selective._running) == running


def test_one_verdict_answers_all_tenants_that_wait_for_it(selective: Checker) -> None:
    selective.ask(StructuredOutputs(regex="slow"), "a")
    behind = selective.ask(StructuredOutputs(regex="quick"), "a")
    assert not behind.done()
    verdict = selective.ask(StructuredOutputs(regex="quick"), "b").result(ANSWER)
    assert behind.result(ANSWER) == verdict
    assert (selective.counts.compilations, selective.pending) == (1, 1)


def test_a_check_that_another_tenant_has_answered_waits_no_longer(selective: Checker) -> None:
    selective.ask(StructuredOutputs(regex="slow"), "a")
    behind = [selective.ask(StructuredOutputs(regex=f"quick{i}"), "a") for i in range(3)]
    last = selective.ask(StructuredOutputs(regex="slow-last"), "a")
    for i, future in enumerate(behind):
        selective.ask(StructuredOutputs(regex=f"quick{i}"), "b").result(ANSWER)
        assert future.result(ANSWER)
    # One check of "a" waits: another tenant's newcomer may not take its place.
    assert selective._waiting.make_room("c") is None
    assert not last.done()


def test_a_check_that_nobody_waits_for_any_more_gives_up_its_place(selective: Checker) -> None:
    running = selective.ask(StructuredOutputs(regex="slow"), "a")
    selective._max_wait = 0.01

    async def wait() -> None:
        asked = [selective.check(StructuredOutputs(regex=f"slow{i % 2}"), "a") for i in range(4)]
        assert {
            type(answer) for answer in await asyncio.gather(*asked, return_exceptions=True)
        } == {CheckerBusy}

    other = selective.ask(StructuredOutputs(regex="slow0"), "a")
    asyncio.run(wait())
    assert selective.pending == 2
    assert not running.done()
    assert not other.done()


def test_a_child_that_dies_is_replaced(checker: Checker) -> None:
    checker.check_now(StructuredOutputs(regex="a"))
    child = _pid(checker)
    os.kill(child, signal.SIGKILL)
    asked = StructuredOutputs(regex="b")
    while checker.counts.compilations < 2:
        with contextlib.suppress(CheckerBusy):  # before the end was noticed
            checker.check_now(asked)
    assert _pid(checker) != child


def test_closing_ends_the_child_and_what_it_runs(checker: Checker) -> None:
    checker.check_now(StructuredOutputs(regex="a"))
    child = _pid(checker)
    running = checker.ask(StructuredOutputs.of(HOSTILE["counts of counts"]))
    checker.close()
    # The child's end is noticed after that of what it runs.
    assert running.exception(WITHIN) is None or isinstance(running.exception(), CheckerBusy)
    assert not any(
        f"PPid:\t{child}\n" in (path / "status").read_text()
        for path in Path("/proc").glob("[0-9]*")
        if (path / "status").exists()
    )


def _pid(checker: Checker) -> int:
    assert checker._program is not None
    pid = checker._program.pid
    assert pid is not None
    return pid
