"""Streams that end in one step: what the event loop takes, and what another stream waits meanwhile.

`http.py --parts ends` runs it, once for each checkout and round. The service and the public port's
application serve STREAMS streams and one more, without sockets, an engine or its process: the steps
are handed to the service as the engine's would be; the other stream gets its next token as soon as
it has shown the last. Processor time of the event loop's thread.
"""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

STREAMS = 2048
COLUMNS = (
    f"ms to the next token of another stream while {STREAMS} end, longest",
    "ms an end",
)


class Link:
    """An engine that takes every request and does nothing."""

    def __init__(self) -> None:
        from support.fake_engine import rig

        self.bounds = rig(max_requests=2 * STREAMS, max_queue=2 * STREAMS).bounds
        self.complete = asyncio.Event()  # all streams have come
        self._count = 0

    def start(self, deliver: Any, _ended: Any) -> None:
        self.deliver = deliver

    def submit(self, _request: Any, **_bounded: bool) -> None:
        self._count += 1
        if self._count == STREAMS + 1:
            self.complete.set()

    def abort(self, request_id: str, error: Any = None) -> None: ...
    def finish(self, request_id: str, choice: int) -> None: ...
    async def stop(self, max_wait: float) -> None: ...


async def measure() -> tuple[float, float]:
    from fairlead_runtime.api.ports.app import public_app
    from fairlead_runtime.api.state.state import ServerState
    from fairlead_runtime.front.limits import PromptPool
    from fairlead_runtime.outputs import ChoiceEvent, ModelFacts
    from fairlead_runtime.request.sequence import FinishReason
    from fairlead_runtime.serving.detokenize import vocabulary_of
    from fairlead_runtime.serving.intake import Intake
    from fairlead_runtime.serving.service import Service
    from support import tiny
    from support.api_harness import MODEL, FakeService, backend_of, completion

    link, tokenizer = Link(), tiny.tokenizer()
    vocabulary, (token,) = vocabulary_of(tokenizer), tokenizer.encode("a", add_special_tokens=False)
    facts = ModelFacts(eos_ids=frozenset(), vocab_size=1000, seed=0)
    engine: Any = link
    service: Any = Service(engine, Intake(link.bounds.resolve_max_tokens, facts), vocabulary)
    service.start()
    state, pool = ServerState(name=MODEL), PromptPool()
    state.attach(replace(backend_of(FakeService()), service=service, vocabulary=vocabulary))
    app = public_app(state, pool)
    shown: asyncio.Queue[float] = asyncio.Queue()
    content = json.dumps(completion([5, 6], stream=True, max_tokens=50)).encode()

    def stream(number: int) -> Any:
        sent = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if sent.is_set():
                await asyncio.Event().wait()
            sent.set()
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(_message: dict[str, Any]) -> None:
            if number == STREAMS:
                shown.put_nowait(time.thread_time())

        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"%d" % number)]
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"headers": headers, "query_string": b"", "root_path": ""}
        served: Any = app
        return served(scope, receive, send)

    tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS + 1)]
    await link.complete.wait()
    names = [*map(str, range(STREAMS + 1))]
    link.deliver([ChoiceEvent(name, 0, token, None, None) for name in names])
    for _ in ("head", "token"):
        await shown.get()
    await asyncio.sleep(0.5)
    began = time.thread_time()
    link.deliver([ChoiceEvent(name, 0, token, None, FinishReason.LENGTH) for name in names[:-1]])
    waits: list[float] = []
    while not all(task.done() for task in tasks[:-1]):
        came = time.thread_time()
        link.deliver([ChoiceEvent(names[-1], 0, token, None, None)])
        waits.append(await shown.get() - came)
    whole = time.thread_time() - began
    tasks[-1].cancel()
    pool.close()
    await service.stop()
    return 1000 * max(waits), 1000 * whole / STREAMS


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
