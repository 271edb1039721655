"""Structured output over HTTP, on the demo model: OpenAI's client with ``parse()``, every field,
and what cannot be compiled.
"""

import asyncio
import json
import re
from enum import Enum
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import openai
from pydantic import BaseModel, ConfigDict, Field

from support.api_harness import MODEL, Server, chat, completion, run
from support.grammars import HOSTILE
from support.real_server import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "replicas": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["Service", "Deployment"]},
    },
    "required": ["name", "replicas", "kind"],
    "additionalProperties": False,
}
CHOICES = ["Kubernetes", "Fairlead", "neither"]


class Kind(Enum):
    SERVICE = "Service"
    DEPLOYMENT = "Deployment"


class Resource(BaseModel):
    """As a user would write it: pydantic's schema has titles, descriptions and references."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind = Field(description="what it is")
    name: str = Field(max_length=12)
    replicas: int = Field(ge=0, le=99)
    ports: list[int] = Field(max_length=2)
    ready: bool | None


def test_every_field_shapes_the_output() -> None:
    async def scenario() -> None:
        async with demo() as server:
            client = server.openai
            await _parse_returns_the_users_type(client)
            await _schemas_in_every_form(client)
            await _expressions_choices_and_grammars(client)
            await _streams_and_choices(client)
            await _tool_calls_are_forced(client)
            await _the_end_of_an_output(client)
            await _what_cannot_be_compiled_is_refused_by_its_field(server)
            await _hostile_grammars_stop_no_other_stream(server)
            await _metrics_count(server)

    run(scenario())


async def _text(client: openai.AsyncOpenAI, **more: Any) -> str:
    body = {"temperature": 1.0, "seed": 1, "max_tokens": 200, **more}
    answer = await client.chat.completions.create(**chat("Name a resource.", **body))
    return answer.choices[0].message.content or ""


async def _parse_returns_the_users_type(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a resource."}],
        response_format=Resource,
        max_tokens=400,
        seed=3,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Resource)
    assert answer.choices[0].finish_reason == "stop"


async def _schemas_in_every_form(client: openai.AsyncOpenAI) -> None:
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
        if strict is not None:
            form["json_schema"]["strict"] = strict  # type: ignore[index]
        jsonschema.validate(json.loads(await _text(client, response_format=form)), SCHEMA)
    for fields in (
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        jsonschema.validate(json.loads(await _text(client, extra_body=fields)), SCHEMA)
    text = await _text(client, response_format={"type": "text"})
    assert text
    any_object = await _text(client, response_format={"type": "json_object"}, temperature=0)
    assert any_object.startswith("{")


async def _expressions_choices_and_grammars(client: openai.AsyncOpenAI) -> None:
    pattern = "[a-z]{2,8}-[0-9]{3}"
    grammar = 'start: "(" start ")" | "x"'
    for form in ({"guided_regex": pattern}, {"structured_outputs": {"regex": pattern}}):
        assert re.fullmatch(pattern, await _text(client, extra_body=form))
    for one in ({"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}):
        assert await _text(client, extra_body=one) in CHOICES
    for form in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        text = await _text(client, extra_body=form)
        assert text.startswith("(" * text.count("("))
    answer = await client.completions.create(
        **completion("A name: ", extra_body={"guided_choice": CHOICES}, max_tokens=40)
    )
    assert answer.choices[0].text in CHOICES


async def _streams_and_choices(client: openai.AsyncOpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
    body = chat("Name a resource.", response_format=form, n=3, seed=5, max_tokens=200)
    whole = await client.chat.completions.create(**body)
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


async def _tool_calls_are_forced(client: openai.AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "apply", "parameters": SCHEMA}}
    for choice in ("required", {"type": "function", "function": {"name": "apply"}}):
        # Of several calls the last one would be cut.
        one = {"tool_choice": choice, "parallel_tool_calls": False}
        body = chat("Apply it.", tools=[tool], temperature=1.0, seed=2, max_tokens=400, **one)
        answer = await client.chat.completions.create(**body)
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert [call.function.name for call in calls] == ["apply"] * len(calls)
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        pieces: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(**body, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                pieces[piece.index] = pieces.get(piece.index, "") + (piece.function.arguments or "")
        assert [*pieces.values()] == [call.function.arguments for call in calls]


async def _the_end_of_an_output(client: openai.AsyncOpenAI) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "stop", "abcabc"),
        ({"max_tokens": 1}, "length", ""),
        ({"stop": "ca"}, "stop", "ab"),
        ({"extra_body": {"min_tokens": 50}}, "stop", "abcabc"),
        ({"extra_body": {"ignore_eos": True}}, "stop", "abcabc"),
    ]
    for more, reason, text in cases:
        extra = {"guided_regex": "abcabc", **more.pop("extra_body", {})}
        body = chat("Spell.", **{"max_tokens": 60, **more}, extra_body=extra)
        answer = (await client.chat.completions.create(**body)).choices[0]
        assert answer.finish_reason == reason
        assert not text or answer.message.content == text


async def _what_cannot_be_compiled_is_refused_by_its_field(server: Server) -> None:
    bad = {"type": "array", "uniqueItems": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": bad}, "guided_json"),
        ({"guided_grammar": "start: other"}, "guided_grammar"),
        ({"structured_outputs": {"json": bad}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}},
            "response_format.json_schema.schema",
        ),
    ]
    async with server.client() as client:
        for fields, param in cases:
            answer = await client.post("/v1/chat/completions", json=chat("x") | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"{param}: ")


async def _hostile_grammars_stop_no_other_stream(server: Server) -> None:
    """Counted: a stream gets its tokens while every hostile grammar is refused."""
    async with server.client() as client:
        asked = asyncio.gather(
            *(
                client.post(
                    "/v1/chat/completions", json=chat("x", max_tokens=4, structured_outputs=value)
                )
                for value in HOSTILE.values()
            )
        )
        tokens = 0
        while not asked.done():
            body = chat("Tell me.", max_tokens=20, extra_body={"ignore_eos": True}, stream=True)
            async for chunk in await server.openai.chat.completions.create(**body):
                tokens += bool(chunk.choices and chunk.choices[0].delta.content)
        assert tokens > 20
        # Some are large only for other tokenizers: they may run, and end with 400 while they do.
        statuses = [answer.status_code for answer in await asked]
        assert set(statuses) <= {200, 400}
        assert statuses.count(400) >= len(HOSTILE) // 2


async def _metrics_count(server: Server) -> None:
    async with server.admin() as admin:
        text = (await admin.get("/metrics")).text
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("fairlead_grammar_")
    }
    assert values["fairlead_grammar_compilations_total"] >= 10
    assert values["fairlead_grammar_compile_seconds_total"] > 0
    assert values["fairlead_grammar_refusals_total"] >= 5
    assert values["fairlead_grammar_cache_hits_total"] >= 5
    assert "fairlead_grammar_busy_total" in values
