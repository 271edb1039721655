"""A child program: whatever it sends and however it ends, its parent notices and keeps nothing."""

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.child.forks import Ending, Forks
from fairlead_runtime.child.frames import Channel, Codec
from fairlead_runtime.child.process import Child
from fairlead_runtime.child.program import SECRETS, ChildLost, ChildProgram

WITHIN = 300.0  # seconds; a limit for what hangs
CODEC = Codec[tuple[int, str]](tuple[int, str])
SENT = len(CODEC.encode((0, "set up")) + CODEC.encode((1, "first")))
# Answers on the standard input, which is the socket, after the set-up and the question have come,
# which may be one after the other.
PROGRAM = f"""
import os
rest = {SENT}
while rest:
    rest -= len(os.read(0, rest))
{{answer}}
os.read(0, 1 << 16)
"""
GOOD = CODEC.encode((1, "yes"))


def program(answer: bytes, **limits: Any) -> ChildProgram[str, str]:
    codec: Codec[tuple[int, str]] = Codec(tuple[int, str], **limits)
    command = (sys.executable, "-c", PROGRAM.format(answer=f"os.write(0, {answer!r})"))
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


def test_no_secret_of_the_environment_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "OTHER_NAME"):
        monkeypatch.setenv(name, "secret")
    encode = "k = ','.join(os.environ).encode(); m = os.environ.get('OTHER_NAME', '').encode()"
    codec: Codec[tuple[int, str]] = Codec(tuple[int, str])
    wanted = codec.encode((1, "yes"))
    check = f"{encode}; os.write(0, {wanted!r} if m == b'secret' and not any(s.encode() in k for s "
    check += f"in {sorted(SECRETS)!r}) else b'')"
    asked: ChildProgram[str, str] = ChildProgram(
        (sys.executable, "-c", PROGRAM.format(answer=check)), "set up", codec, codec
    )
    assert asked.ask("first").result(WITHIN) == "yes"
    asked.close()


class Fails:
    """Work in a fork that raises ``error``; its ending comes back as the answer."""

    seconds, cpu_seconds, memory = WITHIN, 60, 1 << 28


@pytest.mark.parametrize(
    ("error", "ending"), [(RuntimeError, Ending.FAILED), (MemoryError, Ending.CRASHED)]
)
def test_a_fork_that_raises_is_told_from_one_without_memory(
    error: type[Exception], ending: Ending
) -> None:
    codec: Codec[tuple[int, str]] = Codec(tuple[int, str])

    def work(_: str) -> str:
        raise error

    def finish(answer: str | Ending, _: float) -> str:
        return answer.value if isinstance(answer, Ending) else answer

    forks = Forks(Fails(), codec, work, finish)
    ours, theirs = socket.socketpair()
    asking = Channel(ours, codec, codec)
    asking.send((1, "question"))
    serving = threading.Thread(target=forks.serve, args=(Channel(theirs, codec, codec),))
    serving.start()
    assert asking.receive() == (1, ending.value)
    ours.close()
    serving.join(WITHIN)
    theirs.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x00\x00\x00\x04nope", "sent what is no message: unreadable"),
        (b"\xff\xff\xff\xff", "sent what is no message: a frame of 4294967295 bytes"),
        (GOOD[:-1] + b"\xff", "sent what is no message: unreadable"),
        (CODEC.encode((7, "yes")), "an answer to question 7, which nobody asked"),
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
