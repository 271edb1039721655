"""Any two features of a request together harm neither another request nor the engine."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx

from support.api_harness import WITHIN, Server, completion, events, http, is_error, run
from support.full import LONG_FORM
from support.real_server import CONFIG, demo

ROUNDS = 20 if LONG_FORM else 1  # of all pairs, each with other values
MAX_TOKENS = 24
# Few blocks and no margin, so that running requests are preempted; and room to offload some.
SCARCE = replace(
    CONFIG,
    num_blocks=32,
    safety_margin=0.0,
    cpu_offload_space=0.0003,
    max_requests=12,
    scheduler_type="priority",
    queue_timeout=WITHIN,
)
SHARED = "Once upon a time there was a boat that sailed over the sea to a small town. " * 2
GUIDES: list[dict[str, Any]] = [
    {"regex": "[a-z ]{1,40}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'start: "a" | "b" start'},
    {"json": {"type": "object", "properties": {"far": {"type": "boolean"}}}},
]

Feature = Callable[[random.Random], dict[str, Any]]
FEATURES: dict[str, Feature] = {
    "logprobs": lambda r: {"logprobs": r.randint(0, 20)},
    "prompt logprobs": lambda r: {"prompt_logprobs": r.randint(0, 20)},
    "penalties": lambda r: {
        "presence_penalty": r.uniform(-2, 2),
        "frequency_penalty": r.uniform(-2, 2),
        "repetition_penalty": r.uniform(0.5, 2),
    },
    "stop": lambda r: {
        "stop": r.sample(["e", " th", "a", ". ", "é"], r.randint(1, 4)),
        "include_stop_str_in_output": r.random() < 0.5,
    },
    "n": lambda r: {"n": r.randint(2, 8)},
    "seed": lambda r: {
        "seed": r.randrange(2**63),
        "temperature": r.uniform(0.1, 5),
        "top_k": r.randint(0, 50),
        "top_p": r.uniform(0.1, 1),
        "min_p": r.uniform(0, 0.2),
    },
    "grammar": lambda r: {"structured_outputs": r.choice(GUIDES)},
    "bias": lambda r: {"logit_bias": {str(r.randrange(300)): r.uniform(-100, 100)}},
    "allowed": lambda r: {"allowed_token_ids": r.sample(range(300), r.randint(1, 300))},
    "bad words": lambda r: {"bad_words": r.sample(["the", "a", "sea boat", "e", "is"], 3)},
    "min tokens": lambda r: {"min_tokens": r.randint(1, MAX_TOKENS)},
    "stream": lambda _: {"stream": True},
    "echo": lambda _: {"echo": True},
    "prefix hit": lambda _: {"prompt": SHARED},
    "timeout": lambda r: {"timeout": r.choice([0.01, 1, 4])},
    # Other requests go first, and it is long enough to run beside many of them.
    "preemption": lambda _: {"priority": 1, "max_tokens": 90, "ignore_eos": True},
    "abort": lambda _: {"max_tokens": 90, "ignore_eos": True},
}
NEIGHBOURS = [completion(text, max_tokens=MAX_TOKENS, temperature=0) for text in ("The sea", "Ask")]


def test_no_pair_of_features_harms_another_request_or_the_engine() -> None:
    async def scenario() -> None:
        async with demo(SCARCE) as server, server.client() as client, server.admin() as admin:
            alone = [await _text(client, body) for body in NEIGHBOURS]
            rng, statuses = random.Random(12), Counter[int]()
            for turn in range(ROUNDS):
                async with asyncio.TaskGroup() as group:
                    tried = [
                        group.create_task(_try(server, client, pair, _body(pair, turn, rng)))
                        for pair in itertools.combinations(FEATURES, 2)
                    ]
                    beside = [group.create_task(_text(client, body)) for body in NEIGHBOURS * 4]
                assert [task.result() for task in beside] == alone * 4
                statuses.update(task.result() for task in tried)
                assert (await admin.post("/canary")).status_code == 200
            assert statuses[200] > 90 * ROUNDS, statuses
            await _until_idle(admin)
            seen = await _metrics(admin)
            assert seen["vllm:num_preemptions_total"] > 10 * ROUNDS
            assert seen["fairlead_offloads_total"] > ROUNDS
            assert seen["vllm:prefix_cache_hits_total"] > 0
            for harm in ("step_failures", "engine_faults", "invariant_violations"):
                assert seen[f"fairlead_{harm}_total"] == 0, harm
            assert seen["vllm:kv_cache_usage_perc"] == 0

    run(scenario())


def _body(pair: tuple[str, str], turn: int, rng: random.Random) -> dict[str, Any]:
    fields = {"prompt": f"{turn} of {' and '.join(pair)}:", "max_tokens": MAX_TOKENS}
    fields["temperature"] = 0
    for name in pair:
        fields |= FEATURES[name](rng)
    return completion(**fields)


async def _text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = (await client.post("/v1/completions", json=body)).json()
    text: str = answer["choices"][0]["text"]
    return text


async def _try(
    server: Server, client: httpx.AsyncClient, pair: tuple[str, str], body: dict[str, Any]
) -> int:
    """The status of the answer, which is 200 or a refusal that says why; 499 without an answer."""
    if "abort" in pair:
        await _leave(server, body)
        return 499
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code == 200 and "stream" in pair:
        *chunks, done = events(answer.text)
        assert done == "[DONE]", pair
        errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
        assert set(errors) <= ({"timeout"} if "timeout" in pair else set()), (pair, errors)
    if answer.status_code != 200:
        assert is_error(answer.json()), pair
        error = answer.json()["error"]
        late = "timeout" in pair and answer.status_code == 408
        named = error["param"] in body or error["code"] == "no_token_allowed"
        assert late or (answer.status_code == 400 and named), (pair, answer.text)
    return answer.status_code


async def _leave(server: Server, body: dict[str, Any]) -> None:
    """Disconnect with the first bytes of the answer, or of a whole one before it."""
    reader, writer = await server.raw()
    writer.write(http("POST", "/v1/completions", json.dumps(body).encode()))
    await writer.drain()
    if body.get("stream"):
        await reader.readline()
    writer.transport.abort()


async def _until_idle(admin: httpx.AsyncClient) -> None:
    while (await admin.get("/debug/requests")).json()["requests"]:
        pass


async def _metrics(admin: httpx.AsyncClient) -> dict[str, float]:
    lines = (await admin.get("/metrics")).text.splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "{" in line}
