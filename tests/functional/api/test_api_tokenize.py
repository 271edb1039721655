"""The routes beside the generating ones: models by name, versions, tokens."""

from importlib.metadata import version
from typing import Any

import openai
import pytest

from support import tiny
from support.api_harness import MODEL, chat, completion, fake_server, is_error, run

HELLO = {"role": "user", "content": "hello"}


def test_a_model_is_found_by_its_name_only() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            assert (await server.openai.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(openai.NotFoundError) as caught:
                await server.openai.models.retrieve("owner/other")
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert "owner" not in str(caught.value)

    run(scenario())


def test_a_models_name_may_have_slashes() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            server.state.name = "owner/name"
            for path in ("/v1/models/owner/name", "/v1/models/owner%2Fname"):
                answer = await client.get(path)
                assert answer.json()["id"] == "owner/name"
            assert (await server.openai.models.retrieve("owner/name")).id == "owner/name"

    run(scenario())


def test_the_log_has_a_routes_pattern_and_not_what_a_client_put_into_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            with caplog.at_level("INFO", logger="fairlead.api"):
                await client.get("/v1/models/horse")
            routes = [each.__dict__.get("route") for each in caplog.records]
            assert "/v1/models/{name:path}" in routes
            assert not any("horse" in str(each.__dict__) for each in caplog.records)

    run(scenario())


def test_the_version_is_the_distributions() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            assert (await client.get("/version")).json() == {"version": version("fairlead")}

    run(scenario())


def test_tokenizing_gives_what_a_generation_gets() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            await client.post("/v1/completions", json=completion("naïve 日本"))
            await client.post("/v1/chat/completions", json=chat("naïve 日本"))
            bodies = [{"prompt": "naïve 日本"}, {"messages": chat("naïve 日本")["messages"]}]
            for body, seen in zip(bodies, service.seen, strict=True):
                answer = (await client.post("/tokenize", json={"model": MODEL, **body})).json()
                assert answer == {
                    "count": len(seen.prompt),
                    "max_model_len": service.max_model_len,
                    "tokens": list(seen.prompt),
                    "token_strs": None,
                }

    run(scenario())


def test_the_options_of_tokenizing_have_vllms_meaning() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:

            async def tokens(**body: Any) -> Any:
                return (await client.post("/tokenize", json=body)).json()

            open_end = await tokens(messages=[HELLO])
            closed = await tokens(messages=[HELLO], add_generation_prompt=False)
            assert tokenizer.decode(open_end["tokens"]).endswith("<|assistant|>")
            assert tokenizer.decode(closed["tokens"]).endswith("hello<|end|>")
            pieces = await tokens(prompt="hello", return_token_strs=True)
            assert pieces["token_strs"] == tokenizer.convert_ids_to_tokens(pieces["tokens"])
            plain = await tokens(prompt="hello", add_special_tokens=False)
            assert plain["tokens"] == tokenizer.encode("hello", add_special_tokens=False)

    run(scenario())


def test_tokens_become_the_text_again() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            tokens = (await client.post("/tokenize", json={"prompt": "naïve 日本 🙂"})).json()
            body = {"model": MODEL, "tokens": tokens["tokens"]}
            answer = await client.post("/detokenize", json=body)
            assert answer.json() == {"prompt": "naïve 日本 🙂"}
            assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""

    run(scenario())


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [HELLO]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 10_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": [{"role": "tool"}]}, 400, "messages.0.tool_call_id"),
        ("/tokenize", {"messages": [HELLO], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens.1"),
        ("/detokenize", {"tokens": [2, 1, 2**40]}, 400, "tokens.2"),
        ("/detokenize", {"tokens": [1, 2**31 - 1]}, 400, "tokens.1"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    route: str, body: dict[str, Any], status: int, param: str
) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            answer = await client.post(route, json=body)
            assert answer.status_code == status, answer.text
            assert is_error(answer.json())
            assert answer.json()["error"]["param"] == param

    run(scenario())


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"model":"tiny","prompt":"\xff\xfe"}', "prompt"),
        (b'{"model":"tiny","messages":[{"role":"user","content":"a\xff"}]}', "messages"),
        (b'{"model":"tiny","prompt":"x","user":"\\udc00"}', "user"),
        (b'{"model":"tiny","stop":["a","\\ud800x"],"user":"\\ud83d\\ude00"}', "stop"),
        (b'{"model":"tiny","prompt":"x","user":18446744073709551616}', "user"),
        (b'{"user":{"18446744073709551616":[1,-9223372036854775809]}}', "user"),
        (b'{"model":"tiny","prompt":' + b"[" * 40 + b"]" * 40 + b"}", "prompt"),
        (b'{"n":{"a":"]]","b":' + b"[" * 200, "n"),
        (b'{"model":"tiny","correct horse":"\xff"}', None),
        (b'{"model":"tiny","\xff":1}', None),
        (b"[" * 200, None),
    ],
)
def test_what_no_parser_reads_is_refused_with_its_field(content: bytes, param: str | None) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert "horse" not in answer.text

    run(scenario())


@pytest.mark.parametrize("limit", [0, 10_000])
def test_a_limit_is_refused_under_the_name_that_the_client_sent(limit: int) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for name in ("max_tokens", "max_completion_tokens"):
                answer = await client.post("/v1/chat/completions", json=chat(**{name: limit}))
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name)
                assert error["message"].startswith(f"{name}: ")

    run(scenario())
