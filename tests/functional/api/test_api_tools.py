"""OpenAI's client uses tools and reads reasoning, whole and streamed."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai.types.chat import ChatCompletionMessage

from fairlead_runtime.api.tools.grammar import calls_schema
from fairlead_runtime.request.sequence import FinishReason
from support import tiny
from support.api_harness import FakeService, Server, chat, events, fake_server, is_error, run

CHAT = "/v1/chat/completions"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
ARGUMENTS = '{"city": "Paris \\"}"}'
SAID = {
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
        '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "get_time", "parameters": {}}'
    ),
    "mistral": (
        f'I look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "get_time", "arguments": {}}]'
    ),
}
CALLED = [("get_weather", ARGUMENTS), ("get_time", "{}")]


def calling(parser: str = "hermes", **settings: Any) -> FakeService:
    settings = {"says": SAID.get(parser, ""), "finish": FinishReason.STOP, **settings}
    return FakeService(tool_call_parser=parser, **settings)


async def whole(server: Server, **fields: Any) -> Any:
    fields = {"tools": [WEATHER, TIME], **fields}
    answer = await server.openai.chat.completions.create(**chat(**fields))
    return answer.choices[0]


async def streamed(server: Server, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas add up to, and the choices of all chunks."""
    fields = {"tools": [WEATHER, TIME], "stream": True, **fields}
    stream = await server.openai.chat.completions.create(**chat(**fields))
    choices = [chunk.choices[0] async for chunk in stream]
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in choices:
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(message["calls"]), "function")
                message["calls"].append([call.function.name, call.function.arguments])
            else:
                assert call.function.name is None
                message["calls"][call.index][1] += call.function.arguments
    return message, choices


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    calls: Any = message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("parser", SAID)
def test_calls_are_the_same_streamed_or_not(parser: str) -> None:
    async def scenario() -> None:
        async with fake_server(calling(parser)) as (server, _):
            choice = await whole(server)
            assert calls_of(choice.message) == CALLED
            assert choice.message.content == (None if parser == "llama3_json" else "I look.")
            assert choice.finish_reason == "tool_calls"
            message, choices = await streamed(server)
            assert [tuple(call) for call in message["calls"]] == CALLED
            assert message["content"] == (choice.message.content or "")
            assert choices[0].delta.role == "assistant"
            assert [each.finish_reason for each in choices if each.finish_reason] == ["tool_calls"]
            assert choices[-1].finish_reason == "tool_calls"

    run(scenario())


def test_an_answer_without_a_call_is_plain_text() -> None:
    async def scenario() -> None:
        text = 'No: <tool_call>{"name": "other", "arguments": {}}</tool_call>'
        async with fake_server(calling(says=text)) as (server, _):
            choice = await whole(server)
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"
            message, choices = await streamed(server)
            assert (message["content"], message["calls"]) == (text, [])
            assert choices[-1].finish_reason == "stop"

    run(scenario())


def test_a_call_that_is_cut_by_length_says_so() -> None:
    async def scenario() -> None:
        service = calling(says=SAID["hermes"][:70], finish=FinishReason.LENGTH)
        async with fake_server(service) as (server, _):
            choice = await whole(server)
            assert choice.finish_reason == "length"
            ((name, arguments),) = calls_of(choice.message)
            assert name == "get_weather"
            assert ARGUMENTS.startswith(arguments)
            message, choices = await streamed(server)
            assert message["calls"] == [[name, arguments]]
            assert choices[-1].finish_reason == "length"

    run(scenario())


def test_one_call_is_kept_without_parallel_calls() -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, _):
            choice = await whole(server, parallel_tool_calls=False)
            assert calls_of(choice.message) == CALLED[:1]
            message, _ = await streamed(server, parallel_tool_calls=False)
            assert [tuple(call) for call in message["calls"]] == CALLED[:1]

    run(scenario())


def test_the_model_is_told_of_the_tools_unless_it_may_call_none() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        async with fake_server(calling()) as (server, service):
            await whole(server)
            choice = await whole(server, tool_choice="none")
            assert choice.message.content == SAID["hermes"]
            assert choice.message.tool_calls is None
            told, untold = (tokenizer.decode(each.prompt) for each in service.seen)
            assert '{"type": "function", "function": {"name": "get_time"}}' in told
            assert "The weather of a city" in told
            assert "strict" not in told
            assert "get_time" not in untold

    run(scenario())


