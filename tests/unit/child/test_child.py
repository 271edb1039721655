"""A child program: whatever it sends and however it ends, its parent notices and keeps nothing."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.child.frames import Codec
from fairlead_runtime.child.process import Child
from fairlead_runtime.child.program import ChildLost, ChildProgram

WITHIN = 300.0  # seconds; a limit for what hangs
# Answers from the standard input, which is the socket, after the question has come.
PROGRAM = "import os; os.read(0, 1 << 16); os.write(0, {answer!r}); os.read(0, 1 << 16)"
GOOD = Codec[tuple[int, str]](tuple[int, str]).encode((1, "yes"))


def program(answer: bytes, **limits: Any) -> ChildProgram[str, str]:
    codec: Codec[tuple[int, str]] = Codec(tuple[int, str], **limits)
    command = (sys.executable, "-c", PROGRAM.format(answer=answer))
    return ChildProgram(command, "set up", codec, codec)


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_an_answer_comes_back_and_nothing_is_left_of_the_program() -> None:
    before = descriptors()
    asked = program(GOOD)
    pending = asked.ask("first")
    pid = asked.pid
    assert pending.result(WITHIN) == "yes"
    pending = asked.ask("second")
    asked.close()
    assert isinstance(pending.exception(WITHIN), ChildLost)
    assert not Path(f"/proc/{pid}").exists(), "it is left, or as a zombie"
    assert descriptors() == before


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x00\x00\x00\x04nope", "sent what is no message: unreadable"),
        (b"\xff\xff\xff\xff", "sent what is no message: a frame of 4294967295 bytes"),
        (GOOD[:-1] + b"\xff", "sent what is no message: unreadable"),
    ],
)
def test_what_is_no_message_ends_the_program(
    answer: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    asked = program(answer, max_frame=1024)
    assert isinstance(asked.ask("first").exception(WITHIN), ChildLost)
    assert asked.pid is None
    assert reason in caplog.text
    assert descriptors() == before


def test_an_answer_that_is_cut_off_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", f"import os; os.write(0, {GOOD[:-1]!r}); os._exit(3)")
    codec: Codec[tuple[int, str]] = Codec(tuple[int, str])
    asked: ChildProgram[str, str] = ChildProgram(command, "set up", codec, codec)
    assert isinstance(asked.ask("first").exception(WITHIN), ChildLost)
    assert "ended with exit code 3" in caplog.text


def test_a_program_that_does_not_end_with_its_connection_is_killed() -> None:
    with Child((sys.executable, "-c", "import threading; threading.Event().wait()")) as child:
        child.hang_up()
        assert child.reap(0.1).startswith("was ended by SIGKILL")
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
