"""OpenAI's client reads the shapes of a fake service with a fixed output."""

import asyncio
from typing import Any

import openai
import pytest

from fairlead_runtime.api.answers.logprob_bodies import chat_content, completion_logprobs
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import FinishReason, RequestError
from support.api_harness import MODEL, TEXT, FakeService, chat, completion, events, fake_server, run


def test_models_are_listed() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            models = [model async for model in server.openai.models.list()]
            assert [model.id for model in models] == [MODEL]

    run(scenario())


def test_a_body_without_a_model_is_for_the_one_that_is_served() -> None:
    async def scenario() -> None:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/v1/responses": {"input": "x"},
        }
        async with fake_server() as (server, _), server.client() as client:
            for route, body in bodies.items():
                for fields in ({}, {"model": None}, {"stream": True}):
                    answer = await client.post(route, json=body | fields)
                    assert answer.status_code == 200
                    assert f'"model":"{MODEL}"' in answer.text

    run(scenario())


def test_a_chat_answers_with_text_reason_and_exact_usage() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service):
            answer = await server.openai.chat.completions.create(**chat(max_tokens=12))
            (choice,) = answer.choices
            assert choice.message.content == TEXT[:12]
            assert choice.message.role == "assistant"
            assert choice.finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(service.seen[0].prompt)
            assert answer.usage.completion_tokens == 12
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 3

    run(scenario())


def test_a_chat_stream_begins_with_the_role_and_ends_each_choice_once() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            body = chat(max_tokens=12, n=3, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in await server.openai.chat.completions.create(**body)]
            assert (
                len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
            )
            assert all(chunk.usage is None for chunk in chunks[:-1])
            assert chunks[-1].choices == []
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 36
            for index in range(3):
                deltas = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
                assert deltas[0].delta.role == "assistant"
                assert all(each.delta.role is None for each in deltas[1:])
                assert "".join(each.delta.content or "" for each in deltas) == TEXT[:12]
                assert [each.finish_reason for each in deltas if each.finish_reason] == ["length"]
                assert deltas[-1].finish_reason == "length"
                assert deltas[-1].delta.content is None

    run(scenario())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_events_of_json_and_ends_with_done(route: str) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            body = (chat if "chat" in route else completion)(max_tokens=8, stream=True)
            answer = await client.post(route, json=body)
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            *chunks, done = events(answer.text)
            assert done == "[DONE]"
            assert all("usage" not in chunk for chunk in chunks)
            assert "�" not in answer.text

    run(scenario())


def test_usage_is_null_before_the_last_event() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            body = completion(max_tokens=3, stream=True, stream_options={"include_usage": True})
            *chunks, last, done = events((await client.post("/v1/completions", json=body)).text)
            assert done == "[DONE]"
            assert [chunk["usage"] for chunk in chunks] == [None] * 3
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 3

    run(scenario())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_every_event_may_show_the_usage_so_far(route: str) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            options = {"include_usage": True, "continuous_usage_stats": True}
            fields = {"max_tokens": 3, "stream": True, "stream_options": options}
            body = (chat if "chat" in route else completion)(**fields)
            *chunks, last, _ = events((await client.post(route, json=body)).text)
            prompt = len(service.seen[0].prompt)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            # The event of a chat's role has no token.
            assert counts == ([0, 1, 2, 3, 3] if "chat" in route else [1, 2, 3])
            for chunk, count in zip(chunks, counts, strict=True):
                assert chunk["usage"]["prompt_tokens"] == prompt
                assert chunk["usage"]["total_tokens"] == prompt + count
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 3

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_prompts_may_be_token_ids(prompt: Any, ids: list[tuple[int, ...]]) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service):
            answer = await server.openai.completions.create(**completion(prompt, max_tokens=2))
            assert [tuple(submission.prompt) for submission in service.seen] == ids
            assert [choice.index for choice in answer.choices] == list(range(len(ids)))

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_gives_n_choices_of_each_in_order(stream: bool) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service):
            body = completion(["one", "two", "three"], max_tokens=5, n=2, stream=stream)
            texts = [""] * 6
            answer = await server.openai.completions.create(**body)
            if stream:
                async for chunk in answer:
                    texts[chunk.choices[0].index] += chunk.choices[0].text
            else:
                assert [choice.index for choice in answer.choices] == list(range(6))
                assert answer.usage.completion_tokens == 30
                assert answer.usage.prompt_tokens == sum(len(each.prompt) for each in service.seen)
                texts = [choice.text for choice in answer.choices]
            assert texts == [TEXT[:5]] * 6
            assert not service.live

    run(scenario())


