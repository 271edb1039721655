"""What is refused, and how: always OpenAI's error object, the right status, the field's name, and
no echo.
"""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.ports.app import public_app
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front import limits
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.limits import PromptPool, read_body
from fairlead_runtime.front.strict_json import MAX_BRACKETS, MAX_KEYS, parse_object
from fairlead_runtime.outputs import Draining, EngineDead, QueueFull, QueueTimeout
from fairlead_runtime.request.sequence import MAX_LOGPROBS, RequestError
from fairlead_runtime.sizing.traffic import BODY
from support.api_harness import (
    MODEL,
    FakeService,
    asgi,
    backend_of,
    chat,
    completion,
    events,
    fake_server,
    is_error,
    run,
)
from support.full import LONG_FORM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SECRET = "correct horse battery staple"

# body, route, status, param
REFUSED: list[tuple[dict[str, Any], str, int, str]] = [
    ({**completion(), "model": ""}, COMPLETIONS, 404, "model"),
    ({**completion(), "model": "other"}, COMPLETIONS, 404, "model"),
    ({**completion(), "model": 3}, COMPLETIONS, 400, "model"),
    ({"model": "tiny"}, COMPLETIONS, 400, "prompt"),
    (completion(None), COMPLETIONS, 400, "prompt"),
    (completion(""), COMPLETIONS, 400, "prompt"),
    (completion([]), COMPLETIONS, 400, "prompt"),
    (completion([[]]), COMPLETIONS, 400, "prompt"),
    (completion([1, "a"]), COMPLETIONS, 400, "prompt"),
    (completion([True]), COMPLETIONS, 400, "prompt"),
    (completion([1.5]), COMPLETIONS, 400, "prompt"),
    (completion(["a"] * 1025), COMPLETIONS, 400, "prompt"),
    (completion(["a"] * 33, n=125), COMPLETIONS, 400, "n"),
    (completion("x" * 10_000), COMPLETIONS, 400, "prompt"),
    (completion(max_tokens=True), COMPLETIONS, 400, "max_tokens"),
    (completion(max_tokens="3"), COMPLETIONS, 400, "max_tokens"),
    (completion(max_tokens=3.5), COMPLETIONS, 400, "max_tokens"),
    (completion(max_tokens=-1), COMPLETIONS, 400, "max_tokens"),
    (chat(max_tokens=0), CHAT, 400, "max_tokens"),
    (completion(max_tokens=10_000), COMPLETIONS, 400, "max_tokens"),
    (completion(max_tokens=10**50), COMPLETIONS, 400, "max_tokens"),
    (completion(max_tokens=3, max_completion_tokens=4), COMPLETIONS, 400, "max_tokens"),
    (completion(n=0), COMPLETIONS, 400, "n"),
    (completion(n=129), COMPLETIONS, 400, "n"),
    (completion(n=True), COMPLETIONS, 400, "n"),
    (completion(best_of=2), COMPLETIONS, 400, "best_of"),
    (completion(temperature=-0.1), COMPLETIONS, 400, "temperature"),
    (completion(temperature="1"), COMPLETIONS, 400, "temperature"),
    (completion(temperature=10**400), COMPLETIONS, 400, "temperature"),
    (completion(top_p=-0.1), COMPLETIONS, 400, "top_p"),
    (completion(top_p=1.01), COMPLETIONS, 400, "top_p"),
    (completion(top_k=-2), COMPLETIONS, 400, "top_k"),
    (completion(min_p=2), COMPLETIONS, 400, "min_p"),
    (completion(seed=2**63), COMPLETIONS, 400, "seed"),
    (completion(seed=1.5), COMPLETIONS, 400, "seed"),
    (completion(min_tokens=-1), COMPLETIONS, 400, "min_tokens"),
    (completion(min_tokens=20, max_tokens=10), COMPLETIONS, 400, "min_tokens"),
    (completion(stop=["a"] * 33), COMPLETIONS, 400, "stop"),
    (completion(stop=[""]), COMPLETIONS, 400, "stop"),
    (completion(stop=["x" * 257]), COMPLETIONS, 400, "stop"),
    (completion(stop=[1]), COMPLETIONS, 400, "stop"),
    (completion(stop={"a": 1}), COMPLETIONS, 400, "stop"),
    (completion(stop_token_ids=[-1]), COMPLETIONS, 400, "stop_token_ids"),
    (completion(stop_token_ids=list(range(65))), COMPLETIONS, 400, "stop_token_ids"),
    (completion(logprobs=MAX_LOGPROBS + 1), COMPLETIONS, 400, "logprobs"),
    (completion(logprobs=-1), COMPLETIONS, 400, "logprobs"),
    (completion(logprobs=True), COMPLETIONS, 400, "logprobs"),
    (completion(stream="true"), COMPLETIONS, 400, "stream"),
    (completion(stream_options={"include_usage": True}), COMPLETIONS, 400, "stream_options"),
    (completion(stream=True, stream_options=[]), COMPLETIONS, 400, "stream_options"),
    (completion(timeout=0), COMPLETIONS, 400, "timeout"),
    (completion(timeout=86_401), COMPLETIONS, 400, "timeout"),
    (completion(timeout="1"), COMPLETIONS, 400, "timeout"),
    (completion(user=5), COMPLETIONS, 400, "user"),
    (completion(user="x" * 257), COMPLETIONS, 400, "user"),
    (completion(priority=2**31), COMPLETIONS, 400, "priority"),
    (completion(cache_salt=1), COMPLETIONS, 400, "cache_salt"),
    (completion(ignore_eos=1), COMPLETIONS, 400, "ignore_eos"),
    (completion(include_stop_str_in_output="yes"), COMPLETIONS, 400, "include_stop_str_in_output"),
    (completion(presence_penalty=2.5), COMPLETIONS, 400, "presence_penalty"),
    (completion(frequency_penalty=-2.5), COMPLETIONS, 400, "frequency_penalty"),
    (completion(repetition_penalty=0), COMPLETIONS, 400, "repetition_penalty"),
    (completion(repetition_penalty=101), COMPLETIONS, 400, "repetition_penalty"),
    (completion(logit_bias={"5": 101}), COMPLETIONS, 400, "logit_bias"),
    (completion(logit_bias={"five": 1}), COMPLETIONS, 400, "logit_bias"),
    (completion(logit_bias={"-1": 1}), COMPLETIONS, 400, "logit_bias"),
    (completion(logit_bias={"9" * 5000: 1}), COMPLETIONS, 400, "logit_bias"),
    (completion(logit_bias=[5]), COMPLETIONS, 400, "logit_bias"),
    (completion(logit_bias={str(i): 1 for i in range(301)}), COMPLETIONS, 400, "logit_bias"),
    (completion(allowed_token_ids=[]), COMPLETIONS, 400, "allowed_token_ids"),
    (completion(allowed_token_ids=[-1]), COMPLETIONS, 400, "allowed_token_ids"),
    (completion(allowed_token_ids=["5"]), COMPLETIONS, 400, "allowed_token_ids.0"),
    (completion(bad_words="no"), COMPLETIONS, 400, "bad_words"),
    (completion(bad_words=[[5]]), COMPLETIONS, 400, "bad_words.0"),
    (completion(bad_words=[" "]), COMPLETIONS, 400, "bad_words"),
    (completion(bad_words=["x" * 65]), COMPLETIONS, 400, "bad_words"),
    (completion(bad_words=["x"] * 65), COMPLETIONS, 400, "bad_words"),
    (chat(echo="yes"), CHAT, 400, "echo"),
    (completion([[5] * 900] * 40, prompt_logprobs=20), COMPLETIONS, 400, "prompt_logprobs"),
    (completion([[5] * 900] * 40, echo=True, logprobs=20), COMPLETIONS, 400, "logprobs"),
    (completion(echo="yes"), COMPLETIONS, 400, "echo"),
    (completion(prompt_logprobs=21), COMPLETIONS, 400, "prompt_logprobs"),
    (completion(prompt_logprobs=-1), COMPLETIONS, 400, "prompt_logprobs"),
    (completion(prompt_logprobs=1, stream=True), COMPLETIONS, 400, "prompt_logprobs"),
    (completion(suffix="x"), COMPLETIONS, 400, "suffix"),
    (chat(tools=[{"type": "function"}]), CHAT, 400, "tools.0.function"),
    (completion(tools=[{"type": "function"}]), COMPLETIONS, 400, "tools"),
    (chat(tool_choice="required"), CHAT, 400, "tool_choice"),
    (chat(response_format={"type": "xml"}), CHAT, 400, "response_format.type"),
    (chat(response_format={"type": "json_schema"}), CHAT, 400, "response_format.json_schema"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        CHAT,
        400,
        "response_format.json_schema.schema",
    ),
    (
        chat(structured_outputs={"structural_tag": "x"}),
        CHAT,
        400,
        "structured_outputs.structural_tag",
    ),
    (chat(structured_outputs={"regex": "["}, guided_json={}), CHAT, 400, "guided_json"),
    (chat(structured_outputs={"regex": 3}), CHAT, 400, "structured_outputs.regex"),
    (completion(guided_json="{"), COMPLETIONS, 400, "guided_json"),
    (completion(guided_regex=5), COMPLETIONS, 400, "guided_regex"),
    (completion(guided_choice=["a", 1]), COMPLETIONS, 400, "guided_choice"),
    (completion(guided_grammar={}), COMPLETIONS, 400, "guided_grammar"),
    (chat(chat_template="{{ 1 }}"), CHAT, 400, "chat_template"),
    (chat(top_logprobs=2), CHAT, 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), CHAT, 400, "top_logprobs"),
    (chat(logprobs=1), CHAT, 400, "logprobs"),
    ({**chat(), "messages": []}, CHAT, 400, "messages"),
    ({**chat(), "messages": "hello"}, CHAT, 400, "messages"),
    ({**chat(), "messages": [{"role": "user", "content": "x"}] * 1025}, CHAT, 400, "messages"),
    ({**chat(), "messages": [{"role": "wizard", "content": "x"}]}, CHAT, 400, "messages.0.role"),
    ({**chat(), "messages": [{"role": "user", "content": 5}]}, CHAT, 400, "messages.0.content"),
    (
        {**chat(), "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        CHAT,
        400,
        "messages.0.content",
    ),
    (
        {**chat(), "messages": [{"role": "tool", "content": "x"}]},
        CHAT,
        400,
        "messages.0.tool_call_id",
    ),
    (chat("x" * 10_000), CHAT, 400, "messages"),
    (chat(max_tokens=10_000), CHAT, 400, "max_tokens"),
]

