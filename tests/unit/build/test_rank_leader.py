"""What the first rank hears of the others: their sizes, what they refuse, how they end."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fairlead_runtime.build.rank_leader import Ranks
from fairlead_runtime.build.rank_wire import (
    FROM_RANK,
    TO_RANK,
    Allocated,
    FromRank,
    Measured,
    ToRank,
)
from fairlead_runtime.child import process
from fairlead_runtime.child.frames import Channel
from fairlead_runtime.outputs import EngineDead
from fairlead_runtime.serving.wire import Refused
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig

SIZES = {"units": 8, "block_size": 4, "host_units": 2}
REFUSED = Refused("ConfigError", ("num_blocks", "8 blocks could not be allocated", "lower it"))
Script = Callable[[Channel[FromRank, ToRank]], None]


class FakeRank:
    """A rank in a thread: it runs ``script`` on its end of the socket, then ends with ``code``."""

    def __init__(self, connection: socket.socket, script: Script, code: int) -> None:
        self._code = code
        connection = connection.dup()

        def run() -> None:
            with connection:
                script(Channel(connection, FROM_RANK, TO_RANK))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join()
        return self._code

    def kill(self) -> None:
        raise AssertionError("it ends with its socket")


def until_the_end(channel: Channel[FromRank, ToRank]) -> None:
    while channel.receive() is not None:
        pass


def says(*messages: FromRank) -> Script:
    """Read the first message and say these, then wait for the socket's end."""

    def script(channel: Channel[FromRank, ToRank]) -> None:
        channel.receive()
        for message in messages:
            channel.send(message)
        until_the_end(channel)

    return script


def dies(channel: Channel[FromRank, ToRank]) -> None:
    channel.receive()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*scripts: Script, code: int = 0, lost: Any = None) -> Ranks:
        left = iter(scripts)
        monkeypatch.setattr(
            process, "spawn", lambda _command, end, *_: FakeRank(end, next(left), code)
        )
        config = EngineConfig(tensor_parallel=len(scripts) + 1)
        made.append(Ranks("model", config, threads=1, lost=lost))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_most_that_any_rank_has_measured_counts(start: Callable[..., Ranks]) -> None:
    split = start(
        says(Measured({"weights": 7, "activations": 3})),
        says(Measured({"weights": 5, "activations": 9})),
        says(Measured({"weights": 6, "activations": 1})),
    )
    assert split.sync({"weights": 6, "activations": 4}) == {"weights": 7, "activations": 9}


@pytest.mark.parametrize("reason", ["", "the limit of locked memory is 8 MiB"])
def test_memory_that_one_rank_cannot_pin_is_told(reason: str, start: Callable[..., Ranks]) -> None:
    split = start(*(says(Allocated(words)) for words in ("", reason, "")))
    assert split.serve(**SIZES) == (f"rank 2: {reason}" if reason else "")


def test_a_refusal_is_raised_whatever_was_waited_for(start: Callable[..., Ranks]) -> None:
    split = start(says(REFUSED))
    with pytest.raises(ConfigError, match="8 blocks could not be allocated") as refused:
        split.sync({"weights": 1})
    assert (refused.value.field, refused.value.hint) == ("num_blocks", "lower it")
    assert split.error is refused.value


def test_a_refusal_reaches_a_process_that_waits_for_no_message(
    start: Callable[..., Ranks],
) -> None:
    told: list[Exception] = []
    heard = threading.Event()

    def lost(error: Exception) -> None:
        told.append(error)
        heard.set()

    split = start(says(REFUSED), lost=lost)
    assert heard.wait(60)
    assert isinstance(told[0], ConfigError)
    assert told == [split.error]


def test_what_a_rank_has_said_is_a_better_reason_than_its_end(
    start: Callable[..., Ranks],
) -> None:
    def says_and_dies(channel: Channel[FromRank, ToRank]) -> None:
        channel.receive()
        channel.send(REFUSED)

    split = start(says_and_dies, code=4)
    with pytest.raises(ConfigError, match="could not be allocated"):
        split.sync({"weights": 1})


def test_a_rank_that_dies_is_named_with_how(start: Callable[..., Ranks]) -> None:
    split = start(dies, code=-9)
    for _ in range(2):
        with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
            split.sync({"weights": 1})
    with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
        split.serve(**SIZES)


def test_the_end_of_ranks_that_are_closed_is_no_loss(start: Callable[..., Ranks]) -> None:
    told: list[Exception] = []
    split = start(until_the_end, until_the_end, until_the_end, lost=told.append)
    split.close()
    split.close()
    assert told == []
    assert split.error is None