def test_every_field_reaches_the_engine() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            fields: dict[str, Any] = {
                "max_completion_tokens": 9,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 11,
                "min_p": 0.25,
                "n": 2,
                "seed": -7,
                "min_tokens": 3,
                "ignore_eos": True,
                "stop_token_ids": [4, 5],
                "stop": ["end", "fin"],
                "include_stop_str_in_output": True,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.25,
                "logit_bias": {"7": -100, "8": 1.5},
                "allowed_token_ids": [7, 8, 9],
                "bad_words": ["no"],
                "user": "ada",
                "cache_salt": "salt",
                "priority": -2,
                "logprobs": True,
                "top_logprobs": 4,
                "something_new": {"is": "ignored"},
            }
            assert (
                await client.post("/v1/chat/completions", json=chat(**fields))
            ).status_code == 200
            (seen,) = service.seen
            params = seen.params
            assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (
                9,
                0.5,
                0.9,
                11,
            )
            assert (params.min_p, params.n, params.seed, params.min_tokens) == (0.25, 2, -7, 3)
            assert (params.ignore_eos, params.stop_token_ids, params.logprobs) == (True, (4, 5), 4)
            assert (
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
            ) == (0.5, -0.5, 1.25)
            assert params.logit_bias == ((7, -100.0), (8, 1.5))
            assert (params.allowed_token_ids, params.include_stop_str_in_output) == (
                (7, 8, 9),
                True,
            )
            assert params.bad_words
            assert all(isinstance(word, tuple) for word in params.bad_words)
            assert (params.stop, seen.tenant, seen.salt, seen.priority) == (
                ("end", "fin"),
                "ada",
                b"salt",
                -2,
            )

    run(scenario())


def test_a_missing_or_null_field_gets_its_default() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            nulls: dict[str, Any] = dict.fromkeys(
                ["temperature", "top_p", "n", "seed", "stop", "stream", "user", "logprobs"]
            )
            await client.post("/v1/completions", json=completion(**nulls))
            await client.post("/v1/chat/completions", json=chat(**nulls, max_tokens=None))
            first, second = (each.params for each in service.seen)
            assert (first.temperature, first.top_p, first.n, first.max_tokens) == (1.0, 1.0, 1, 16)
            assert (second.temperature, second.max_tokens) == (1.0, None)

    run(scenario())


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            neutral = {
                "presence_penalty": 0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "logit_bias": {},
                "tools": [],
                "tool_choice": "none",
                "response_format": {"type": "text"},
                "echo": False,
                "best_of": 1,
                "suffix": None,
            }
            assert (
                await client.post("/v1/completions", json=completion(**neutral))
            ).status_code == 200

    run(scenario())


def test_a_message_may_be_a_list_of_text_parts() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
            messages = [
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": parts},
            ]
            plain = [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "hel\nlo"},
            ]
            for each in (messages, plain):
                body = {"model": MODEL, "messages": each}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert service.seen[0].prompt == service.seen[1].prompt

    run(scenario())


def test_logprobs_of_a_chat_have_text_bytes_and_the_likeliest() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            body = chat(max_tokens=4, logprobs=True, top_logprobs=2)
            answer = await server.openai.chat.completions.create(**body)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            assert [bytes(each.bytes or []).decode() for each in logprobs.content] == list(TEXT[:4])
            assert [each.logprob for each in logprobs.content] == [-20.0] * 4
            assert [[top.logprob for top in each.top_logprobs] for each in logprobs.content] == [
                [-0.5, -1.5]
            ] * 4

    run(scenario())


def test_logprobs_of_a_completion_are_parallel_lists() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            whole = await server.openai.completions.create(**completion(max_tokens=4, logprobs=1))
            shape = whole.choices[0].logprobs
            assert shape is not None
            assert shape.tokens == list(TEXT[:4])
            assert shape.text_offset == [0, 1, 2, 3]
            assert shape.token_logprobs == [-20.0] * 4
            assert shape.top_logprobs is not None
            assert shape.top_logprobs[0] == {"t0": -0.5, TEXT[0]: -20.0}
            offsets: list[int] = []
            body = completion(max_tokens=4, logprobs=0, stream=True)
            async for chunk in await server.openai.completions.create(**body):
                logprobs = chunk.choices[0].logprobs
                assert logprobs is not None
                assert logprobs.text_offset is not None
                offsets += logprobs.text_offset
            assert offsets == shape.text_offset

    run(scenario())


