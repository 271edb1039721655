"""The other ranks of a model that is split: processes that this one, rank 0, starts and watches.

Owns their life and the messages to them. Each is started and waited for by a thread of its own, so
the end of one is known at once, and Linux ends it with this process, even one that stands still.
They hear of each step over a socket without a name, and end when it does.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from torch import Tensor

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
from fairlead_runtime.child.frames import Channel, Message
from fairlead_runtime.child.process import Child, command_of
from fairlead_runtime.child.program import listen
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.rank_group import RankGroup, is_taken
from fairlead_runtime.device.ranks import rank_messages
from fairlead_runtime.outputs import EngineDead
from fairlead_runtime.scheduling.plan import DeviceLostError, Work
from fairlead_runtime.serving.wire import Refused
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.terminal import chosen

log = logging.getLogger("fairlead.ranks")

WORDS_SECONDS = 1.0  # for the process behind a closed socket to be seen ended
PROCESS = "fairlead_runtime.processes.rank_process"
Lost = Callable[[Exception], None]
MessageT = TypeVar("MessageT", bound=Message)


class Ranks:
    """The ranks from 1 on, which load the model in ``path`` while this process does.

    ``lost`` is called in another thread when one ends by itself or refuses to start, with
    EngineDead or with what it refuses. ``error`` is the same from then on, and no sum of this
    process waits for that rank. ``threads``: those that each may compute with on a CPU. They need
    ``sync``, then ``serve``, in this order, after ``rank_group`` has met. Raises ConfigError in a
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
        self.rank_group = RankGroup(0, size, f"/proc/self/fd/{self._store}", self._all_are_loaded)
        self._peers: list[_Peer] = []
        level = logging.getLogger().getEffectiveLevel()
        try:
            for rank in range(1, size):
                peer = _Peer(rank, self._store, self._has_ended, self._has_failed)
                self._peers.append(peer)
                with contextlib.suppress(OSError):  # it has ended, which the next receive tells
                    peer.channel.send(Start(rank, str(path), config, threads, level, chosen()))
        except EngineDead:
            self.close()
            raise

    def _all_are_loaded(self) -> None:
        for peer in self._peers:
            self._receive(peer, Loaded)

    def sync(self, measured: Mapping[str, int]) -> Mapping[str, int]:
        """The most that any rank has measured, by name, of what this one has measured."""
        answers = [self._receive(peer, Measured).sizes for peer in self._peers]
        return {
            name: max(size, *(answer.get(name, 0) for answer in answers))
            for name, size in measured.items()
        }

    def serve(
        self,
        tables: tuple[int, int] | None = None,
        /,
        *,
        units: int,
        block_size: int,
        host_units: int,
    ) -> str:
        """Let every rank allocate its cache, and ``tables`` of this shape where this one's are on
        its device. From then on they follow this one's steps. Returns why the host memory of one is
        not pinned, if that is so.
        """
        with contextlib.suppress(OSError):  # one has ended, which the next receive tells
            self._send(Sizes(units, block_size, host_units, tables))
        reasons = [(peer.rank, self._receive(peer, Allocated).not_pinned) for peer in self._peers]
        return next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), "")

    # -- Followers

    def copy(self, work: Work) -> None:
        self._step(rank_messages.copies(work))

    def forward(self, batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> None:
        self._step(rank_messages.forward(batch, keep, ahead=ahead))

    def share(self, ids: Tensor) -> None:
        self.rank_group.broadcast(ids)

    def failure(self, error: Exception) -> DeviceLostError:
        if self._ended.wait(WORDS_SECONDS):
            return DeviceLostError(str(self.error))
        size = self.rank_group.size
        log.error("a step of %d ranks failed", size, exc_info=error)
        return DeviceLostError(
            f"a step that {size} ranks compute together failed: {type(error).__name__}"
        )

    def _step(self, message: ToRank) -> None:
        try:
            self._send(message)
        except OSError as error:
            raise self.failure(error) from error

    # -- messages and ends

    def _send(self, message: ToRank) -> None:
        frame = TO_RANK.encode(message)
        for peer in self._peers:
            peer.channel.send_frame(frame)

    def _receive(self, peer: "_Peer", kind: type[MessageT]) -> MessageT:
        """The next message. Raises what the rank refuses, EngineDead when it has ended."""
        message = peer.receive()
        if not isinstance(message, kind):
            raise self.error or EngineDead(f"rank {peer.rank} ended while it started")
        return message

    def _has_ended(self, rank: int, end: str) -> None:
        self._has_failed(EngineDead(f"rank {rank} of {self.rank_group.size} {end}"))

    def _has_failed(self, error: Exception) -> None:
        """Keep the error of a rank and tell of it; called in that rank's thread."""
        with self._deaths:
            if self._closing or self._ended.is_set():
                return
            self.error = error
            self._ended.set()
        log.error("%s", error)
        if self._lost is not None:
            self._lost(error)
        self.rank_group.abort()

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        with self._deaths:
            if self._closing:
                return
            self._closing = True
        for peer in self._peers:
            peer.close()
        self.rank_group.close()
        os.close(self._store)


class _Peer:
    """One rank's process, and the thread that has started it and reads what it says: a rank may
    refuse while this process waits for it in a sum.
    """

    def __init__(
        self,
        rank: int,
        store: int,
        ended: Callable[[int, str], None],
        refused: Callable[[Exception], None],
    ) -> None:
        self.rank = rank
        self._store = store
        self._ended = ended
        self._refused = refused
        self._messages: queue.SimpleQueue[FromRank | None] = queue.SimpleQueue()
        started = Future[None]()
        # This thread lives as long as the process does: Linux ends that with it.
        self._thread = threading.Thread(
            target=self._live, args=(started,), name=f"rank {rank}", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except OSError as error:
            raise EngineDead(f"rank {rank} cannot be started: {error}") from error

    def _live(self, started: "Future[None]") -> None:
        try:
            self._child = Child(command_of(PROCESS, os.getpid(), self._store), files=[self._store])
        except OSError as error:
            started.set_exception(error)
            return
        self.channel = Channel(self._child.connection, TO_RANK, FROM_RANK)
        started.set_result(None)
        end = listen(self._child, self.channel, self._hear)
        self._ended(self.rank, end)
        self._messages.put(None)

    def _hear(self, message: FromRank) -> None:
        if isinstance(message, Refused):
            self._refused(message.error)
            # It need not wait either, nor may another rank wait for it.
            self._child.hang_up()
        else:
            self._messages.put(message)

    def receive(self) -> FromRank | None:
        """The next message, None once there will be no more."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
        return message

    def close(self) -> None:
        self._child.hang_up()
        self._thread.join()
        self._child.connection.close()
