"""An engine without a model, in the place of the engine's process: what HTTP takes by itself.

Every live request gets one token in each step, and steps are a number of seconds apart, the pace.
When a request ends, a line of JSON tells when each of its tokens was sent.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairlead_runtime.child import process
from fairlead_runtime.child.life import parent_socket
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.outputs import ChoiceEvent, EngineState, ModelFacts
from fairlead_runtime.processes.spawn import MODULE as ENGINE
from fairlead_runtime.request.sequence import FinishReason, Request
from fairlead_runtime.serving import wire
from fairlead_runtime.sizing.traffic import waiting_tokens

MANY = 1 << 16
BOUNDS = Bounds(
    max_queue=MANY,
    queue_timeout=60.0,
    max_requests=MANY,
    num_blocks=MANY,
    block_size=16,
    max_model_len=MANY,
    waiting=waiting_tokens(MANY, MANY, MANY),
)


class Live(NamedTuple):
    request: Request
    sent: list[float]  # when, on the machine's monotonic clock


class Engine:
    """``token`` is what every step gives to every request."""

    def __init__(self, channel: wire.EngineChannel, pace: float, token: int, log: Path) -> None:
        self._channel = channel
        self._pace = pace
        self._token = token
        self._log = log
        self._live: dict[str, Live] = {}
        self._came = threading.Condition()

    def read(self) -> None:
        while (message := self._channel.receive()) is not None:
            with self._came:
                match message:
                    case wire.Submit(request):
                        self._live[request.id] = Live(request, [])
                        self._came.notify()
                    case wire.Abort(request_id):
                        self._live.pop(request_id, None)
                    case wire.Stop():
                        break
        os._exit(0)

    def run(self) -> None:
        due = time.monotonic()
        while True:
            with self._came:
                self._came.wait_for(lambda: self._live)
            due = max(time.monotonic(), due + self._pace)
            time.sleep(max(0.0, due - time.monotonic()))
            with self._came:
                live = [*self._live.values()]
                events = [self._step(each) for each in live]
            self._note(live)
            self._channel.send(wire.Events(events))

    def _step(self, live: Live) -> ChoiceEvent:
        live.sent.append(time.monotonic())
        last = len(live.sent) == live.request.max_tokens
        if last:
            del self._live[live.request.id]
        finish = FinishReason.LENGTH if last else None
        return ChoiceEvent(live.request.id, 0, self._token, None, finish)

    def _note(self, live: Sequence[Live]) -> None:
        ended = [each for each in live if len(each.sent) == each.request.max_tokens]
        with self._log.open("a") as log:
            for each in ended:
                log.write(json.dumps({"prompt": [*each.request.prompt], "sent": each.sent}) + "\n")


def replace_engine(*arguments: str) -> None:
    """Let ``fairlead serve`` in this process start this engine, with ``main``'s arguments."""

    start: Any = process.spawn

    def spawn(command: Sequence[str], *more: Any) -> Any:
        if ENGINE in command:
            command = [sys.executable, "-P", __file__, *arguments]
        return start(command, *more)

    replaced: Any = process
    replaced.spawn = spawn


def main(arguments: Sequence[str]) -> None:
    """``arguments``: the pace, the token's id, the vocabulary, the log's path."""
    pace, token, vocabulary, log = arguments
    channel = wire.EngineChannel(parent_socket(), wire.FROM_ENGINE, wire.TO_ENGINE)
    channel.receive()  # Start
    facts = ModelFacts(eos_ids=frozenset({0}), vocab_size=int(vocabulary), seed=0)
    channel.send(wire.Loaded(facts, BOUNDS, {}))
    engine = Engine(channel, float(pace), int(token), Path(log))
    threading.Thread(target=engine.read, daemon=True).start()
    threading.Thread(target=pulse, args=(channel,), daemon=True).start()
    engine.run()


def pulse(channel: wire.EngineChannel) -> None:
    while True:
        channel.send(wire.Pulse(EngineState("", "", None, 60.0)))
        time.sleep(wire.PULSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
