"""No field of a body is silently another answer: model's values, foreign names, template fields."""

import json
from typing import Any

import pytest

from fairlead_runtime.api.anthropic import bodies as anthropic
from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.api.bodies.refused_fields import REFUSED, REFUSED_OF_MESSAGES
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody
from fairlead_runtime.api.responses import bodies
from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.front.errors import ApiError
from support import tiny
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
    "/v1/messages": chat(max_tokens=3),
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

RESPONSE, MESSAGE = ROUTES["/v1/responses"], ROUTES["/v1/messages"]
CHECKS = [
    *((request_bodies.chat, chat(), name) for name in REFUSED.keys() - ChatBody.model_fields),
    *(
        (request_bodies.completion, completion(), name)
        for name in REFUSED.keys() - CompletionBody.model_fields
    ),
    *((bodies.response, RESPONSE, name) for name in bodies._REFUSED),
    *((bodies.response, RESPONSE, name) for name in ("regex_of_nobody", "mirostat")),
    *((anthropic.message, MESSAGE, name) for name in anthropic._REFUSED),
    *((anthropic.message, MESSAGE, name) for name in ("regex_of_nobody", "mirostat")),
]


def test_fields_that_would_change_the_answer_are_refused_by_name_unless_they_are_neutral() -> None:
    for check, body, name in CHECKS:
        tables = [REFUSED, bodies._REFUSED]
        if check is anthropic.message:
            tables = [anthropic._REFUSED, REFUSED]
        known = next((table[name] for table in tables if name in table), None)
        for neutral in (None, *(known.neutral if known else ("any",))):
            check(body | {name: neutral}, MODEL)
        if known:
            with pytest.raises(ApiError, match=f"{name}: is not supported; ") as refused:
                check(body | {name: "another value"}, MODEL)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_what_clients_send_unasked_changes_nothing() -> None:
    plain = request_bodies.completion(completion(), MODEL)
    constraints = ("json_schema", "regex", "ebnf", "grammar", "guided_regex", "guided_grammar")
    for sent in (dict.fromkeys(constraints, ""), {"add_special_tokens": True}):
        assert request_bodies.completion(completion() | sent, MODEL) == plain
    with pytest.raises(ApiError, match="add_special_tokens"):
        request_bodies.completion(completion() | {"add_special_tokens": False}, MODEL)


@pytest.mark.parametrize("name", REFUSED_OF_MESSAGES)
def test_fields_of_a_message_that_would_change_the_prompt_are_refused_too(name: str) -> None:
    message = {"role": "assistant", "content": "x"}
    for neutral in (None, *REFUSED_OF_MESSAGES[name].neutral):
        request_bodies.chat(chat(messages=[message | {name: neutral}]), MODEL)
    with pytest.raises(ApiError, match=f"messages.1.{name}: is not supported; "):
        request_bodies.chat(chat(messages=[message, message | {name: "x"}]), MODEL)


def test_token_ids_in_place_of_the_prompt_are_refused_beside_what_only_places_a_request() -> None:
    bodies_of = [body for check, body, name in CHECKS if name == "mirostat"]
    checks = [check for check, _, name in CHECKS if name == "mirostat"]
    assert len(checks) >= 2
    for check, body in [
        (request_bodies.chat, chat()),
        (request_bodies.completion, completion()),
        *zip(checks, bodies_of, strict=True),
    ]:
        for harmless in ({}, {"do_remote_prefill": True, "prompt_token_ids": None}):
            check(body | {"kv_transfer_params": harmless}, MODEL)
        with pytest.raises(ApiError, match="send them as the prompt") as refused:
            check(body | {"kv_transfer_params": {"prompt_token_ids": [1, 2]}}, MODEL)
        assert refused.value.param == "kv_transfer_params.prompt_token_ids"


SCHEMA = {"type": "object", "properties": {"n": {"const": 42}}}
JSON = ("json", '{"type":"object","properties":{"n":{"const":42}}}')
GRAMMAR = 'root ::= "a"'
WRAPPED = {"name": "n", "strict": True, "schema": SCHEMA}  # OpenAI's object around a schema


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_schema", "value": SCHEMA}}, *JSON),
        ({"response_format": {"type": "json_schema", "value": WRAPPED}}, *JSON),
        ({"response_format": {"type": "json_object", "value": {"schema": SCHEMA}}}, *JSON),
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRAPPED}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": WRAPPED}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "value": {"schema": WRAPPED}}},
            "response_format.value.schema",
        ),
        ({"structured_outputs": {"json": WRAPPED}}, "structured_outputs.json"),
        ({"guided_json": WRAPPED}, "guided_json"),
        ({"guided_json": json.dumps(WRAPPED)}, "guided_json"),
        ({"json_schema": {"schema": SCHEMA}}, "json_schema"),
    ],
)
def test_an_object_around_a_schema_is_not_taken_for_one_that_allows_everything(
    fields: dict[str, Any], param: str
) -> None:
    for check, body in ((request_bodies.chat, chat()), (request_bodies.completion, completion())):
        with pytest.raises(ApiError, match="is an object around a schema") as refused:
            check(body | fields, MODEL)
        assert refused.value.param == param


