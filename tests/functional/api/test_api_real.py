"""OpenAI's client against the real engine with the demo model."""

import asyncio
import json
import socket
import struct
from dataclasses import replace
from typing import Any

import openai
import pytest

from fairlead_runtime.front.key_file import KeyRing
from support.api_harness import (
    Server,
    chat,
    completion,
    http,
    run,
    send_sigterm,
)
from support.full import LONG_FORM
from support.real_server import CONFIG, demo

QUESTION = "What is Fairlead?"
ANSWER = "Fairlead serves language models on Kubernetes."


async def _used(server: Server) -> float:
    async with server.admin() as admin:
        lines = (await admin.get("/metrics")).text.splitlines()
    (usage,) = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
    return float(usage.split()[-1])


async def _until_idle(server: Server) -> None:
    """Wait until no request is live; then every block must be free."""
    async with server.admin() as admin:
        while (await admin.get("/debug/requests")).json()["requests"]:
            pass
    assert await _used(server) == 0.0


def test_openais_client_is_served() -> None:
    async def scenario() -> None:
        async with demo() as server:
            client = server.openai
            await _chat_answers(client)
            await _streams_equal_whole_answers(client)
            await _choices_and_seeds(client)
            await _prompts_of_every_kind(client)
            await _logprobs_add_up(client)
            await _stop_texts_end_a_choice(client)
            await _prompts_can_be_scored(client)
            await _sampling_fields_change_the_text(client)
            await _usage_counts_cached_tokens(client)
            await _what_never_fits_is_refused(client)
            await _until_idle(server)

    run(scenario())


async def _chat_answers(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(QUESTION, temperature=0))
    text = answer.choices[0].message.content or ""
    assert text.startswith(ANSWER)
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def _streams_equal_whole_answers(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat(QUESTION, temperature=0))
    body = chat(QUESTION, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in await client.chat.completions.create(**body)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def _choices_and_seeds(client: openai.AsyncOpenAI) -> None:
    body = completion("Kubernetes", n=3, seed=7, temperature=3.0, max_tokens=12)
    first = await client.completions.create(**body)
    again = await client.completions.create(**body)
    other = await client.completions.create(**{**body, "seed": 8})
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.text for choice in first.choices}) == 3
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert [choice.text for choice in first.choices] != [choice.text for choice in other.choices]
    greedy = await client.completions.create(**completion("Kubernetes", n=3, temperature=0))
    assert len({choice.text for choice in greedy.choices}) == 1


async def _prompts_of_every_kind(client: openai.AsyncOpenAI) -> None:
    single = [
        (await client.completions.create(**completion(text, temperature=0))).choices[0].text
        for text in ("What is", "How do")
    ]
    several = await client.completions.create(**completion(["What is", "How do"], temperature=0))
    assert [choice.text for choice in several.choices] == single
    ids = [40, 41, 42, 43]
    of_ids = await client.completions.create(**completion(ids, temperature=0))
    of_lists = await client.completions.create(**completion([ids, ids[:2]], temperature=0))
    assert of_lists.choices[0].text == of_ids.choices[0].text
    assert of_ids.usage is not None
    assert of_lists.usage is not None
    assert of_ids.usage.prompt_tokens == 4
    assert of_lists.usage.prompt_tokens == 6
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await client.completions.create(**completion([10**6]))
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await client.completions.create(**completion([-1]))