def test_calls_and_their_results_reach_the_template_in_the_next_turn() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        async with fake_server(calling(max_model_len=4096)) as (server, service):
            first = await whole(server)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": f"result {place}"}
                for place, call in enumerate(first.message.tool_calls)
            ]
            messages = [{"role": "user", "content": "hello"}, first.message, *results]
            await server.openai.chat.completions.create(
                model="tiny", messages=messages, tools=[WEATHER, TIME]
            )
            prompt = tokenizer.decode(service.seen[-1].prompt)
            assert f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in prompt
            assert '{"name": "get_time", "arguments": {}}' in prompt
            assert prompt.index("get_time", prompt.index("I look.")) < prompt.index("result 0")
            assert prompt.index("result 0") < prompt.index("result 1")

    run(scenario())


def test_arguments_that_are_no_json_may_come_back() -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, service), server.client() as client:
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
            messages = [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "no JSON"},
            ]
            answer = await client.post(CHAT, json={"model": "tiny", "messages": messages})
            assert answer.status_code == 200, answer.text
            assert "{oops" in tiny.tokenizer().decode(service.seen[0].prompt)

    run(scenario())


def test_logprobs_stay_with_the_tokens_of_calls() -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, _):
            choice = await whole(server, logprobs=True)
            assert len(choice.logprobs.content) == len(SAID["hermes"])
            _, choices = await streamed(server, logprobs=True)
            counts = [len(each.logprobs.content) for each in choices if each.logprobs]
            assert counts == [1] * len(SAID["hermes"])

    run(scenario())


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tools": [TIME], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    (
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [TIME], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    (
        {"messages": [{"role": "user", "tool_calls": [{"id": "a", "function": {}}]}]},
        "messages.0.tool_calls.0.function.name",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        "messages.0.tool_calls",
    ),
]


def test_what_is_wrong_with_tools_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for fields, param in BAD_TOOLS:
                answer = await client.post(CHAT, json={**chat(), **fields})
                assert answer.status_code == 400, (fields, answer.text)
                assert is_error(answer.json())
                assert answer.json()["error"]["param"] == param, (fields, answer.text)
            assert not service.seen

    run(scenario())


def test_tools_need_a_format_of_calls_and_a_template_for_them() -> None:
    async def scenario() -> None:
        service = FakeService(tool_call_parser="none")
        async with fake_server(service) as (server, _), server.client() as client:
            answer = await client.post(CHAT, json=chat(tools=[TIME]))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools"
            assert "--tool-call-parser" in answer.text
        async with fake_server() as (server, _), server.client() as client:
            server.state.loaded().encoder.tokenizer.chat_template = "{{ messages[0].content }}"
            answer = await client.post(CHAT, json=chat(tools=[TIME]))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools"
            assert "template" in answer.text

    run(scenario())


# -- reasoning

THOUGHT = "<think>\nParis is\na city.\n</think>\n\nIt rains."


def test_reasoning_is_separate_streamed_or_not() -> None:
    async def scenario() -> None:
        service = FakeService(says=THOUGHT, finish=FinishReason.STOP, reasoning_parser="qwen3")
        async with fake_server(service) as (server, _):
            message = (await whole(server)).message
            assert message.content == "It rains."
            assert message.reasoning == message.reasoning_content == "Paris is\na city."
            added, choices = await streamed(server)
            assert (added["content"], added["reasoning"]) == ("It rains.", "Paris is\na city.")
            deltas = [each.delta for each in choices if hasattr(each.delta, "reasoning")]
            assert all(each.reasoning == each.reasoning_content for each in deltas)
            hidden = (await whole(server, extra_body={"include_reasoning": False})).message
            assert hidden.content == "It rains."
            assert hidden.reasoning is None
            added, _ = await streamed(server, extra_body={"include_reasoning": False})
            assert (added["content"], added["reasoning"]) == ("It rains.", "")

    run(scenario())