BROKEN: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"model":"tiny","prompt":"x"',
    b'{"model":"tiny","prompt":"x"}}',
    b'{"model":"tiny","prompt":"x","temperature":NaN}',
    b'{"model":"tiny","prompt":"x","temperature":Infinity}',
    b'{"model":"tiny","prompt":"x","temperature":-Infinity}',
    b'{"model":"tiny","prompt":"x","temperature":1e999}',
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"tiny","prompt":"x","user":"\\udc00"}',
    b'{"model":"tiny","prompt":"x","ignored":"\\ud800x"}',
    b'{"model":"tiny","prompt":"\xff\xfe"}',
    b'\xef\xbb\xbf{"model":"tiny","prompt":"x"}',
    b'{"model":"tiny","prompt":"x","prompt":"y"}',
    b'{"model":"tiny","prompt":"x","ignored":{"a":1,"a":2}}',
    b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}",
    b'{"model":"tiny","prompt":"x","seed":' + b"9" * 4000 + b"}",
    b'{"model":"tiny","prompt":"x","ignored":' + b"[" * 33 + b"]" * 33 + b"}",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"model":"tiny","prompt":"x",' + b",".join(b'"k%d":1' % n for n in range(30_000)) + b"}",
    b'{"model":"tiny","prompt":"' + b"\\" * 99_999,
    b'{"model":"tiny","prompt":[' + b'"",' * 250_000 + b'""]}',
    b"{'model': 'tiny'}",
]


