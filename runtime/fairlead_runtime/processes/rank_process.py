"""The process of a rank from 1 on: it loads its shard of the model and makes every step of rank 0.

Owns this process's life. However its leader ends, this one ends too: the kernel ends it with the
thread that started it, and a thread of its own sees the end of the socket, in the middle of a step
too. It schedules and samples nothing.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fairlead_runtime.build.rank_wire import (
    FROM_RANK,
    TO_RANK,
    Allocated,
    FromRank,
    Loaded,
    Measured,
    Sizes,
    Start,
    ToRank,
)
from fairlead_runtime.child.frames import Channel, FrameError, Message
from fairlead_runtime.child.life import FAILED, end_with, leave, parent_socket
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.processes import logs
from fairlead_runtime.processes.lean_imports import leave_compiler_out
from fairlead_runtime.serving.wire import Refused
from fairlead_runtime.settings.engine_config import ConfigError

if TYPE_CHECKING:
    from fairlead_runtime.build.load_rank import LoadedRank
    from fairlead_runtime.device.memory.storage import CacheStorage
    from fairlead_runtime.device.model.rank_group import RankGroup

log = logging.getLogger("fairlead.rank")

MessageT = TypeVar("MessageT", bound=Message)
WORDS_SECONDS = 1.0  # for the leader to hear how another rank has ended


class _Leader:
    """The socket to rank 0. Messages are read as they come, so that its end is seen at once."""

    def __init__(self, channel: Channel[FromRank, ToRank]) -> None:
        self.send = channel.send
        self._channel = channel
        self._messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._messages.put(message)
        except FrameError:
            log.exception("the leader sent what is no message")
            leave(FAILED)
        leave(0)

    def receive(self, kind: type[MessageT]) -> MessageT:
        message = self._messages.get()
        if not isinstance(message, kind):
            raise TypeError(f"{type(message).__name__} comes in place of {kind.__name__}")
        return message


def main(arguments: Sequence[str]) -> NoReturn:
    """``arguments``: the leader's process id, the descriptor of the file in which the ranks find
    each other. Does not return.
    """
    parent, store = map(int, arguments)
    end_with(parent)
    leader = _Leader(Channel(parent_socket(), FROM_RANK, TO_RANK))
    try:
        _follow(leader, store)
    except OSError:  # the leader is gone
        leave(0)
    except Exception:
        log.exception("the rank cannot go on")
        # Where another rank's end is the reason, the leader hears of that one first and ends this.
        time.sleep(WORDS_SECONDS)
        leave(FAILED)


def _follow(leader: _Leader, store: int) -> NoReturn:
    leave_compiler_out()
    import torch

    from fairlead_runtime.build.checks import device_facts
    from fairlead_runtime.build.load_rank import load_rank
    from fairlead_runtime.device.model.rank_group import RankGroup

    start = leader.receive(Start)
    logs.configure(logging.getLevelName(start.level), start.log_format)
    logs.adopt_transformers()
    rank, config = start.rank, start.config
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(start.threads)
    ranks = RankGroup(
        rank,
        config.tensor_parallel,
        f"/proc/self/fd/{store}",
        lambda: leader.send(Loaded()),
    )
    try:
        device = device_facts(config.device, config.tensor_parallel)
        if device.kind == "cuda":
            torch.cuda.set_device(rank)
        loaded_rank = load_rank(Path(start.path), config, device, ranks)
        leader.send(Measured(dict(loaded_rank.measured)))
        sizes = leader.receive(Sizes)
        cache = loaded_rank.cache(
            units=sizes.units, block_size=sizes.block_size, host_units=sizes.host_units
        )
    except (ConfigError, ModelError, SelfTestError) as error:
        leader.send(Refused.of(error))
        while True:  # until the leader has read it and closes the socket
            leader.receive(Message)
    leader.send(Allocated(cache.not_pinned))
    _serve(leader, loaded_rank, cache, ranks, sizes.tables)


def _serve(
    leader: _Leader,
    loaded_rank: "LoadedRank",
    cache: "CacheStorage",
    ranks: "RankGroup",
    tables: tuple[int, int] | None,
) -> NoReturn:
    from fairlead_runtime.device.ranks.rank_messages import Follower

    follower = Follower(loaded_rank.model, cache, loaded_rank.attention, ranks, tables)
    while True:
        follower.follow(leader.receive(Message))


if __name__ == "__main__":
    main(sys.argv[1:])