def test_usage_counts_the_tokens_of_reasoning_alike_on_every_route() -> None:
    async def scenario() -> None:
        for parser in ("qwen3", "none"):
            service = FakeService(says=THOUGHT, finish=FinishReason.STOP, reasoning_parser=parser)
            async with fake_server(service) as (server, _), server.client() as client:
                body = {"model": "tiny", "input": "x"}
                usage = (await client.post("/v1/responses", json=body)).json()["usage"]
                thought = usage["output_tokens_details"]["reasoning_tokens"]
                assert (len("Paris is\na city.") <= thought < len(THOUGHT)) == (parser != "none")
                body = {"model": "tiny", "prompt": "x"}
                usage = (await client.post("/v1/completions", json=body)).json()["usage"]
                assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
                create: Any = server.openai.chat.completions.create
                for n, shown in ((1, True), (2, True), (1, False)):
                    fields = chat(n=n, extra_body={"include_reasoning": shown})
                    options = {"include_usage": True}
                    stream = await create(**fields, stream=True, stream_options=options)
                    *_, last = [chunk async for chunk in stream]
                    for usage in ((await create(**fields)).usage, last.usage):
                        assert usage.completion_tokens_details.reasoning_tokens == n * thought
                    assert thought or parser == "none"

    run(scenario())


def test_an_answer_that_never_ends_its_reasoning_has_no_content() -> None:
    async def scenario() -> None:
        service = FakeService(says="<think>hm", reasoning_parser="qwen3")
        async with fake_server(service) as (server, _):
            choice = await whole(server)
            assert (choice.message.content, choice.message.reasoning) == (None, "hm")
            assert choice.finish_reason == "length"

    run(scenario())


@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n", ""])
def test_a_structured_output_begins_where_the_reasoning_ends(opening: str) -> None:
    async def scenario() -> None:
        service = FakeService(says='hm</think>{"a": 1}', reasoning_parser="qwen3")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        async with fake_server(service) as (server, _), server.client() as client:
            tokenizer = server.state.loaded().encoder.tokenizer
            tokenizer.chat_template = "{{ messages[0].content }}" + opening
            answer = await client.post(CHAT, json=chat(response_format=schema))
            (asked,) = service.seen
            inside = opening == "<think>\n"
            assert asked.params.structured_outputs.reasoning_end == "</think>" * inside
            content = answer.json()["choices"][0]["message"]["content"]
            assert content == ('{"a": 1}' if inside else service.says)
            # What only the server may set.
            outputs = {"json": {}, "reasoning_end": "x"}
            answer = await client.post(CHAT, json=chat(structured_outputs=outputs))
            assert answer.json()["error"]["param"] == "structured_outputs.reasoning_end"

    run(scenario())


PLAIN_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
OPENED = PLAIN_TEMPLATE.replace("|>{{", "|>{{ '<think>' if m.role == 'assistant' }}{{")
AFTER_USER = "{% for m in messages %}{{ m.content }}{{ '<think>' if m.role == 'user' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "parser", "question", "begun", "inside"),
    [
        (PLAIN_TEMPLATE, "deepseek_r1", "x", "<think>\nhm</think>\n\nThe answer: {", False),
        (PLAIN_TEMPLATE, "deepseek_r1", "x", "The answer: {", False),
        (PLAIN_TEMPLATE, "deepseek_r1", "x", "", True),
        (PLAIN_TEMPLATE, "qwen3", "x", "<think>\nOK so", True),
        (PLAIN_TEMPLATE, "qwen3", "what is <think>?", "It is", False),
        (PLAIN_TEMPLATE, "qwen3", "x", "<think></think>", False),
        (OPENED, "qwen3", "x", "OK so" * 40, True),
        (OPENED, "qwen3", "x", "OK</think>Sure", False),
        (AFTER_USER, "qwen3", "x", "OK so", True),
    ],
    ids=[
        "after reasoning",
        "no reasoning",
        "empty",
        "within reasoning",
        "mark of the question",
        "both marks",
        "opened by the template",
        "opened by the template and closed",
        "opened after the question",
    ],
)
def test_an_answer_goes_on_with_the_reasoning_or_the_text_of_the_last_message(
    template: str, parser: str, question: str, begun: str, inside: bool
) -> None:
    async def scenario() -> None:
        service = FakeService(says="hm</think>{}", reasoning_parser=parser)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]
        body = chat(guided_json={}, continue_final_message=True) | {"messages": messages}
        async with fake_server(service) as (server, _), server.client() as client:
            server.state.loaded().encoder.tokenizer.chat_template = template
            answer = await client.post(CHAT, json=body)
            content = answer.json()["choices"][0]["message"]["content"]
            assert content == ("{}" if inside else service.says)
            streamed = events((await client.post(CHAT, json=body | {"stream": True})).text)[:-1]
            deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
            assert "".join(delta.get("content") or "" for delta in deltas) == content
            for submission in service.seen:
                outputs = submission.params.structured_outputs
                assert outputs.reasoning_end == "</think>" * inside

    run(scenario())


