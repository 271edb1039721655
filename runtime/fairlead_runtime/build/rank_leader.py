"""The other ranks of a model that is split: processes that this one, rank 0, starts and watches.

Owns their life and the messages to them. Each is started and waited for by a thread of its own, so
the end of one is known at once, and Linux ends it with this process, even one that stands still.
They hear of each step over a socket without a name, and end when it does.
"""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fairlead_runtime.child import frames
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.rank_group import RankGroup, is_taken
from fairlead_runtime.device.ranks import rank_messages
from fairlead_runtime.outputs import EngineDead
from fairlead_runtime.scheduling.plan import DeviceLostError, Work
from fairlead_runtime.serving.remote_engine import REFUSALS, ending
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig

log = logging.getLogger("fairlead.ranks")

END_SECONDS = 5.0  # for a rank whose socket is closed to end, before it is killed
WORDS_SECONDS = 1.0  # for the process behind a closed socket to be seen ended
PROCESS = "fairlead_runtime.processes.rank_process"
Lost = Callable[[Exception], None]


class Child(Protocol):
    """The parts of subprocess.Popen that are used."""

    def wait(self) -> int: ...
    def kill(self) -> None: ...


def spawn(connection: int, store: int) -> Child:
    """Start the process of a rank with its end of the socket and the file of the ranks.

    Linux ends it with the thread that calls this.
    """
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        # -P: the working directory is no place for modules.
        [sys.executable, "-P", "-m", PROCESS, *map(str, (connection, os.getpid(), store))],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection, store],
    )


