"""The parts of a start: their seconds, their sum, their words, and who tells of them."""

import logging
from typing import Any

import pytest

from fairlead_runtime.processes import http_process
from fairlead_runtime.serving import wire
from fairlead_runtime.serving.startup import TELL_SECONDS, Startup, Teller
from fairlead_runtime.settings.startup_parts import PARTS
from support.fake_engine import Clock

GIB = 2**30


def spent(startup: Startup) -> dict[str, float]:
    return {part: value for part, value in startup.seconds.items() if value}


def test_each_part_has_its_own_seconds_and_their_sum_is_the_whole() -> None:
    clock = Clock()
    startup = Startup(4.0, now=clock)
    clock.now += 1.0
    startup.reach("weights")
    clock.now += 2.0
    startup.reach("kernels")
    clock.now += 3.0
    startup.reach("self_test")
    clock.now += 0.5
    startup.reach("kernels", 1, 30)
    clock.now += 0.25
    assert spent(startup) == {"imports": 5.0, "weights": 2.0, "kernels": 3.25, "self_test": 0.5}
    startup.reach("kernels", 2, 30)
    assert spent(startup)["kernels"] == 3.25, "further in the same part"
    startup.end()
    clock.now += 100.0
    startup.reach("profile")
    startup.end()
    assert spent(startup) == {"imports": 5.0, "weights": 2.0, "kernels": 3.25, "self_test": 0.5}
    assert tuple(startup.seconds) == PARTS
    assert sum(startup.seconds.values()) == startup.elapsed == 10.75


def test_a_part_begins_when_the_other_process_says_and_not_when_it_is_heard() -> None:
    clock = Clock()
    startup = Startup(now=clock)
    began = clock.now
    clock.now += 9.0
    startup.reach("weights", at=began + 3.0)
    assert spent(startup) == {"imports": 3.0, "weights": 6.0}
    startup.reach("kernels", at=began + 1.0)
    assert spent(startup)["imports"] == 3.0, "no part takes less than no time"


def test_the_line_says_the_part_how_much_of_it_and_its_seconds() -> None:
    clock = Clock()
    startup = Startup(2.0, now=clock)
    assert startup.line() == "Starting: imports 2.0 s"
    startup.reach("weights", GIB // 4, GIB)
    clock.now += 1.5
    assert startup.line() == "Starting: weights, 0.25 of 1.00 GiB, 1.5 s"
    startup.reach("self_test", 7, 30)
    assert startup.line() == "Starting: self-test, layer 7 of 30, 0.0 s"
    startup.reach("profile")
    assert startup.line() == "Starting: profile 0.0 s", "what another part has done is gone"
    startup.end()
    assert startup.summary() == "imports 2.0 s, weights 1.5 s"


def test_what_debug_startup_shows() -> None:
    clock = Clock()
    startup = Startup(2.0, now=clock)
    startup.reach("kernels", 31, 30)
    clock.now += 1.0
    seconds = dict.fromkeys(PARTS, 0.0)
    assert startup.as_dict == {
        "ready": False,
        "phase": "kernels",
        "done": 30,
        "total": 30,
        "seconds": {**seconds, "imports": 2.0, "kernels": 1.0},
        "elapsed": 3.0,
        "uptime": 3.0,
    }
    startup.end()
    clock.now += 5.0
    ended = startup.as_dict
    assert (ended["ready"], ended["phase"], ended["total"]) == (True, "", 0)
    assert (ended["elapsed"], ended["uptime"]) == (3.0, 8.0)


def test_a_part_is_told_at_once_and_how_far_it_is_ten_times_a_second() -> None:
    clock = Clock()
    told: list[wire.Progress] = []
    tell = Teller(told.append, now=clock)
    tell("weights")
    for done in range(5):
        tell("weights", done, 5)
        clock.now += TELL_SECONDS / 2
    tell("kernels", 0, 30)
    assert [(x.part, x.done) for x in told] == [
        ("weights", 0),
        ("weights", 2),
        ("weights", 4),
        ("kernels", 0),
    ]
    assert told[-1].at == clock.now


def test_an_engine_whose_other_process_is_gone_goes_on() -> None:
    def gone(_: Any) -> None:
        raise BrokenPipeError

    Teller(gone)("weights")


def test_the_log_has_one_line_for_each_part(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    startup = Startup(1.0, now=clock)
    with caplog.at_level(logging.INFO):
        for part in ("weights", "kernels", "self_test", "kernels", "self_test", "profile"):
            clock.now += 1.0
            http_process._reached(startup, wire.Progress(part, 0, 0, clock.now))
            clock.now += 1.0
            http_process._reached(startup, wire.Progress(part, 1, 2, clock.now))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "starting: weights",
        "starting: kernels",
        "starting: self_test",
        "starting: profile",
    ]