async def _logprobs_add_up(client: openai.AsyncOpenAI) -> None:
    body = chat(QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=10)
    answer = await client.chat.completions.create(**body)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert len(content) == 10
    spelled = b"".join(bytes(each.bytes or []) for each in content)
    assert spelled.decode() == answer.choices[0].message.content
    for each in content:
        assert each.logprob <= 0
        assert each.top_logprobs[0].token == each.token, "greedy takes the likeliest"
        values = [top.logprob for top in each.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
    text = await client.completions.create(
        **completion(QUESTION, temperature=0, logprobs=2, max_tokens=6)
    )
    shape = text.choices[0].logprobs
    assert shape is not None
    assert "".join(shape.tokens or []) == text.choices[0].text
    assert shape.text_offset == [len("".join((shape.tokens or [])[:n])) for n in range(6)]


async def _stop_texts_end_a_choice(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat(QUESTION, temperature=0, stop="models on"))
    assert whole.choices[0].message.content == "Fairlead serves language "
    assert whole.choices[0].finish_reason == "stop"
    body = chat(QUESTION, temperature=0, stop=["nowhere", "models on"], stream=True)
    stream = await client.chat.completions.create(**body)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Fairlead serves language "


async def _prompts_can_be_scored(client: openai.AsyncOpenAI) -> None:
    """echo with logprobs, as lm-eval asks for loglikelihoods, and vLLM's prompt_logprobs."""
    marked = "<|begin|>Hello<|end|>"
    answer = await client.completions.create(
        **completion(marked, echo=True, logprobs=0, max_tokens=1)
    )
    shape = answer.choices[0].logprobs
    assert shape is not None
    assert (shape.text_offset or [])[:3] == [0, 9, 14]
    ids = [40, 41, 42, 43, 44, 45]
    body = completion([ids, ids[:3]], echo=True, logprobs=2, max_tokens=1, temperature=0)
    scored = await client.completions.create(**body)
    nothing = await client.completions.create(**{**body, "max_tokens": 0})
    assert nothing.usage is not None
    assert nothing.usage.completion_tokens == 0
    shapes = [choice.logprobs for choice in (*scored.choices, *nothing.choices)]
    for length, shape, choice in zip(
        (6, 3, 6, 3), shapes, (*scored.choices, *nothing.choices), strict=True
    ):
        assert shape is not None
        tokens = shape.tokens or []
        generated = 1 if choice in scored.choices else 0
        assert len(tokens) == length + generated
        assert "".join(tokens) == choice.text
        assert shape.text_offset == [len("".join(tokens[:n])) for n in range(len(tokens))]
        assert (shape.token_logprobs or [])[0] is None
        assert (shape.top_logprobs or [])[0] is None
        for token, value, top in zip(
            tokens[1:],
            (shape.token_logprobs or [])[1:],
            (shape.top_logprobs or [])[1:],
            strict=True,
        ):
            assert value is not None
            assert top[token] == value <= max(top.values()) <= 0
        assert choice.finish_reason == "length"
    # The shorter prompt is a prefix of the longer one: its scores are the first of that.
    assert shapes[0] is not None
    assert shapes[1] is not None
    assert (shapes[0].token_logprobs or [])[1:3] == pytest.approx(
        (shapes[1].token_logprobs or [])[1:3], abs=1e-4
    )
    text = await client.completions.create(
        **completion(QUESTION, echo=True, max_tokens=5, temperature=0, n=2)
    )
    plain = await client.completions.create(**completion(QUESTION, max_tokens=5, temperature=0))
    assert [choice.text for choice in text.choices] == [QUESTION + plain.choices[0].text] * 2
    pieces = {0: "", 1: ""}
    numbers: dict[int, list[float | None]] = {0: [], 1: []}
    streaming = {**body, "prompt": QUESTION, "max_tokens": 5, "n": 2}
    async for chunk in await client.completions.create(**streaming, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            if choice.logprobs is not None:
                numbers[choice.index] += choice.logprobs.token_logprobs or []
    whole = await client.completions.create(**streaming)
    for choice in whole.choices:
        assert pieces[choice.index] == choice.text
        assert choice.logprobs is not None
        assert numbers[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)

    asked = {"extra_body": {"prompt_logprobs": 1}}
    of_text = await client.completions.create(**completion(ids, n=2, **asked))
    for choice in of_text.choices:
        entries = (choice.model_extra or {})["prompt_logprobs"]
        assert entries[0] is None
        assert [next(iter(entry)) for entry in entries[1:]] == [str(i) for i in ids[1:]]
        for entry, value in zip(entries[1:], (shapes[0].token_logprobs or [])[1:], strict=False):
            own = next(iter(entry.values()))
            assert own["logprob"] == pytest.approx(value, abs=1e-4)
            assert own["rank"] >= 1
            assert isinstance(own["decoded_token"], str)
            assert len(entry) == 1 + (own["rank"] > 1)
    of_chat = await client.chat.completions.create(**chat(QUESTION, **asked))
    assert of_chat.usage is not None
    assert len((of_chat.model_extra or {})["prompt_logprobs"]) == of_chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        await client.completions.create(**completion(ids, stream=True, **asked))


async def _tokens(client: openai.AsyncOpenAI, **fields: Any) -> list[str]:
    body = completion(QUESTION, temperature=0, max_tokens=12, logprobs=0, **fields)
    logprobs = (await client.completions.create(**body)).choices[0].logprobs
    assert logprobs is not None
    return logprobs.tokens or []


async def _sampling_fields_change_the_text(client: openai.AsyncOpenAI) -> None:
    async def text(**fields: Any) -> str:
        body = completion(QUESTION, temperature=0, max_tokens=12, **fields)
        choice = (await client.completions.create(**body)).choices[0]
        return str(choice.text)

    plain = await text()
    tokens = await _tokens(client)
    bad = next(token for token in tokens if token.strip())
    assert bad not in await _tokens(client, extra_body={"bad_words": [bad]})
    only = await text(extra_body={"allowed_token_ids": [70]})
    assert len(only) == 12
    assert len(set(only)) == 1
    assert await text(logit_bias={"70": 100}) == only
    assert await text(logit_bias={"70": 100}, frequency_penalty=2.0) == only
    stop = plain[3:5]
    assert await text(stop=stop) == plain[: plain.index(stop)]
    kept = await text(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept == plain[: plain.index(stop) + len(stop)]
    assert await text(stop=stop, extra_body={"min_tokens": 12}) == plain
    with pytest.raises(openai.BadRequestError) as caught:
        await text(
            extra_body={
                "allowed_token_ids": [70],
                "bad_words": ["nothing"],
                "min_tokens": 1,
                "stop_token_ids": [70],
            }
        )
    assert caught.value.param == "allowed_token_ids"


async def _usage_counts_cached_tokens(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(100, 164))
    cached = []
    for _ in range(2):
        body = completion(prompt, max_tokens=1, extra_body={"cache_salt": "usage"})
        answer = await client.completions.create(**body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    # Whole blocks of 8, and the last token is always computed: 56 of 64.
    assert cached == [0, 56]


async def _what_never_fits_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**completion(list(range(100)), max_tokens=2000))
    assert caught.value.code == "context_length_exceeded"
    assert "100" in caught.value.message
    assert "2000" in caught.value.message


def test_a_hundred_streams_at_once_give_what_each_gives_alone() -> None:
    async def scenario() -> None:
        async with demo() as server:
            # A client for each phase: the server closes connections that were idle for 5 s.
            client = server.openai
            prompts = [
                f"{QUESTION} {number}" * (1 + number % 3)
                for number in range(500 if LONG_FORM else 100)
            ]
            alone = [await _greedy(server.openai, prompt) for prompt in prompts[:10]]

            async def stream(prompt: str) -> str:
                body = chat(prompt, temperature=0, max_tokens=40, stream=True)
                found = await client.chat.completions.create(**body)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

            streamed = await asyncio.gather(*map(stream, prompts))
            client = server.openai
            whole = await asyncio.gather(*(_greedy(client, prompt) for prompt in prompts))
            assert streamed == whole
            assert streamed[:10] == alone
            await _until_idle(server)

    run(scenario())


async def _greedy(client: openai.AsyncOpenAI, prompt: str) -> str:
    answer = await client.chat.completions.create(**chat(prompt, temperature=0, max_tokens=40))
    return answer.choices[0].message.content or ""


def test_disconnected_clients_free_every_block() -> None:
    async def scenario() -> None:
        async with demo() as server:

            async def leave(number: int) -> None:
                body = completion(
                    f"{QUESTION} {number}", max_tokens=1500, ignore_eos=True, n=1 + number % 2
                )
                body["stream"] = number % 3 > 0
                reader, writer = await server.raw()
                writer.write(http("POST", "/v1/completions", json.dumps(body).encode()))
                if body["stream"]:
                    for _ in range(number % 5):
                        await reader.readuntil(b"\n\n")
                if number % 4 == 0:
                    reset = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, reset
                    )
                writer.close()

            survivor = asyncio.create_task(_greedy(server.openai, QUESTION))
            await asyncio.gather(*map(leave, range(2000 if LONG_FORM else 60)))
            assert (await survivor).startswith(ANSWER)
            await _until_idle(server)

    run(scenario())


def test_a_full_queue_and_a_long_wait_are_429_from_a_server_that_stays_ready() -> None:
    config = replace(CONFIG, max_requests=1, max_queue=1, queue_timeout=0.5)

    async def scenario() -> None:
        async with demo(config) as server, server.client() as client:
            reader, writer = await server.raw()
            endless = completion("a", max_tokens=1900, ignore_eos=True, stream=True)
            writer.write(http("POST", "/v1/completions", json.dumps(endless).encode()))
            await reader.readuntil(b"data: ")
            waiting = [
                asyncio.create_task(client.post("/v1/completions", json=completion()))
                for _ in range(3)
            ]
            refused, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert refused
            assert (await client.get("/readyz")).status_code == 200
            answers = await asyncio.gather(*waiting)
            codes = sorted((each.status_code, each.json()["error"]["code"]) for each in answers)
            assert codes == [(429, "queue_full")] * 2 + [(429, "queue_timeout")]
            assert all(int(each.headers["retry-after"]) >= 1 for each in answers)
            writer.close()
            await _until_idle(server)

    run(scenario())


def test_the_admin_port_shows_the_real_engine() -> None:
    async def scenario() -> None:
        async with demo() as server, server.admin() as admin:
            before = (await admin.get("/metrics")).text
            token = (await admin.post("/canary")).json()["token"]
            assert isinstance(token, int)
            assert "vllm:num_requests_running" in before
            requests = [
                line
                for line in (await admin.get("/metrics")).text.splitlines()
                if "request_success" in line
            ]
            assert all(line.endswith(" 0.0") for line in requests if not line.startswith("#"))
            terms = (await admin.get("/debug/memory")).json()["terms"]
            assert {"weights", "kv"} <= {term["name"] for term in terms}

            reader, writer = await server.raw()
            body = json.dumps(
                completion("a", max_tokens=1500, ignore_eos=True, stream=True, user="ada")
            ).encode()
            writer.write(http("POST", "/v1/completions", body))
            await reader.readuntil(b"data: ")
            (view,) = (await admin.get("/debug/requests")).json()["requests"]
            assert view["tenant"] == "ada"
            assert view["max_tokens"] == 1500
            assert "prompt" not in view
            writer.close()
            await _until_idle(server)

    run(scenario())


def test_a_reset_of_the_prefix_cache_evicts_what_nobody_holds_and_harms_no_request() -> None:
    async def scenario() -> None:
        async with demo() as server, server.client() as client, server.admin() as admin:
            shared = chat(QUESTION * 8, temperature=0, max_tokens=4)

            async def cached() -> int:
                answer = (await client.post("/v1/chat/completions", json=shared)).json()
                count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return count

            long = completion("Fairlead", temperature=0, max_tokens=150, ignore_eos=True)
            alone = (await client.post("/v1/completions", json=long)).json()["choices"]
            assert await cached() == 0
            assert await cached() > 0
            before = (await admin.get("/debug/cache")).json()
            first = (await admin.post("/reset_prefix_cache")).json()
            assert first == {"evicted": before["cached"], "held": 0}
            assert first["evicted"] > 0
            assert (await admin.post("/reset_prefix_cache")).json() == {"evicted": 0, "held": 0}
            assert await cached() == 0
            # While a request runs: what it holds stays, and so does its text.
            running = asyncio.ensure_future(client.post("/v1/completions", json=long))
            held = []
            while not running.done():
                await cached()
                held.append((await admin.post("/reset_prefix_cache")).json()["held"])
            assert (await running).json()["choices"] == alone
            assert max(held) > 0
            after = (await admin.get("/debug/cache")).json()
            assert (after["held"], after["free"] + after["cached"]) == (0, after["units"])

    run(scenario())


def test_a_signal_ends_the_real_server_after_its_streams() -> None:
    async def scenario() -> None:
        async with demo(drain_timeout=60.0) as server:
            client = server.openai
            whole = await _greedy(client, QUESTION)

            async def stream() -> str:
                body = chat(QUESTION, temperature=0, max_tokens=40, stream=True)
                found = await client.chat.completions.create(**body)
                begun.release()
                return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(stream()) for _ in range(8)]
            for _ in streams:
                await begun.acquire()
            send_sigterm()
            assert await asyncio.gather(*streams) == [whole] * 8
            await server.task

    run(scenario())


def test_tenants_with_keys_never_share_cached_blocks(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-tenants-key\nsecond-tenants-key\n")

    async def scenario() -> None:
        async with demo(keys=KeyRing(str(keys))) as server:
            prompt = list(range(100, 164))

            async def cached(key: str) -> int:
                server.key = key
                answer = await server.openai.completions.create(**completion(prompt, max_tokens=1))
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                return answer.usage.prompt_tokens_details.cached_tokens or 0

            order = [
                "first-tenants-key",
                "second-tenants-key",
                "first-tenants-key",
                "second-tenants-key",
            ]
            assert [await cached(key) for key in order] == [0, 0, 56, 56]
            server.key = "third-key"
            with pytest.raises(openai.AuthenticationError):
                await cached("third-key")

    run(scenario())
