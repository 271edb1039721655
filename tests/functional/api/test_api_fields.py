"""No field of a body is silently another answer: model's values, foreign names, template fields."""

from typing import Any

import pytest

from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.refused_fields import REFUSED, REFUSED_OF_MESSAGES
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody
from fairlead_runtime.api.responses import bodies
from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.front.errors import ApiError
from support.api_harness import (
    FIRST_TOKEN,
    MODEL,
    FakeService,
    chat,
    completion,
    events,
    fake_server,
    run,
)

ROUTES = {
    "/v1/completions": completion(),
    "/v1/chat/completions": chat(),
    "/v1/responses": {"model": "tiny", "input": "hello"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_models_sampling_values_count_where_a_body_leaves_them_out(route: str) -> None:
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    own = {"temperature": 0, "top_k": 0, "repetition_penalty": None}

    async def scenario() -> None:
        service = FakeService(rules=BodyRules(sampling=model))
        async with fake_server(service) as (server, _), server.client() as client:
            for more, values in (({}, model), (own, model | {"temperature": 0, "top_k": 0})):
                answer = await client.post(route, json=ROUTES[route] | more)
                assert answer.status_code == 200, answer.text
                params = service.seen[-1].params
                assert {name: getattr(params, name) for name in model} == values
            if "responses" in route:
                assert (answer.json()["temperature"], answer.json()["top_p"]) == (0, 0.95)

    run(scenario())


# -- fields of other servers

RESPONSE = ROUTES["/v1/responses"]
CHECKS = [
    *((request_bodies.chat, chat(), name) for name in REFUSED.keys() - ChatBody.model_fields),
    *(
        (request_bodies.completion, completion(), name)
        for name in REFUSED.keys() - CompletionBody.model_fields
    ),
    *((bodies.response, RESPONSE, name) for name in bodies._REFUSED),
    *((bodies.response, RESPONSE, name) for name in ("regex_of_nobody", "mirostat")),
]


def test_fields_that_would_change_the_answer_are_refused_by_name_unless_they_are_neutral() -> None:
    for check, body, name in CHECKS:
        known = REFUSED.get(name) or bodies._REFUSED.get(name)
        for neutral in (None, *(known.neutral if known else ("any",))):
            check(body | {name: neutral}, MODEL)
        if known:
            with pytest.raises(ApiError, match=f"{name}: is not supported; ") as refused:
                check(body | {name: "another value"}, MODEL)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", REFUSED_OF_MESSAGES)
def test_fields_of_a_message_that_would_change_the_prompt_are_refused_too(name: str) -> None:
    message = {"role": "assistant", "content": "x"}
    for neutral in (None, *REFUSED_OF_MESSAGES[name].neutral):
        request_bodies.chat(chat(messages=[message | {name: neutral}]), MODEL)
    with pytest.raises(ApiError, match=f"messages.1.{name}: is not supported; "):
        request_bodies.chat(chat(messages=[message, message | {name: "x"}]), MODEL)


SCHEMA = {"type": "object", "properties": {"n": {"const": 42}}}
JSON = ("json", '{"type":"object","properties":{"n":{"const":42}}}')
GRAMMAR = 'root ::= "a"'


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_schema", "value": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json_object", ""),
        ({"json_schema": SCHEMA}, *JSON),
        ({"json_schema": JSON[1]}, *JSON),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": GRAMMAR}, "grammar", GRAMMAR),
        ({"grammar": GRAMMAR}, "grammar", GRAMMAR),
    ],
)
def test_other_servers_names_of_structured_output_are_enforced(
    fields: dict[str, Any], kind: str, source: str
) -> None:
    for check, body in ((request_bodies.chat, chat()), (request_bodies.completion, completion())):
        outputs = check(body | fields, MODEL).params.guided
        assert outputs is not None
        assert (outputs.kind, outputs.source) == (kind, source)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
            "response_format.value",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"regex": "a", "grammar": GRAMMAR}, "grammar"),
        ({"structured_outputs": {"regex": "a"}, "ebnf": GRAMMAR}, "ebnf"),
    ],
)
def test_two_forms_of_an_answer_or_none_are_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        request_bodies.chat(chat(**fields), MODEL)
    assert refused.value.param == param


# -- token ids

ASKED = {"max_tokens": 3, "n": 2, "return_token_ids": True}


def shown_ids(choices: list[dict[str, Any]], index: int) -> list[int]:
    """What the events of one choice show together."""
    return [i for c in choices if c["index"] == index for i in c.get("token_ids", [])]


GENERATED = [FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN + 2]


@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_shows_its_token_ids_and_those_of_each_prompt_once(echo: bool) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            body = completion(["a", "bc"], **ASKED, echo=echo)
            answer = (await client.post("/v1/completions", json=body)).json()
            prompts = [list(submission.prompt) for submission in service.seen]
            for index, choice in enumerate(answer["choices"]):
                assert choice["token_ids"] == GENERATED
                of_prompt = None if index % 2 else prompts[index // 2]
                assert choice.get("prompt_token_ids") == of_prompt
            stream = await client.post("/v1/completions", json=body | {"stream": True})
            choices = [event["choices"][0] for event in events(stream.text)[:-1]]
            for index in range(4):
                assert shown_ids(choices, index) == GENERATED
            shown = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
            assert sorted(shown) == sorted(prompts)

    run(scenario())


def test_a_chat_shows_its_token_ids_also_of_text_that_is_held_back() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def scenario() -> None:
        async with fake_server(FakeService(says=call)) as (server, service), server.client() as c:
            body = chat(**ASKED, tools=tools)
            answer = (await c.post("/v1/chat/completions", json=body)).json()
            ids = [FIRST_TOKEN + step for step in range(len(call))]
            assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
            assert answer["prompt_token_ids"] == list(service.seen[0].prompt)
            stream = await c.post("/v1/chat/completions", json=body | {"stream": True})
            chunks = events(stream.text)[:-1]
            choices = [chunk["choices"][0] for chunk in chunks]
            assert [shown_ids(choices, index) for index in range(2)] == [ids, ids]
            assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
            assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])

    run(scenario())


def test_special_tokens_are_text_on_request() -> None:
    for skips in (None, True, False):
        request = request_bodies.chat(chat(skip_special_tokens=skips), MODEL)
        assert request.params.skip_special_tokens is (skips is not False)
