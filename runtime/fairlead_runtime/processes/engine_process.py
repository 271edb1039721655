"""The process of the engine: it loads the model, then answers the HTTP process over a socket.

Owns this process's life. The HTTP process starts it and is its only user: however that one ends,
this one ends too, even in the middle of a step. It ignores the signals that end a pod: the HTTP
process drains, then ends it.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fairlead_runtime.child.frames import FrameError
from fairlead_runtime.child.heap import imports_for_good
from fairlead_runtime.child.life import FAILED, end_with, leave, parent_socket
from fairlead_runtime.engine.cache_map import CacheCopy
from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.models.model_error import first_line
from fairlead_runtime.outputs import (
    CacheReset,
    ChoiceEvent,
    EngineDead,
    QueueFull,
    RequestView,
    ServiceError,
)
from fairlead_runtime.processes import logs
from fairlead_runtime.processes.lean_imports import leave_compiler_out
from fairlead_runtime.request.sequence import FinishReason, Request
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving import wire
from fairlead_runtime.serving.engine_link import run_engine, settle_memory
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics
from fairlead_runtime.serving.startup import Teller
from fairlead_runtime.settings import terminal

log = logging.getLogger("fairlead.engine")

STOP_SECONDS = 5.0  # for the step that runs


def main(arguments: Sequence[str]) -> NoReturn:
    """``arguments``: the id of the HTTP process, the level and the form of logging. Does not
    return.
    """
    parent, level, log_format = int(arguments[0]), int(arguments[1]), arguments[2]
    end_with(parent)
    connection = parent_socket()
    logs.configure(logging.getLevelName(level), log_format)
    terminal.share_line(shared=True)  # with the HTTP process, until it is ready
    leave(_serve(wire.EngineChannel(connection, wire.FROM_ENGINE, wire.TO_ENGINE)))


def _serve(channel: wire.EngineChannel) -> int:
    """Load, step and answer; returns the exit code."""
    try:
        # Imported before the first message, which may have to wait for a download.
        with imports_for_good():
            leave_compiler_out()
            from fairlead_runtime.build.build_engine import build
    except (ImportError, OSError, MemoryError) as error:  # memory is short, or a library broken
        reason = f"torch or transformers cannot be imported: {first_line(error)}"
        channel.send(wire.Refused.of(EngineDead(reason)))
        return FAILED
    logs.adopt_transformers()
    try:
        start = channel.receive()
        if not isinstance(start, wire.Start):
            return 0
        measurements = RequestMetrics()

        def text() -> TextFacts | None:
            message = channel.receive()
            if isinstance(message, wire.Words):
                return message.text
            raise _HungUp

        def lost(error: Exception) -> NoReturn:
            """Another rank refuses to start or has ended, at whatever this process is."""
            with contextlib.suppress(OSError):
                channel.send(wire.Refused.of(error))  # counts while this one starts
                channel.send(wire.Gone(str(error)))
            leave(FAILED)

        try:
            built_engine = build(
                Path(start.path),
                start.config,
                observer=measurements,
                http_process_bytes=start.beside,
                lost=lost,
                text=text,
                report=Teller(channel.send),
            )
        except _HungUp:
            return 0
        except Exception as error:
            refusal = wire.Refused.of(error)
            if refusal.kind == "EngineDead":
                log.exception("the engine cannot start")
            channel.send(refusal)
            return FAILED
        engine, memory = built_engine.engine, built_engine.memory.as_dict()
        terminal.share_line(shared=False)
        channel.send(wire.Loaded(built_engine.facts, engine.bounds, memory))
        return Server(engine, measurements, channel).run()
    except FrameError:
        log.exception("the HTTP process sent what is no message")
        return FAILED
    except OSError:  # the HTTP process is gone
        return 0


class _HungUp(Exception):  # noqa: N818 - named for the condition
    """The HTTP process is gone."""


class Server:
    """The engine's thread, the thread of the pulse, and the messages of the HTTP process."""

    def __init__(
        self, engine: Engine, measurements: RequestMetrics, channel: wire.EngineChannel
    ) -> None:
        self._engine = engine
        self._measurements = measurements
        self._channel = channel

    def run(self) -> int:
        """Serve until Stop or the end of the other process. Returns the exit code; when the engine
        gives up the process ends without a return.
        """
        settle_memory()
        stepping = threading.Thread(target=self._step, name="engine", daemon=True)
        stepping.start()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        while (message := self._channel.receive()) is not None:
            match message:
                case wire.Submit(request, bounded):
                    self._submit(request, bounded=bounded)
                case wire.Abort(request_id, error):
                    self._engine.abort(request_id, error=error)
                case wire.Finish(request_id, choice):
                    self._engine.finish(request_id, choice)
                case wire.Ask(number, "requests"):
                    self._inspect(number)
                case wire.Ask(number, "cache", start):
                    self._copy_cache(number, start)
                case wire.Ask(number, "reset"):
                    self._reset_cache(number)
                case wire.Ask(number):
                    report = EngineReport(self._engine.snapshot(), self._measurements.read())
                    self._channel.send(wire.Report(number, report))
                case wire.Stop():
                    self._engine.stop()
                    stepping.join(STOP_SECONDS)
                    return 0
        return 0

    def _submit(self, request: Request, *, bounded: bool) -> None:
        try:
            self._engine.submit(request, bounded=bounded)
        except (QueueFull, EngineDead) as error:
            self._publish([_last_event(request.id, error)])

    def _inspect(self, number: int) -> None:
        def answer(views: list[RequestView] | None) -> None:
            self._channel.send(wire.Views(number, views))

        self._engine.inspect(answer)

    def _copy_cache(self, number: int, start: int) -> None:
        def send(copy: CacheCopy | None) -> None:
            view = None if copy is None else copy.view()
            with contextlib.suppress(OSError):
                self._channel.send(wire.Cache(number, view))

        # The engine's thread copies, another one makes the map: no step waits for it.
        self._engine.copy_cache(
            start,
            lambda copy: threading.Thread(target=send, args=(copy,), daemon=True).start(),
        )

    def _reset_cache(self, number: int) -> None:
        def answer(reset: CacheReset | None) -> None:
            self._channel.send(wire.Reset(number, reset))

        self._engine.reset_cache(answer)

    def _step(self) -> None:
        """The engine's thread."""
        run_engine(self._engine, self._publish)
        if self._engine.dead_reason:
            with contextlib.suppress(OSError):
                self._channel.send(wire.Gone(self._engine.dead_reason))
            leave(FAILED)

    def _publish(self, events: list[ChoiceEvent]) -> None:
        """Send a step's events as one message, or as several where that would be too large."""
        try:
            self._channel.send(wire.Events(events))
        except FrameError as error:
            if len(events) > 1:
                half = len(events) // 2
                self._publish(events[:half])
                self._publish(events[half:])
                return
            request_id = events[0].request_id
            self._engine.abort(request_id)
            self._publish([_last_event(request_id, ServiceError(str(error)))])

    def _beat(self) -> None:
        """Say in every second that the process lives, and how its step goes on."""
        while True:
            time.sleep(wire.PULSE_SECONDS)
            try:
                self._channel.send(wire.Pulse(self._engine.state()))
            except OSError:
                return


def _last_event(request_id: str, error: ServiceError) -> ChoiceEvent:
    return ChoiceEvent(request_id, 0, None, None, FinishReason.ERROR, error=error)


if __name__ == "__main__":
    main(sys.argv[1:])