def test_completions_have_neither_tools_nor_reasoning() -> None:
    async def scenario() -> None:
        service = FakeService(says=THOUGHT, reasoning_parser="qwen3")
        async with fake_server(service) as (server, _), server.client() as client:
            body = {"model": "tiny", "prompt": "x"}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == THOUGHT
            answer = await client.post("/v1/completions", json={**body, "tools": [TIME]})
            assert answer.json()["error"]["param"] == "tools"

    run(scenario())


def test_a_stream_of_calls_has_openais_deltas() -> None:
    async def scenario() -> None:
        async with fake_server(calling("llama3_json")) as (server, _), server.client() as client:
            body = chat(tools=[WEATHER, TIME], stream=True)
            *chunks, done = events((await client.post(CHAT, json=body)).text)
            assert done == "[DONE]"
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            calls = [delta["tool_calls"][0] for delta in deltas[1:-1]]
            begins = [call for call in calls if "id" in call]
            assert [set(call) for call in begins] == [{"index", "id", "type", "function"}] * 2
            assert [call["function"]["arguments"] for call in begins] == ["", ""]
            pieces = [call for call in calls if "id" not in call]
            assert all(set(call["function"]) == {"arguments"} for call in pieces)
            joined = "".join(c["function"]["arguments"] for c in pieces if c["index"] == 0)
            assert json.loads(joined) == json.loads(ARGUMENTS)

    run(scenario())


# -- calls that the request forces

REQUIRED = (
    f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, '
    '{"name": "get_time", "parameters": {}}]'
)
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
PARAMETERS = WEATHER["function"]["parameters"]


@pytest.mark.parametrize(
    ("choice", "said", "called", "reason"),
    [
        ("required", REQUIRED, CALLED, "tool_calls"),
        (NAMED, ARGUMENTS, CALLED[:1], "stop"),
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "none"])
def test_forced_calls_are_the_same_streamed_or_not(
    choice: Any, said: str, called: list[tuple[str, str]], reason: str, parser: str
) -> None:
    async def scenario() -> None:
        service = calling(parser, says=f"hm\n</think>\n{said}", reasoning_parser="deepseek_r1")
        async with fake_server(service) as (server, _):
            whole_choice = await whole(server, tool_choice=choice)
            assert calls_of(whole_choice.message) == called
            assert whole_choice.message.content is None
            assert whole_choice.finish_reason == reason
            message, choices = await streamed(server, tool_choice=choice)
            assert [tuple(call) for call in message["calls"]] == called
            assert (message["content"], message["reasoning"]) == ("", "hm")
            assert choices[-1].finish_reason == reason

    run(scenario())


def test_a_forced_call_is_a_schema_for_the_engine() -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, service):
            await whole(server, tool_choice=NAMED)
            await whole(server, tool_choice="required", parallel_tool_calls=False)
            await whole(server)
            outputs: Any = [each.params.structured_outputs for each in service.seen]
            named, required, none = outputs
            assert json.loads(named.json) == PARAMETERS
            schema = json.loads(required.json)
            jsonschema.validate([{"name": "get_weather", "parameters": {"city": "x"}}], schema)
            for wrong in (
                [],
                [{"name": "get_weather", "parameters": {"city": 1}}],
                [{"name": "other", "parameters": {}}],
                [{"name": "get_time", "parameters": {"city": "x"}}],
                [{"name": "get_time", "parameters": {}}] * 2,
            ):
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(wrong, schema)
            assert none is None

    run(scenario())


