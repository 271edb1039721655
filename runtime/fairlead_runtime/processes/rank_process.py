"""The process of a rank from 1 on: it loads its part of the model and makes every step of rank 0.

Owns this process's life. However its leader ends, this one ends too: the kernel ends it with the
thread that started it, and a thread of its own sees the end of the socket, in the middle of a step
too. It schedules and samples nothing.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fairlead_runtime.child import frames
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.processes import logs
from fairlead_runtime.processes.lean_imports import leave_compiler_out
from fairlead_runtime.processes.life import FAILED, end_with, leave
from fairlead_runtime.serving.remote_engine import refusal_of
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from fairlead_runtime.build.load_rank import LoadedRank
    from fairlead_runtime.device.memory.storage import CacheStorage
    from fairlead_runtime.device.model.rank_group import RankGroup

log = logging.getLogger("fairlead.rank")

WORDS_SECONDS = 1.0  # for the leader to hear how another rank has ended


class _Leader:
    """The socket to rank 0. Messages are read as they come, so that its end is seen at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(connection.makefile("rb"),), daemon=True).start()

    def _read(self, stream: Any) -> None:
        try:
            while (message := frames.read(stream)) is not None:
                self._messages.put(message)
        except OSError:
            pass
        leave(0)

    def receive(self) -> dict[str, Any]:
        return self._messages.get()

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(frames.pack(dict(message)))


def main(arguments: Sequence[str]) -> NoReturn:
    """``arguments``: the socket's descriptor, the leader's process id, the descriptor of the file
    in which the ranks find each other. Does not return.
    """
    descriptor, parent, store = map(int, arguments)
    end_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    leader = _Leader(socket.socket(fileno=descriptor))
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

    start = leader.receive()
    logs.configure(logging.getLevelName(start["level"]))
    logs.adopt_transformers()
    rank, config = start["rank"], EngineConfig.from_mapping(start["config"])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(start["threads"])
    group = RankGroup(
        rank,
        config.tensor_parallel,
        f"/proc/self/fd/{store}",
        lambda: leader.send({"loaded": True}),
    )
    try:
        device = device_facts(config.device, config.tensor_parallel)
        if device.kind == "cuda":
            torch.cuda.set_device(rank)
        parts = load_rank(Path(start["path"]), config, device, group)
        leader.send({"measured": dict(parts.measured)})
        cache = parts.cache(**leader.receive())
    except (ConfigError, ModelError, SelfTestError) as error:
        refusal = refusal_of(error)
        leader.send({"refused": (refusal.kind, refusal.arguments)})
        while True:  # until the leader has read it and closes the socket
            leader.receive()
    leader.send({"not_pinned": cache.not_pinned})
    _serve(leader, parts, cache, group)


def _serve(
    leader: _Leader, parts: "LoadedRank", cache: "CacheStorage", group: "RankGroup"
) -> NoReturn:
    from fairlead_runtime.device.ranks import rank_messages

    while True:
        rank_messages.follow(leader.receive(), parts.model, cache, parts.attention, group)


if __name__ == "__main__":
    main(sys.argv[1:])