def test_a_schema_may_have_a_property_called_schema() -> None:
    schemas: list[dict[str, Any]] = [
        {"properties": {"schema": {}}},
        {"schema": {}, "type": "object"},
    ]
    for schema in schemas:
        assert request_bodies.chat(chat(guided_json=schema), MODEL).params.guided is not None


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


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_is_whole_unless_it_is_streamed(route: str) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for stream in (False, True):
                await client.post(route, json=ROUTES[route] | {"stream": stream})
                assert service.seen[-1].whole is not stream

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


# -- what the chat template reads

TEMPLATE = (
    "{{ bos_token }}{% for d in documents or [] %}<|system|>{{ d.text }}<|end|>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Sure, here"}]
OPEN = "<|begin|><|user|>hello<|end|><|assistant|>"
TEMPLATE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, OPEN),
    ({"chat_template_kwargs": {"enable_thinking": False}}, OPEN + "<think></think>"),
    ({"reasoning_effort": "low"}, OPEN + "low"),
    ({"reasoning_effort": "none"}, OPEN + "none<think></think>"),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        OPEN + "none",
    ),
    ({"add_generation_prompt": False}, "<|begin|><|user|>hello<|end|>"),
    ({"add_special_tokens": False}, OPEN),
    ({"messages": BEGUN, "continue_final_message": True}, OPEN + "Sure, here"),
    (
        {"documents": [{"title": "t", "text": "A page"}]},
        "<|begin|><|system|>A page<|end|><|user|>hello<|end|><|assistant|>",
    ),
    ({"chat_template": "{{ messages[0].content }}"}, "hello"),
]


@pytest.fixture
def templated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of the fake server has another template."""
    tokenizer: Any = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(tiny, "tokenizer", lambda: tokenizer)


@pytest.mark.usefixtures("templated")
def test_a_chat_and_its_count_of_tokens_have_the_prompt_of_the_template_with_its_fields() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        service = FakeService(rules=BodyRules(templates=True))
        async with fake_server(service) as (server, _), server.client() as client:
            for fields, prompt in TEMPLATE_FIELDS:
                answer = await client.post("/tokenize", json=chat() | fields)
                assert tokenizer.decode(answer.json()["tokens"]) == prompt, answer.text
                answer = await client.post("/v1/chat/completions", json=chat() | fields)
                assert answer.status_code == 200, answer.text
                assert tokenizer.decode(list(service.seen[-1].prompt)) == prompt
            body = {**RESPONSE, "reasoning": {"effort": "none"}, "documents": [{"text": "A"}]}
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            prompt = tokenizer.decode(list(service.seen[-1].prompt))
            assert prompt.startswith("<|begin|><|system|>A<|end|>")
            assert prompt.endswith("<think></think>")

    run(scenario())


def test_a_chat_may_name_one_of_the_models_own_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = tiny.tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "short": "{{ messages[0].content }}"}
    monkeypatch.setattr(tiny, "tokenizer", lambda: tokenizer)

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for name, prompt in ((None, OPEN), ("short", "hello")):
                answer = await client.post("/tokenize", json=chat() | {"chat_template": name})
                assert tokenizer.decode(answer.json()["tokens"]) == prompt, answer.text
            answer = await client.post("/tokenize", json=chat() | {"chat_template": "other"})
            assert answer.json()["error"]["param"] == "chat_template"

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs",
            "invalid_value",
        ),
        ({"chat_template_kwargs": {"a": "x" * 9000}}, "chat_template_kwargs", "context"),
        ({"documents": [{"text": "x"}]}, "documents", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        ({"add_special_tokens": True}, "add_special_tokens", "unsupported_parameter"),
        ({"reasoning_effort": 0.5}, "reasoning_effort", "invalid_type"),
        ({"mirostat": 2}, "mirostat", "unsupported_parameter"),
        ({"messages": [{"role": "user", "refusal": "x"}]}, "messages.0.refusal", "unsupported"),
    ],
)
def test_no_route_ignores_what_its_template_cannot_take(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for route in ("/tokenize", "/v1/chat/completions"):
                answer = await client.post(route, json=chat() | fields)
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert (error["param"], error["code"][: len(code)]) == (param, code)

    run(scenario())


def test_a_response_names_the_effort_as_the_client_sent_it() -> None:
    with pytest.raises(ApiError, match=r"reasoning\.effort: ") as refused:
        bodies.response({**RESPONSE, "reasoning": {"effort": 3}}, MODEL)
    assert refused.value.param == "reasoning.effort"


def test_earlier_calls_without_arguments_have_none_whatever_a_client_writes() -> None:
    """A tool without parameters is called with "" by many clients and models."""

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            prompts = set()
            for arguments in ("", " ", "{}"):
                call = {"id": "1", "function": {"name": "now", "arguments": arguments}}
                messages = [
                    {"role": "user", "content": "time?"},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "12:00"},
                ]
                answer = await client.post("/tokenize", json={"messages": messages})
                prompts.add(tuple(answer.json()["tokens"]))
            (prompt,) = prompts
            assert '"arguments": {}}' in tiny.tokenizer().decode(list(prompt))

    run(scenario())


def test_tools_that_the_model_is_not_told_of_are_not_counted() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            counts = [
                (await client.post("/tokenize", json=chat() | fields)).json()["count"]
                for fields in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
            ]
            assert counts[0] == counts[2] < counts[1]

    run(scenario())