async def _post(client: httpx.AsyncClient, route: str, content: bytes) -> httpx.Response:
    return await client.post(route, content=content, headers={"content-type": "application/json"})


def _check_error(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    assert is_error(answer.json())
    assert len(answer.content) <= 4096
    assert answer.headers["content-type"] == "application/json"


def test_a_bad_field_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for body, route, status, param in REFUSED:
                answer = await client.post(
                    route, content=json.dumps(body), headers={"content-type": "application/json"}
                )
                _check_error(answer, status)
                assert answer.json()["error"]["param"] == param, (body, answer.text)
                assert param.split(".")[0] in answer.json()["error"]["message"]
            assert not service.live

    run(scenario())


@pytest.mark.parametrize(
    ("route", "field", "part", "refusal"),
    [
        (CHAT, "messages", {"type": "image_url", "image_url": {}}, "image_url; images are not"),
        (CHAT, "messages", {"type": "input_audio"}, "input_audio; sound is not"),
        (CHAT, "messages", {"type": "image_pil"}, "image_pil; images are not"),
        (CHAT, "messages", {"image_url": "x"}, "image_url; images are not"),
        (
            CHAT,
            "messages",
            {"type": "video" + "_x" * 99},
            "video" + "_x" * 29 + "_; videos are not",
        ),
        ("/v1/responses", "input", {"type": "input_image"}, "input_image; images are not"),
        ("/v1/responses", "input", {"type": "input_file"}, "input_file; files are not"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(
    route: str, field: str, part: dict[str, Any], refusal: str
) -> None:
    kind, words = refusal.split("; ")
    text = {"type": "input_text" if field == "input" else "text", "text": "What is this?"}

    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for content in ([text, part], part):
                body = {"model": "tiny", field: [{"role": "user", "content": content}]}
                answer = await client.post(route, json=body)
                _check_error(answer, 400)
                message = f"{field}.0.content: {kind}: this model is served for text; {words}"
                assert answer.json()["error"]["message"] == message
            assert not service.live

    run(scenario())


def test_a_malformed_json_body_is_a_400() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for content in BROKEN:
                _check_error(await _post(client, COMPLETIONS, content), 400)
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200

    run(scenario())


def test_a_prompt_full_of_json_punctuation_is_accepted() -> None:
    async def scenario() -> None:
        async with (
            fake_server(FakeService(max_model_len=1_000_000)) as (server, _),
            server.client() as client,
        ):
            # More brackets and colons than a body may have outside strings, and not much else: the
            # time for reading and tokenizing is bounded, too.
            prompt = '{"a": "\\\\"}' + "[{" * (MAX_BRACKETS + 1) + ":" * (MAX_KEYS + 1)
            answer = await client.post(COMPLETIONS, json=completion(prompt))
            assert answer.status_code == 200, answer.text

    run(scenario())


def test_errors_never_echo_the_input() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            bodies: list[dict[str, Any]] = [
                {**chat(SECRET), "messages": [{"role": SECRET, "content": SECRET}] * 100},
                {**chat(), "messages": [{"role": "user", "content": [{"type": SECRET}]}]},
                completion(SECRET * 1000),
                completion(SECRET, stop=SECRET * 100),
                completion(SECRET, temperature=SECRET),
                {**completion(SECRET), "model": SECRET},
                completion(SECRET, tools=[SECRET]),
                {SECRET: SECRET},
            ]
            for body in bodies:
                answer = await client.post(CHAT if "messages" in body else COMPLETIONS, json=body)
                assert answer.status_code in {400, 404}
                assert "horse" not in answer.text
                assert len(answer.content) <= 4096
            answer = await _post(
                client, COMPLETIONS, json.dumps(completion(SECRET)).encode() + b"}"
            )
            assert "horse" not in answer.text

    run(scenario())


def test_at_most_five_problems_are_listed() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            fields = [
                "max_tokens",
                "n",
                "seed",
                "top_k",
                "min_tokens",
                "stream",
                "user",
                "temperature",
            ]
            answer = await client.post(
                COMPLETIONS, json=completion(**{name: [] for name in fields})
            )
            _check_error(answer, 400)
            assert answer.json()["error"]["message"].count(";") == 4

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("GET", "/metrics", 404),
        ("POST", "/drain", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/../metrics", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
    ],
)
def test_unknown_paths_and_methods_are_errors_too(method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            _check_error(await client.request(method, path), status)

    run(scenario())


def test_a_body_over_the_limit_is_refused() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            _check_error(await _post(client, COMPLETIONS, b" " * (BODY + 1)), 413)

            async def pieces() -> Any:
                for _ in range(40):
                    yield b" " * 65536

            headers = {"content-type": "application/json"}
            _check_error(await client.post(COMPLETIONS, content=pieces(), headers=headers), 413)

    run(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_bodies_that_are_not_plain_json_are_refused(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            _check_error(await client.post(COMPLETIONS, content=b"{}", headers=headers), 415)

    run(scenario())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full", 3.0), 429, "queue_full"),
        (Draining("going"), 503, "draining"),
        (QueueTimeout("waited"), 429, "queue_timeout"),
        (EngineDead("dead"), 503, "engine_dead"),
    ],
)
def test_an_unavailable_service_says_when_to_retry(
    error: Exception, status: int, code: str
) -> None:
    async def scenario() -> None:
        async with fake_server(FakeService(refuse=error)) as (server, _), server.client() as client:
            for body in (completion(), completion(stream=True)):
                answer = await client.post(COMPLETIONS, json=body)
                _check_error(answer, status)
                assert answer.json()["error"]["code"] == code
                assert int(answer.headers["retry-after"]) >= 1

    run(scenario())


def test_bodies_are_bounded_together_while_they_arrive_and_wait() -> None:
    """100 bytes for all: a third body of 40 is refused at its first byte, until one is done."""

    async def scenario() -> None:
        pool = PromptPool(workers=1, max_bytes=100)
        first = {"type": "http.request", "body": b"x" * 40, "more_body": True}
        last = {"type": "http.request", "body": b"", "more_body": False}
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}

        class Sender:
            def __init__(self) -> None:
                self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
                self.messages.put_nowait(first)
                self.task = asyncio.create_task(self.read())

            async def read(self) -> bytes:
                with pool.bodies.hold() as take:
                    return await read_body(scope, self.messages.get, take)

        senders = [Sender(), Sender()]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await Sender().task
        assert caught.value.status == 429
        assert int(caught.value.headers["retry-after"]) >= 1
        for sender in senders:
            sender.messages.put_nowait(last)
            assert await sender.task == b"x" * 40
        with pool.bodies.hold() as take:
            take(100)
        pool.close()

    run(scenario())


def test_a_whole_answer_with_logprobs_is_bounded_with_the_arithmetic() -> None:
    async def scenario() -> None:
        async with fake_server(service := FakeService()) as (server, _), server.client() as client:
            body = completion(["a"] * 64, n=8, max_tokens=400, logprobs=20)
            answer = await client.post(COMPLETIONS, json=body)
            _check_error(answer, 400)
            error = answer.json()["error"]
            assert "512 choices * 400 max_tokens * (256 + (20 + 1) log-p" in error["message"]
            assert error["param"] == "logprobs"
            assert not service.seen
            for allowed in ({"max_tokens": 2}, {"max_tokens": 2, "stream": True}):
                answer = await client.post(COMPLETIONS, json=body | allowed)
                assert answer.status_code == 200

    run(scenario())


def test_whole_answers_with_logprobs_share_a_budget_and_give_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of 58,880 bytes exceed 100,000; those of the first are free once its client is gone."""
    monkeypatch.setattr(limits, "ANSWER_BYTES", 100_000)
    body = completion("a", n=8, max_tokens=10, logprobs=2)
    await_the_budget_of(body)


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 2, "max_tokens": 1}),
        ("logprobs", {"logprobs": 2, "echo": True, "max_tokens": 0}),
        ("logprobs", {"logprobs": 2, "echo": True, "max_tokens": 0, "stream": True}),
    ],
)
def test_log_probabilities_of_prompts_are_in_the_budget_of_answers(
    monkeypatch: pytest.MonkeyPatch, field: str, more: dict[str, Any]
) -> None:
    """A prompt of 80 tokens takes 58,880 bytes; a stream shows them in one event."""
    monkeypatch.setattr(limits, "ANSWER_BYTES", 100_000)
    body = completion([5] * 80, **more)
    await_the_budget_of(body)

    async def scenario() -> None:
        async with fake_server(service := FakeService()) as (server, _), server.client() as client:
            answer = await client.post(COMPLETIONS, json=body | {"prompt": [[5] * 80] * 2})
            _check_error(answer, 400)
            error = answer.json()["error"]
            assert "160 prompt tokens * (256 + (2 + 1) log-probabilities * 160" in error["message"]
            assert error["param"] == field
            assert not service.seen

    run(scenario())


def await_the_budget_of(body: dict[str, Any]) -> None:
    """Two of them exceed the budget; the first one's part is free once its client is gone."""

    async def scenario() -> None:
        service = FakeService(hang=True)
        async with fake_server(service) as (server, _), server.client() as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await service.hanging.wait()
            answer = await client.post(COMPLETIONS, json=body)
            _check_error(answer, 429)
            assert "stream" in answer.json()["error"]["message"]
            first.cancel()
            await service.closed.wait()
            service.hang = False
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    run(scenario())


def test_an_unexpected_error_shows_no_details(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with (
            fake_server(FakeService(refuse=KeyError(SECRET))) as (server, _),
            server.client() as client,
        ):
            answer = await client.post(COMPLETIONS, json=completion())
            _check_error(answer, 500)
            assert "horse" not in answer.text

        async with (
            fake_server(FakeService(error=KeyError(SECRET))) as (server, _),
            server.client() as client,
        ):
            answer = await client.post(COMPLETIONS, json=completion(max_tokens=2, stream=True))
            assert answer.status_code == 200
            assert events(answer.text)[-2]["error"]["code"] == "internal_error"
            assert "horse" not in answer.text

    run(scenario())
    assert caplog.text.count("KeyError") == 2
    assert "horse" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_longer_than_its_timeout_ends_and_so_does_its_work(
    stream: bool,
) -> None:
    async def scenario() -> None:
        service = FakeService(hang=True)
        async with fake_server(service) as (server, _), server.client() as client:
            body = completion(timeout=0.2, stream=stream)
            answer = await client.post(COMPLETIONS, json=body)
            if answer.status_code == 200:  # the stream had begun
                assert stream
                failure = events(answer.text)[-2]
            else:
                _check_error(answer, 408)
                failure = answer.json()
            assert (failure["error"]["code"], failure["error"]["param"]) == ("timeout", "timeout")
            assert len(service.seen) == 1
            assert not service.live
            service.hang = False
            in_time = await client.post(COMPLETIONS, json=completion(timeout=3600))
            assert in_time.status_code == 200

    run(scenario())


def test_a_client_request_id_is_kept_only_when_it_is_safe_to_log() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for sent, kept in [("abc-1.2_3", True), ("a b", False), ("x" * 65, False), ("", False)]:
                answer = await client.get("/healthz", headers={"x-request-id": sent})
                assert (answer.headers["x-request-id"] == sent) is kept
                assert answer.headers["x-request-id"]

    run(scenario())


def _mutate(rng: random.Random, base: bytes) -> bytes:
    """One to four small injuries: bytes changed, cut, doubled or swapped for JSON's own trouble
    makers.
    """
    tokens = [
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b'"\\ud800"',
        b"[]",
        b"{}",
        b'""',
        b"\xff",
        b"\\",
        b'"',
        b"9" * 30,
    ]
    body = base
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        to = min(len(body), at + rng.randrange(8))
        token, byte = rng.choice(tokens), bytes([rng.randrange(256)])
        body = rng.choice(
            [
                body[:at] + body[to:],
                body[:at] + token + body[at:],
                body[:at] + token + body[to:],
                body[:to] + body[at:],
                body[:at] + byte + body[at + 1 :],
            ]
        )
    return body


def _swap_values(rng: random.Random, base: dict[str, Any]) -> bytes:
    """A well-formed body with values of other types in some places."""
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        2**64,
        "",
        "x",
        [],
        [[]],
        {},
        {"a": []},
        [None],
        ["a", 1],
        "x" * 300,
    ]
    body = dict(base)
    for name in rng.sample(sorted(body), rng.randint(1, 3)):
        body[name] = rng.choice(odd)
    return json.dumps(body).encode()


FULL = chat(
    max_tokens=3,
    temperature=0.5,
    top_p=0.9,
    n=2,
    seed=1,
    stop=["a"],
    stream=False,
    user="u",
    priority=1,
    top_k=3,
    min_p=0.1,
    min_tokens=1,
    stop_token_ids=[1],
    ignore_eos=True,
    logprobs=True,
    top_logprobs=1,
    cache_salt="s",
    stream_options=None,
    tools=[],
    logit_bias={},
    best_of=None,
)
_CHATS = {"messages", "top_logprobs"}
TEXT = {name: value for name, value in FULL.items() if name not in _CHATS} | {
    "prompt": ["one", "two"],
    "logprobs": 2,
}


def test_mutated_bodies_are_refused_by_the_checks_or_valid() -> None:
    """Parsing and every check alone, without an application."""
    rng, refused = random.Random(23), 0
    count = 5_000_000 if LONG_FORM else 20_000
    checked = [(request_bodies.chat, FULL), (request_bodies.completion, TEXT)]
    texts = [json.dumps(base).encode() for _, base in checked]
    for number in range(count):
        check, base = checked[number % 2]
        changed = _swap_values(rng, base) if number % 4 < 2 else _mutate(rng, texts[number % 2])
        try:
            check(parse_object(changed), MODEL)
        except (ApiError, RequestError):
            refused += 1
    assert count / 4 < refused < count


def test_mutated_bodies_are_answered_and_never_with_a_500() -> None:
    async def scenario() -> None:
        rng, service, pool = random.Random(11), FakeService(), PromptPool()
        state = ServerState(name=MODEL)
        state.attach(backend_of(service))
        app = public_app(state, pool)
        statuses: dict[int, int] = {}
        for number in range(200_000 if LONG_FORM else 4000):
            route, base = (CHAT, FULL) if number % 2 else (COMPLETIONS, TEXT)
            body = (
                _swap_values(rng, base)
                if number % 4 < 2
                else _mutate(rng, json.dumps(base).encode())
            )
            status, answer = await asgi(app, "POST", route, body)
            statuses[status] = statuses.get(status, 0) + 1
            if status != 200:
                assert status in {400, 404}, (body, answer)
                assert is_error(json.loads(answer))
                assert len(answer) <= 4096
        pool.close()
        assert statuses[400] > 1500
        assert statuses[200] > 200
        assert not service.live

    run(scenario())
