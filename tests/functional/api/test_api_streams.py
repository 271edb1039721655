"""Streams under scarce memory equal the whole answers."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from fairlead_runtime.api.ports.app import public_app
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.outputs import ModelFacts
from fairlead_runtime.serving.detokenize import Vocabulary
from fairlead_runtime.serving.engine_link import LocalEngine
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.service import Service
from support.api_harness import (
    MODEL,
    WITHIN,
    FakeService,
    asgi,
    backend_of,
    completion,
    events,
    run,
)
from support.fake_engine import VOCABULARY, rig
from support.full import LONG_FORM

STREAMS = 10_000 if LONG_FORM else 400
AT_ONCE = 200

# Whole characters, words, and single bytes of characters, which seldom fit together.
PIECES = [
    *(text.encode() for text in ("é", "日", "🙂", "the ", "sea ", "a", "e", "n", ", ")),
    *(bytes([byte]) for byte in "é日🙂".encode()),
]


def piece(token: int) -> bytes:
    return PIECES[token % len(PIECES)]


@asynccontextmanager
async def scarce() -> AsyncIterator[tuple[ASGIApp, Service]]:
    """The public port of a scheduler with too few blocks, whose device needs no model."""
    engine = rig(
        num_blocks=30,
        max_model_len=96,
        safety_margin=0.0,
        offload_units=20,
        max_queue=STREAMS,
        queue_timeout=WITHIN,
    )
    vocabulary = Vocabulary(
        decode=lambda ids: b"".join(map(piece, ids)).decode(errors="replace"),
        special=frozenset(),
        token_bytes={token: piece(token) for token in range(VOCABULARY)},
        byte_level=True,
        token_text=lambda token: piece(token).decode(errors="replace"),
    )
    facts = ModelFacts(eos_ids=frozenset(), vocab_size=VOCABULARY, seed=0)
    intake = Intake(engine.bounds.resolve_max_tokens, facts)
    service = Service(LocalEngine(engine), intake, vocabulary)
    service.start()
    state, pool = ServerState(name=MODEL), PromptPool()
    state.attach(replace(backend_of(FakeService()), service=service, vocabulary=vocabulary))
    try:
        yield public_app(state, pool), service
    finally:
        pool.close()
        await service.stop()


def body(rng: random.Random) -> dict[str, Any]:
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 24))]
    stop = rng.choice([[], [], ["ea"], ["é", "日"], [" a", "e, t", "\ufffd\ufffd"]])
    more = {"stop": stop, "include_stop_str_in_output": rng.random() < 0.5} if stop else {}
    return completion(
        prompt,
        max_tokens=rng.randint(1, 60),
        n=rng.choice([1, 1, 1, 3]),
        seed=rng.randrange(1000),
        **more,
    )


def test_a_stream_under_preemption_gives_the_whole_answer_and_ends_once() -> None:
    async def scenario() -> None:
        async with scarce() as (app, service):

            async def both(asked: dict[str, Any]) -> None:
                path = "/v1/completions"
                bodies = [json.dumps({**asked, "stream": stream}) for stream in (False, True)]
                (status, whole), (other, stream) = await asyncio.gather(
                    *(asgi(app, "POST", path, text.encode()) for text in bodies)
                )
                assert (status, other) == (200, 200), (whole, stream)
                *chunks, done = events(stream.decode())
                assert done == "[DONE]"
                assert stream.count(b"[DONE]") == 1
                for choice in json.loads(whole)["choices"]:
                    index = choice["index"]
                    parts = [
                        part
                        for chunk in chunks
                        for part in chunk["choices"]
                        if part["index"] == index
                    ]
                    assert "".join(part["text"] for part in parts) == choice["text"]
                    reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
                    assert reasons == [choice["finish_reason"]]
                    assert parts[-1]["finish_reason"], "nothing comes after the end"

            rng = random.Random(5)
            for begin in range(0, STREAMS, AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    for _ in range(begin, min(STREAMS, begin + AT_ONCE)):
                        group.create_task(both(body(rng)))
            # The engine hears of a stop text, which ends an answer, after its client does.
            scheduler = (await service.report()).engine.scheduler
            while scheduler.used:
                await asyncio.sleep(0)
                scheduler = (await service.report()).engine.scheduler
            assert scheduler.preemptions > STREAMS / 10

    run(scenario())