class Ranks:
    """The ranks from 1 on, which load the model in ``path`` while this process does.

    ``lost`` is called in another thread when one ends by itself or refuses to start, with
    EngineDead or with what it refuses. ``error`` is the same from then on, and no sum of this
    process waits for that rank. ``threads``: those that each may compute with on a CPU. They need
    ``sync``, then ``serve``, in this order, after ``group`` has met. Raises ConfigError in a
    process that has a process group already.
    """

    def __init__(
        self, path: Path | str, config: EngineConfig, *, threads: int, lost: Lost | None = None
    ) -> None:
        if is_taken():
            raise ConfigError(
                "tensor_parallel",
                "this process has a process group already, that of another LLM of several ranks or "
                "one of its own",
                "end that first, or use another process",
            )
        self._lost = lost
        self._closing = False
        self._ended = threading.Event()
        self.error: Exception | None = None
        self._deaths = threading.Lock()
        # An empty file in memory, in which the ranks find each other's addresses.
        self._store = os.memfd_create("fairlead-ranks")
        size = config.tensor_parallel
        self.group = RankGroup(0, size, f"/proc/self/fd/{self._store}", self._all_are_loaded)
        self._peers: list[_Peer] = []
        start = {
            "path": str(path),
            "config": asdict(config),
            "threads": threads,
            "level": logging.getLogger().getEffectiveLevel(),
        }
        try:
            for rank in range(1, size):
                self._peers.append(_Peer(rank, self._store, self._has_ended, self._has_failed))
                self._peers[-1].send(start | {"rank": rank})
        except EngineDead:
            self.close()
            raise

    def _all_are_loaded(self) -> None:
        for peer in self._peers:
            self._receive(peer)

    def sync(self, measured: Mapping[str, int]) -> Mapping[str, int]:
        """The most that any rank has measured, by name, of what this one has measured."""
        answers = [self._receive(peer)["measured"] for peer in self._peers]
        return {
            name: max(size, *(answer.get(name, 0) for answer in answers))
            for name, size in measured.items()
        }

    def serve(self, *, units: int, block_size: int, host_units: int) -> str:
        """Let every rank allocate its cache. From then on they follow this one's steps. Returns why
        the host memory of one is not pinned, if that is so.
        """
        sizes = {"units": units, "block_size": block_size, "host_units": host_units}
        with contextlib.suppress(OSError):  # one has ended, which the next receive tells
            self._send(sizes)
        reasons = [(peer.rank, self._receive(peer)["not_pinned"]) for peer in self._peers]
        return next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), "")

    # -- Followers

    def copy(self, work: Work) -> None:
        self._step(rank_messages.copies(work))

    def forward(self, batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> None:
        self._step(rank_messages.forward(batch, keep, ahead=ahead))

    def share(self, ids: Tensor) -> None:
        self.group.broadcast(ids)

    def failure(self, error: Exception) -> DeviceLostError:
        if self._ended.wait(WORDS_SECONDS):
            return DeviceLostError(str(self.error))
        log.error("a step of %d ranks failed", self.group.size, exc_info=error)
        return DeviceLostError(
            f"a step that {self.group.size} ranks compute together failed: {type(error).__name__}"
        )

    def _step(self, message: rank_messages.Message) -> None:
        try:
            self._send(message)
        except OSError as error:
            raise self.failure(error) from error

    # -- messages and ends

    def _send(self, message: Mapping[str, Any]) -> None:
        frame = frames.pack(dict(message))
        for peer in self._peers:
            peer.send_frame(frame)

    def _receive(self, peer: "_Peer") -> dict[str, Any]:
        """The next message. Raises what the rank refuses, EngineDead when it has ended."""
        message = peer.receive()
        if message is None:
            self._ended.wait(WORDS_SECONDS)
            raise self.error or EngineDead(f"rank {peer.rank} ended while it started")
        return message

    def _has_ended(self, rank: int, code: int) -> None:
        self._has_failed(EngineDead(f"rank {rank} of {self.group.size} {ending(code)}"))

    def _has_failed(self, error: Exception) -> None:
        """In a thread of the rank's."""
        with self._deaths:
            if self._closing or self._ended.is_set():
                return
            self.error = error
            self._ended.set()
        log.error("%s", error)
        if self._lost is not None:
            self._lost(error)
        self.group.abort()

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        with self._deaths:
            if self._closing:
                return
            self._closing = True
        for peer in self._peers:
            peer.close()
        self.group.close()
        os.close(self._store)


class _Peer:
    """One rank's process, the thread that has started it and waits for its end, and the one that
    reads what it says: a rank may refuse while this process waits for it in a sum.
    """

    def __init__(
        self,
        rank: int,
        store: int,
        ended: Callable[[int, int], None],
        refused: Callable[[Exception], None],
    ) -> None:
        self.rank = rank
        leader_end, rank_end = socket.socketpair()
        self._socket, self._stream = leader_end, leader_end.makefile("rb")
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._refused = refused
        self._child: Child | None = None
        self._failure: Exception | None = None
        started = threading.Event()
        self._reader = threading.Thread(
            target=self._read, name=f"words of rank {rank}", daemon=True
        )

        def live() -> None:
            try:
                self._child = spawn(rank_end.fileno(), store)
            except OSError as error:
                self._failure = error
                return
            finally:
                rank_end.close()
                started.set()
            code = self._child.wait()
            self._reader.join(WORDS_SECONDS)  # what it has said is the better reason
            ended(rank, code)

        # This thread lives as long as the process does.
        self._thread = threading.Thread(target=live, name=f"rank {rank}", daemon=True)
        self._reader.start()
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise EngineDead(f"rank {rank} cannot be started: {self._failure}")

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed here
            while (message := frames.read(self._stream)) is not None:
                if "refused" in message:
                    kind, arguments = message["refused"]
                    self._refused(REFUSALS[kind](*arguments))
                    break
                self._messages.put(message)
        self._messages.put(None)
        # It need not wait either, nor may another rank wait for it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next receive tells
            self.send_frame(frames.pack(message))

    def send_frame(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self) -> dict[str, Any] | None:
        """The next message, None once there will be no more."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive() and self._child is not None:
            self._child.kill()
            self._thread.join()
        self._reader.join()
        self._stream.close()
        self._socket.close()