def test_references_in_parameters_point_into_the_tools_own_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Place"},
            "next": {"$ref": "#"},
            "again": {"$ref": "#place"},
            "data": {"const": {"$ref": "#/$defs/Place"}},
        },
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Place": {"$anchor": "place", "enum": ["Paris"]}},
    }
    other = {**parameters, "$defs": {"Place": {"$anchor": "place", "enum": ["Rome"]}}}
    schema = calls_schema([("f", parameters), ("g", other)], parallel=True)
    jsonschema.Draft202012Validator.check_schema(schema)
    good = [
        {"name": "f", "parameters": {"at": "Paris", "next": {"at": "Paris"}}},
        {"name": "g", "parameters": {"at": "Rome", "again": "Rome"}},
        {"name": "g", "parameters": {"at": "Rome", "data": {"$ref": "#/$defs/Place"}}},
    ]
    jsonschema.validate(good, schema)
    for wrong in (
        [{"name": "f", "parameters": {"at": "Rome"}}],
        [{"name": "g", "parameters": {"at": "Rome", "next": {"at": "Paris"}}}],
        [{"name": "g", "parameters": {"at": "Rome", "again": "Paris"}}],
        [{"name": "g", "parameters": {"at": "Rome", "data": {"$ref": "#/$defs/tool1"}}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_a_schema_that_is_too_large_is_the_tools() -> None:
    async def scenario() -> None:
        async with fake_server(calling(max_model_len=100_000)) as (server, _), server.client() as c:
            values = [f"value {number}" for number in range(10_000)]
            function = {"name": "f", "parameters": {"properties": {"a": {"enum": values}}}}
            tools = [{"type": "function", "function": function}]
            answer = await c.post(CHAT, json=chat(tools=tools, tool_choice="required"))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools"
            assert answer.json()["error"]["message"].startswith("tools: ")

    run(scenario())


BAD_TYPES = [
    {"type": "objekt"},
    {"type": "strng"},
    {"type": ""},
    {"type": "String"},
    {"type": 7},
    {"type": {"a": "string"}},
    {"type": ["string", "any"]},
    {"type": "object", "properties": {"a": {"type": "float"}}},
    {"type": "object", "properties": {"a": {"items": {"anyOf": [{"type": "dict"}]}}}},
    {"type": "object", "$defs": {"A": {"type": "list"}}, "properties": {}},
    {"type": "object", "additionalProperties": {"type": "tuple"}},
    {"type": "object", "properties": {"type": {"type": "number "}}},
]
GOOD_TYPES = [
    {},
    {"type": None},
    {"type": "object"},
    {"properties": {"a": {"type": ["string", "null"]}, "b": {}}},
    # Data and names of properties are no types.
    {"type": "object", "properties": {"type": {"type": "string", "const": "objekt"}}},
    {"type": "object", "properties": {"a": {"enum": [{"type": "strng"}]}}},
    {"type": "object", "properties": {"a": {"default": {"type": "x"}, "examples": [{"type": 1}]}}},
]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, "none", None])
def test_a_type_that_does_not_exist_is_refused_with_or_without_a_forced_call(choice: Any) -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, _), server.client() as client:
            for status, schemas in ((400, BAD_TYPES), (200, GOOD_TYPES)):
                for schema in schemas:
                    function = {"name": "get_weather", "parameters": schema}
                    tools = [{"type": "function", "function": function}]
                    extra = {} if choice is None else {"tool_choice": choice}
                    body = chat(max_tokens=2, tools=tools, **extra)
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == status, (schema, answer.text)
                    if status == 400:
                        error = answer.json()["error"]
                        assert error["param"] == "tools.0.function.parameters"
                        assert error["message"].startswith("tools.0.function.parameters: ")

    run(scenario())


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("required", '[{"name": "get_weather", "param'),
        ("required", '[{"name": "get_weather", "parameters": '),
        ("required", "["),
        (NAMED, ""),
        (NAMED, " "),
    ],
)
def test_a_forced_call_that_is_cut_before_its_arguments_is_no_content(
    choice: Any, says: str
) -> None:
    async def scenario() -> None:
        service = calling("hermes", says=says or " ", finish=FinishReason.LENGTH)
        async with fake_server(service) as (server, _):
            choice_of = await whole(server, tool_choice=choice)
            assert not choice_of.message.content
            assert not choice_of.message.tool_calls
            assert choice_of.finish_reason == "length"
            message, choices = await streamed(server, tool_choice=choice)
            assert (message["content"], message["calls"]) == ("", [])
            assert choices[-1].finish_reason == "length"

    run(scenario())


def test_a_forced_call_has_one_form_of_white_space() -> None:
    async def scenario() -> None:
        async with fake_server(calling()) as (server, service):
            await whole(server, tool_choice=NAMED)
            await whole(server, tool_choice="required")
            outputs: Any = [each.params.structured_outputs for each in service.seen]
            assert [each.compact for each in outputs] == [True, True]

    run(scenario())