def test_a_token_may_be_a_part_of_a_character() -> None:
    token_bytes = {1: "日".encode()[:2], 2: "日".encode()[2:], 3: b"n"}
    ids = [3, 1, 2]
    logprobs = [
        {
            3: Logprob(-1.0, 2, "n"),
            1: Logprob(-0.5, 1, "�"),
        },  # the chosen one is the second likeliest
        {1: Logprob(-0.5, 1, "�")},
        {2: Logprob(float("-inf"), 1, "�")},
    ]
    content = chat_content(ids, logprobs, 1, token_bytes)
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "n日"
    assert [[top["bytes"] for top in each["top_logprobs"]] for each in content[:2]] == [
        [[230, 151]]
    ] * 2
    assert content[2]["logprob"] == -9999.0
    shape = completion_logprobs(ids, logprobs, 1, token_bytes, [10, 11, 12])
    assert shape["tokens"] == ["n", "bytes:\\xe6\\x97", "bytes:\\xa5"]
    assert shape["text_offset"] == [10, 11, 12]
    assert shape["top_logprobs"][0] == {"bytes:\\xe6\\x97": -0.5, "n": -1.0}


def test_of_tokens_that_are_equally_likely_no_more_are_listed_than_asked_for() -> None:
    entries = {5: Logprob(-1.0, 1, "b"), 3: Logprob(-1.0, 1, "a"), 4: Logprob(-1.0, 2, "c")}
    for top in (0, 1, 2, 3):
        (content,) = chat_content([5], [entries], top, {})
        assert [each["token"] for each in content["top_logprobs"]] == ["b", "a", "c"][:top]


def test_no_two_tokens_share_a_name_among_the_likeliest() -> None:
    likeliest = {5: Logprob(-0.5, 1, "A"), 3: Logprob(-1.0, 2, "A"), 4: Logprob(-2.0, 3, "A")}
    for chosen, names in (
        (5, ["A", "bytes:\\x41", "token_id:4"]),
        (4, ["bytes:\\x41", "token_id:3", "A"]),
    ):
        shape = completion_logprobs([chosen], [likeliest], 3, {}, [0])
        assert [*shape["top_logprobs"][0]] == names
        assert shape["tokens"] == ["A"]
        assert shape["top_logprobs"][0]["A"] == likeliest[chosen].logprob


def test_a_failure_before_the_first_byte_has_its_status() -> None:
    async def scenario() -> None:
        async with fake_server(FakeService(finish=FinishReason.ERROR)) as (server, service):
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    await server.openai.completions.create(
                        **completion(max_tokens=1, stream=stream)
                    )
                assert caught.value.status_code == 500
                assert caught.value.type == "server_error"
            assert not service.live

    run(scenario())


def test_a_failure_after_the_first_byte_is_an_event_and_the_end() -> None:
    async def scenario() -> None:
        service = FakeService(error=ServiceError("the engine stopped"))
        async with fake_server(service) as (server, _), server.client() as client:
            answer = await client.post(
                "/v1/completions", json=completion(max_tokens=3, stream=True)
            )
            assert answer.status_code == 200
            *chunks, failure, done = events(answer.text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[:3]
            assert failure["error"]["message"] == "the engine stopped"
            assert done == "[DONE]"
            assert not service.live

    run(scenario())


def test_one_refused_prompt_of_a_list_cancels_the_others() -> None:
    async def scenario() -> None:
        service = FakeService(hang=True, refuse=RequestError("prompt", "too long"), refuse_after=2)
        async with fake_server(service) as (server, _), server.client() as client:
            answer = await client.post("/v1/completions", json=completion(["a", "b", "c"]))
            assert answer.status_code == 400
            assert len(service.seen) == 2
            assert not service.live

    run(scenario())


def test_streams_of_many_clients_do_not_mix() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            client = server.openai

            async def one(length: int) -> str:
                body = chat(max_tokens=length, stream=True)
                stream = await client.chat.completions.create(**body)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            lengths = [1 + number % len(TEXT) for number in range(100)]
            assert await asyncio.gather(*map(one, lengths)) == [TEXT[:length] for length in lengths]

    run(scenario())
