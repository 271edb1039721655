"""Anthropic's Messages API: its shapes, events in order, errors, and what coding tools send.

``clients/test_clients.py`` has Anthropic's own client.
"""

import copy
import json
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fairlead_runtime.api.answers.response_bodies import Frame, Usage, WholeChoice
from fairlead_runtime.api.anthropic import bodies
from fairlead_runtime.api.anthropic.encoder import MessageEncoder
from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.api.tools.formats import HERMES, ReplyFormat, ToolUse
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.strict_json import parse_object
from fairlead_runtime.outputs import EngineDead, Output, QueueFull
from fairlead_runtime.request.sequence import FinishReason, RequestError
from support import tiny
from support.api_harness import MODEL, TEXT, FakeService, fake_server, run
from support.full import LONG_FORM

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
USAGE = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 12, "messages": HELLO, **fields}


def service_that(**fields: Any) -> FakeService:
    settings: dict[str, Any] = {"reasoning_parser": "qwen3", "max_model_len": 4096}
    return FakeService(**settings | {"finish": FinishReason.STOP} | fields)


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post(ROUTE, json=message(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """The events, each with its name."""
    answer = await client.post(ROUTE, json=message(stream=True, **fields))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[Any]) -> Any:
    """The message that a stream's events make, as Anthropic's clients add them up; every delta
    belongs to the block that is open.
    """
    start, *rest = copy.deepcopy(events)
    made = start["message"]
    inputs: dict[int, str] = {}
    opened = None
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(made["content"])
                made["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == opened
                block, delta = made["content"][opened], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
                else:
                    (field,) = set(delta) - {"type"}
                    assert delta["type"] == f"{field}_delta"
                    block[field] += delta[field]
            case "content_block_stop":
                assert event["index"] == opened
                if opened in inputs:
                    made["content"][opened]["input"] = json.loads(inputs[opened])
                opened = None
            case "message_delta":
                made |= event["delta"]
                made["usage"] |= event["usage"]
            case "message_stop":
                assert event is rest[-1]
            case kind:
                assert kind == "ping"
    assert opened is None
    return made


def same(answer: Any) -> Any:
    """Without what differs between two answers."""
    kept = copy.deepcopy(answer)
    del kept["id"]
    for block in kept["content"]:
        block.pop("id", None)
    return kept


def kinds(events: list[Any]) -> list[str]:
    """The types in order, deltas by their own; those that follow each other count once."""
    types = [event.get("delta", {}).get("type") or event["type"] for event in events]
    return [each for place, each in enumerate(types) if place == 0 or types[place - 1] != each]


def of_a_block(*deltas: str) -> list[str]:
    return ["content_block_start", *deltas, "content_block_stop"]


def test_a_text_is_answered_whole_and_streamed_alike() -> None:
    async def scenario() -> None:
        async with fake_server(service_that()) as (server, service), server.client() as client:
            answer = await ask(client)
            assert answer["content"] == [{"type": "text", "text": TEXT[:12]}]
            assert (answer["type"], answer["role"], answer["model"]) == (
                "message",
                "assistant",
                MODEL,
            )
            assert answer["id"].startswith("msg_")
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
            assert answer["usage"] == {
                "input_tokens": len(service.seen[0].prompt) - 3,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3,
                "output_tokens": 12,
            }
            events = await streamed(client)
            start, first, *_ = of_a_block("text_delta")
            assert kinds(events) == [
                "message_start",
                start,
                "ping",
                *(first, "content_block_stop"),
                *("message_delta", "message_stop"),
            ]
            begun = events[0]["message"]
            assert begun["usage"] == answer["usage"] | {"output_tokens": 0}
            assert (begun["content"], begun["stop_reason"]) == ([], None)
            assert set(events[-2]["usage"]) == USAGE
            assert same(added_up(events)) == same(answer)

    run(scenario())


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    async def scenario() -> None:
        service = service_that(says=SAID)
        async with fake_server(service) as (server, _), server.client() as client:
            fields = {"tools": [WEATHER], "max_tokens": 2000}
            answer = await ask(client, **fields)
            thought, text, *calls = answer["content"]
            assert (thought["type"], thought["thinking"]) == ("thinking", "Where?")
            assert thought["signature"]
            assert text == {"type": "text", "text": "I look."}
            for call in calls:
                assert (call["type"], call["name"]) == ("tool_use", "get_weather")
                assert call["input"] == {"city": "Paris"}
            assert len({call["id"] for call in calls}) == 2
            assert answer["stop_reason"] == "tool_use"
            events = await streamed(client, **fields)
            start, thinks, signs, stop = of_a_block("thinking_delta", "signature_delta")
            assert kinds(events) == [
                *("message_start", start, "ping", thinks, signs, stop),
                *of_a_block("text_delta"),
                *of_a_block("input_json_delta") * 2,
                *("message_delta", "message_stop"),
            ]
            assert same(added_up(events)) == same(answer)
            begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
            assert [block.get("input") for block in begun] == [None, None, {}, {}]

    run(scenario())


def test_thoughts_are_shown_left_out_or_only_signed_as_thinking_says() -> None:
    async def scenario() -> None:
        service = service_that(says="<think>Hm.</think>Yes.")
        async with fake_server(service) as (server, _), server.client() as client:
            shown = await ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
            assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
            hidden = await ask(client, thinking={"type": "disabled"})
            assert hidden["content"] == [{"type": "text", "text": "Yes."}]
            fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
            signed = await ask(client, **fields)
            first = shown["content"][0]
            assert signed["content"][0] == {**first, "thinking": ""}
            events = await streamed(client, **fields)
            assert "thinking_delta" not in kinds(events)
            assert same(added_up(events)) == same(signed)

    run(scenario())


@pytest.mark.parametrize(
    ("thinking", "switch"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_the_templates_switch(thinking: Any, switch: bool | None) -> None:
    request = bodies.message(message(thinking=thinking), MODEL)
    names = ("enable_thinking", "thinking")
    assert request.template.kwargs == ({} if switch is None else dict.fromkeys(names, switch))
    own = message(thinking=thinking, chat_template_kwargs={"enable_thinking": False, "x": 1})
    kwargs = bodies.message(own, MODEL).template.kwargs
    assert (kwargs["enable_thinking"], kwargs["x"]) == (False, 1)


@pytest.mark.parametrize(
    ("finish", "fields", "reason"),
    [
        (FinishReason.LENGTH, {}, "max_tokens"),
        (FinishReason.STOP, {}, "end_turn"),
        # The fake server says its own four tokens where it is not told how many.
        (FinishReason.LENGTH, {"max_tokens": 32_000}, "model_context_window_exceeded"),
    ],
)
def test_the_reason_of_an_end_has_anthropics_name(
    finish: FinishReason, fields: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with (
            fake_server(service_that(finish=finish)) as (server, service),
            server.client() as client,
        ):
            answer = await ask(client, **fields)
            assert answer["stop_reason"] == reason
            events = await streamed(client, **fields)
            assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
            expected = None if fields else 12
            assert [each.params.max_tokens for each in service.seen] == [expected] * 2

    run(scenario())


@pytest.mark.parametrize(
    ("stop", "calls", "reason"),
    [
        ("END", False, "stop_sequence"),
        ("END", True, "stop_sequence"),
        (7, False, "end_turn"),
        (7, True, "tool_use"),
        (None, True, "tool_use"),
    ],
)
def test_a_text_that_ended_the_answer_is_named_and_a_token_is_not(
    stop: Any, calls: bool, reason: str
) -> None:
    replies, use = ReplyFormat(tools=HERMES), ToolUse(names=frozenset({"get_weather"}))
    frame = Frame(
        id="msg_1",
        created=0,
        model=MODEL,
        top=None,
        usage=False,
        token_bytes={},
        echo={"max_tokens": 9, "thinking": True},
        new_parser=lambda: replies.parser(use, prompt_end="", show_reasoning=True),
    )
    output = Output(0, (1, 2), CALL if calls else "x", None, FinishReason.STOP, stop)
    choice = WholeChoice()
    choice.add(output)
    whole = json.loads(b"".join(MessageEncoder(frame).body_pieces([choice], Usage(5, 2, 3))))
    sequence = stop if reason == "stop_sequence" else None
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    assert {name: whole[name] for name in ended} == ended
    encoder = MessageEncoder(frame)
    encoder.events(0, output)
    last = json.loads(encoder.ending(Usage()).split(b"\n")[1].removeprefix(b"data: "))
    assert (last["type"], last["delta"]) == ("message_delta", ended)


def test_a_call_that_was_cut_keeps_its_text_and_an_answer_without_text_has_an_empty_block() -> None:
    async def scenario() -> None:
        service = service_that(says=CALL[:-25], finish=FinishReason.LENGTH)
        async with fake_server(service) as (server, _), server.client() as client:
            answer = await ask(client, tools=[WEATHER], max_tokens=len(service.says))
            (call,) = answer["content"]
            (text,) = call["input"].values()
            assert ARGUMENTS.startswith(text)
            assert list(call["input"]) == ["INVALID_JSON"]
            assert answer["stop_reason"] == "max_tokens"
            service.says, service.finish = "<think></think>", FinishReason.STOP
            empty = await ask(client)
            assert empty["content"] == [{"type": "text", "text": ""}]
            assert same(added_up(await streamed(client))) == same(empty)

    run(scenario())


def test_what_was_cut_before_it_shows_anything_has_no_block() -> None:
    async def scenario() -> None:
        service = service_that(says="<think>", finish=FinishReason.LENGTH)
        async with fake_server(service) as (server, _), server.client() as client:
            cut = await ask(client, max_tokens=len(service.says))
            assert (cut["content"], cut["stop_reason"]) == ([], "max_tokens")
            assert same(added_up(await streamed(client, max_tokens=len(service.says)))) == same(cut)

    run(scenario())


def test_a_prompt_is_refused_by_its_own_name() -> None:
    with pytest.raises(ApiError, match="prompt: is not supported; send messages") as refused:
        bodies.message(message(prompt="x"), MODEL)
    assert refused.value.param == "prompt"


def test_numbers_of_a_calls_input_keep_their_digits() -> None:
    digits = '{"city": 123456789012345678901234567890, "x": 1.10}'
    said = CALL.replace(ARGUMENTS, digits)

    async def scenario() -> None:
        async with fake_server(service_that(says=said)) as (server, _), server.client() as client:
            answer = await client.post(ROUTE, json=message(tools=[WEATHER]))
            assert digits in answer.text

    run(scenario())


# -- what the model is told


SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.9; cch=0ab12;"},
    {"type": "text", "text": "You are a coding tool.", "cache_control": CACHED},
    {"type": "text", "text": "Be kind.", "cache_control": CACHED},
]
# What a coding tool sends in the middle of its work.
HISTORY: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>Today is Sunday.</system-reminder>"},
            {"type": "text", "text": "Weather?", "cache_control": CACHED},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Paris, I guess.", "signature": "EqQBCkYI"},
            {"type": "redacted_thinking", "data": "EmwKAhgB"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "A"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "rain"}],
                "cache_control": CACHED,
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": "no city",
                "is_error": True,
            },
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "system", "content": "The user is in a hurry."},
    {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "Go on."}]},
]


def test_a_tools_conversation_becomes_the_chat_that_it_means() -> None:
    body = message(system=SYSTEM, messages=HISTORY, tools=[{**WEATHER, "cache_control": CACHED}])
    request = bodies.message(body, MODEL)
    system, asked, called, rain, failed, more, hurry, go_on = request.messages
    assert system["role"] == "system"
    assert system["content"].startswith("You are a coding tool.")
    assert system["content"].endswith("Be kind.")
    assert "billing" not in system["content"]
    assert asked["role"] == "user"
    assert asked["content"].endswith("Weather?")
    assert called["reasoning_content"] == "Paris, I guess."
    assert called["content"] == "I look."
    assert called["tool_calls"] == [
        {
            "id": f"toolu_{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": arguments},
        }
        for number, arguments in ((1, '{"city":"A"}'), (2, "{}"))
    ]
    assert rain == {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"}
    assert failed == {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no city"}
    assert more == {"role": "user", "content": "And now?"}
    assert hurry == {"role": "system", "content": "The user is in a hurry."}
    assert (go_on["role"], go_on["content"].strip()) == ("user", "Go on.")
    function = request.tools.for_template[0]["function"]
    assert function == {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": WEATHER["input_schema"],
    }


def test_turns_of_one_role_are_one_message_and_a_last_one_of_the_assistant_goes_on() -> None:
    turns = [*HELLO, *HELLO, {"role": "assistant", "content": "The answer is ("}]
    request = bodies.message(message(messages=turns), MODEL)
    assert [each["role"] for each in request.messages] == ["user", "assistant"]
    assert request.messages[0]["content"].replace("\n", "") == "hellohello"
    assert request.template.continue_final_message
    assert not request.template.add_generation_prompt
    nothing: list[Any] = ["", []]
    for said in nothing:
        turns[-1] = {"role": "assistant", "content": said}
        request = bodies.message(message(messages=turns), MODEL)
        assert [each["role"] for each in request.messages] == ["user"]
        assert request.template.add_generation_prompt


def test_a_prompt_is_rendered_as_a_chats_and_counted_before() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        async with fake_server(service_that()) as (server, service), server.client() as client:
            body = message(messages=HISTORY, tools=[WEATHER])
            del body["max_tokens"]
            counted = await client.post(COUNT + "?beta=true", json=body)
            assert counted.status_code == 200, counted.text
            answer = await ask(client, messages=HISTORY, tools=[WEATHER])
            (seen,) = service.seen
            assert counted.json() == {"input_tokens": len(seen.prompt)}
            usage = answer["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(seen.prompt)
            text = tokenizer.decode(seen.prompt)
            assert "<tool_response>\nError: no city\n</tool_response>" in text
            assert text.endswith("<|assistant|>")

    run(scenario())


# What clients send beside; it changes nothing.
BESIDE: dict[str, Any] = {
    "cache_control": CACHED,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "eu",
    "service_tier": "auto",
    "speed": "standard",
    "stream_options": {"include_usage": True},
    "mcp_servers": [],
    "a_field_of_next_year": 1,
}


def test_what_coding_tools_send_beside_changes_nothing() -> None:
    plain = bodies.message(message(), MODEL)
    for name, value in BESIDE.items():
        request = bodies.message(message(**{name: value}), MODEL)
        assert replace(request, ignored=b"") == plain, name
    assert bodies.IGNORED - BESIDE.keys() == {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "user_profile_id",
        "workspace_id",
    }
    tool = {
        **WEATHER,
        "type": "custom",
        "strict": True,
        "eager_input_streaming": True,
        "name": "mcp__" + "a" * 120,
    }
    names = bodies.message(message(tools=[tool]), MODEL).tools.use.names
    assert names == {tool["name"]}
    header = {"anthropic-version": "2023-06-01", "anthropic-beta": "fine-grained-tool-streaming"}

    async def scenario() -> None:
        async with fake_server(service_that()) as (server, _), server.client() as client:
            sent = {**header, "x-request-id": "r-1"}
            answer = await client.post(ROUTE, json=message(**BESIDE), headers=sent)
            assert answer.status_code == 200, answer.text
            assert answer.headers["request-id"] == answer.headers["x-request-id"] == "r-1"
            assert answer.json()["id"] == "msg_r-1"

    run(scenario())


def test_sampling_fields_reach_the_engine_under_their_names() -> None:
    async def scenario() -> None:
        rules = BodyRules(sampling={"temperature": 1.5, "top_k": 7})
        async with (
            fake_server(service_that(rules=rules)) as (server, service),
            server.client() as client,
        ):
            await ask(
                client,
                temperature=0.25,
                top_p=0.9,
                top_k=3,
                stop_sequences=["\n\nHuman:"],
                metadata={"user_id": "ada"},
                min_p=0.1,
            )
            await ask(client)
            first, second = service.seen
            params = first.params
            assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.9, 3)
            assert (params.stop, params.min_p, params.max_tokens) == (("\n\nHuman:",), 0.1, 12)
            assert first.tenant == "ada"
            # A model's own value may be larger than a client may send.
            assert (second.params.temperature, second.params.top_k) == (1.5, 7)

    run(scenario())


@pytest.mark.parametrize(
    ("choice", "forced", "required", "parallel"),
    [
        ({"type": "auto"}, None, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, False, False),
        ({"type": "any"}, None, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, None, True, False),
        ({"type": "tool", "name": "get_weather"}, "get_weather", False, True),
    ],
)
def test_the_choice_of_a_tool_is_that_of_a_chat(
    choice: Any, forced: str | None, required: bool, parallel: bool
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}  # allowed beside, as a chat's
    body = message(tools=[WEATHER], tool_choice=choice, thinking=thinking)
    use = bodies.message(body, MODEL).tools.use
    assert (use.forced, use.required, use.parallel) == (forced, required, parallel)
    assert use.names == {"get_weather"}
    none = message(tools=[WEATHER], tool_choice={"type": "none"})
    assert not bodies.message(none, MODEL).tools.for_template


def test_a_schema_of_the_output_is_enforced() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 42}}}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    request = bodies.message(message(output_config=config), MODEL)
    guided = request.params.guided
    assert guided is not None
    assert (guided.kind, json.loads(guided.source)) == ("json", schema)
    assert request.template.reasoning_effort == "high"


def test_a_budget_bounds_the_thoughts_of_a_model_that_has_some() -> None:
    async def scenario() -> None:
        for parser, bound in (("qwen3", 1024), ("none", None)):
            service = service_that(reasoning_parser=parser)
            async with fake_server(service) as (server, _), server.client() as client:
                await ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
                (seen,) = service.seen
                reasoning = seen.params.reasoning
                assert (None if reasoning is None else reasoning.most) == bound

    run(scenario())


def test_what_nothing_reads_is_named_in_a_header_and_a_slip_is_refused() -> None:
    async def scenario() -> None:
        async with fake_server(service_that()) as (server, _), server.client() as client:
            for route in (ROUTE, COUNT):
                answer = await client.post(route, json=message(**BESIDE))
                assert answer.headers["fairlead-ignored-fields"] == "a_field_of_next_year"
                answer = await client.post(route, json=message())
                assert "fairlead-ignored-fields" not in answer.headers
                refused = await client.post(route, json=message(max_tokns=5))
                assert refused.status_code == 400
                assert "did you mean max_tokens?" in refused.json()["error"]["message"]

    run(scenario())


# -- refusals


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, *HELLO]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
SENT: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "claude-sonnet-4-5"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"messages": [5]}, 400, "messages.0"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    (user(5), 400, "messages.0.content.0"),
    (user({"text": "x"}), 400, "messages.0.content.0"),
    (user({"type": "text"}), 400, "messages.0.content.0.text"),
    (user({"type": {}, "text": "x"}), 400, "messages.0.content.0"),
    (user(IMAGE), 400, "messages.0.content.0: image"),
    (user({"type": "document", "source": {}}), 400, "messages.0.content.0: document"),
    (user({"type": "search_result"}), 400, "messages.0.content.0"),
    (user(USE), 400, "messages.0.content.0"),
    (user({"type": "tool_result"}), 400, "messages.0.content.0.tool_use_id"),
    (
        user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
        400,
        "messages.0.content.0.content.0: image",
    ),
    (
        user({"type": "tool_result", "tool_use_id": "a", "content": {"a": 1}}),
        400,
        "messages.0.content.0.content",
    ),
    (assistant({"type": "server_tool_use"}), 400, "messages.0.content.0"),
    (assistant({"type": "web_search_tool_result"}), 400, "messages.0.content.0"),
    (
        assistant({"type": "tool_result", "tool_use_id": "a"}),
        400,
        "messages.0.content.0",
    ),
    (assistant(USE | {"input": "x"}), 400, "messages.0.content.0.input"),
    (assistant(*[USE] * 129), 400, "messages.0.content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, 400, "messages"),
    ({"messages": HELLO * 1025}, 400, "messages"),
    ({"system": 5}, 400, "system"),
    ({"system": [IMAGE]}, 400, "system.0: image"),
    ({"max_tokens": None}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "3"}, 400, "max_tokens"),
    ({"temperature": 1.5}, 400, "temperature"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 2}, 400, "top_p"),
    ({"top_k": -5}, 400, "top_k"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stop_sequences": "x"}, 400, "stop_sequences"),
    ({"stop_sequences": ["x", 5]}, 400, "stop_sequences.1"),
    ({"stop_sequences": ["x" * 300]}, 400, "stop_sequences"),
    ({"metadata": {"user_id": "x" * 257}}, 400, "metadata.user_id"),
    ({"tools": [{"name": "f"}]}, 400, "tools.0.input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "tools.0.name"),
    ({"tools": [{"input_schema": {}}]}, 400, "tools.0.name"),
    (
        {"tools": [WEATHER, {"name": "f", "input_schema": {"type": "objekt"}}]},
        400,
        "tools.1.input_schema",
    ),
    ({"tools": [WEATHER, WEATHER]}, 400, "tools"),
    (
        {"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]},
        400,
        "tools.1.type",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools.0.type"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({"tool_choice": "auto"}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, 400, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, 400, "thinking.budget_tokens"),
    ({"thinking": True}, 400, "thinking"),
    ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format.schema"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, 400, "mcp_servers"),
    ({"container": "c"}, 400, "container"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
]


def test_what_is_wrong_is_refused_in_anthropics_shape_and_names_the_field() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for fields, status, begins in SENT:
                for route in (ROUTE, COUNT):
                    if route == COUNT and not {*fields} & bodies.CountBody.model_fields.keys():
                        continue
                    answer = await client.post(route, json=message(**fields))
                    assert answer.status_code == status, (fields, answer.text)
                    body = answer.json()
                    assert set(body) == {"type", "error", "request_id"}
                    assert set(body["error"]) == {"type", "message"}
                    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
                    assert (body["type"], body["error"]["type"]) == ("error", kind)
                    assert body["error"]["message"].startswith(f"{begins}: "), body
                    assert len(answer.content) <= 4096
            assert not service.live

    run(scenario())


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for text in ("word " * 600, "x" * 10_000):
                for stream in (False, True):
                    body = message(messages=[{"role": "user", "content": text}], stream=stream)
                    answer = await client.post(ROUTE, json=body)
                    assert answer.status_code == 400
                    words = answer.json()["error"]["message"]
                    assert words.startswith("messages: prompt is too long: ")
            body = message(messages=[{"role": "user", "content": "word " * 600}])
            counted = await client.post(COUNT, json=body)
            assert counted.json()["input_tokens"] > 512

    run(scenario())


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("full", retry_after=7), 429, "rate_limit_error"),
        (EngineDead("dead"), 503, "overloaded_error"),
        (ValueError("a bug"), 500, "api_error"),
        (RequestError("max_tokens", "cannot be"), 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_engine_have_anthropics_types(
    refusal: Exception, status: int, kind: str
) -> None:
    async def scenario() -> None:
        async with (
            fake_server(FakeService(refuse=refusal)) as (server, _),
            server.client() as client,
        ):
            for stream in (False, True):
                answer = await client.post(ROUTE, json=message(stream=stream))
                assert answer.status_code == status
                assert answer.json()["error"]["type"] == kind
                assert answer.json()["request_id"] == answer.headers["request-id"]
                assert answer.headers.get("retry-after") == ("7" if status == 429 else None) or (
                    status == 503
                )

    run(scenario())


def test_errors_before_a_route_have_anthropics_shape_on_its_paths_alone() -> None:
    json_body = {"content-type": "application/json"}

    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            large = b'{"messages": "' + b"x" * 3_000_000
            deep = b'{"messages": ' + b"[" * 50 + b"]" * 50 + b"}"
            cases = [
                ("POST", ROUTE, b"{", json_body, 400, "invalid_request_error"),
                ("POST", ROUTE, deep, json_body, 400, "invalid_request_error"),
                ("POST", ROUTE, b"{}", {"content-type": "text/plain"}, 415, "invalid_request"),
                ("POST", ROUTE, large, json_body, 413, "request_too_large"),
                ("POST", COUNT, large, json_body, 413, "request_too_large"),
                ("GET", ROUTE, b"", {}, 405, "invalid_request_error"),
                ("GET", "/v1/messages/batches", b"", {}, 404, "not_found_error"),
            ]
            for method, path, content, headers, status, kind in cases:
                answer = await client.request(method, path, content=content, headers=headers)
                assert answer.status_code == status, answer.text
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"].startswith(kind)
                if content is deep:
                    assert answer.json()["error"]["message"].startswith("messages: ")
            for path in ("/v1/messagesx", "/v1/nowhere"):
                answer = await client.get(path)
                assert set(answer.json()) == {"error"}
                assert "request-id" not in answer.headers

    run(scenario())


def test_a_failure_after_the_first_byte_is_an_error_event() -> None:
    async def scenario() -> None:
        service = FakeService(error=EngineDead("the engine stopped"))
        async with fake_server(service) as (server, _), server.client() as client:
            *events, last = await streamed(client, max_tokens=3)
            assert events[0]["type"] == "message_start"
            assert last["type"] == "error"
            assert last["error"] == {"type": "overloaded_error", "message": "the engine stopped"}
            assert events[0]["message"]["id"] == "msg_" + last["request_id"]
            assert "message_stop" not in kinds(events)
            sent = message(stream=True, request_id="of-the-client")
            failed = await client.post(ROUTE, json=sent)
            assert '"id":"msg_of-the-client"' in failed.text
            last = json.loads(failed.text.strip().split("data: ")[-1])
            assert last["request_id"] == failed.headers["request-id"] != "of-the-client"

    run(scenario())


BASE = message(
    system=SYSTEM,
    messages=HISTORY,
    tools=[WEATHER],
    tool_choice={"type": "auto", "disable_parallel_tool_use": False},
    thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    output_config={"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    metadata={"user_id": "u"},
    stop_sequences=["a"],
    stream=False,
)
ODD: list[Any] = [None, True, -1, 0, 1.5, 2**64, "", "x", [], [[]], {}, {"a": []}, [None], "tool"]


def _mutated(rng: random.Random, base: Any) -> bytes:
    """The body with odd values at one to three places, on any level."""
    body = copy.deepcopy(base)
    for _ in range(rng.randint(1, 3)):
        inner = body
        while True:
            place = rng.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
            below = inner[place]
            if not isinstance(below, dict | list) or not below or rng.random() < 0.3:
                inner[place] = copy.deepcopy(rng.choice(ODD))
                break
            inner = below
        if not body:
            break
    return json.dumps(body).encode()


def _refusal(fields: bytes, check: Any) -> ApiError | RequestError | None:
    try:
        body = parse_object(fields)
        bodies.check_sent(body)
        check(body, MODEL)
    except (ApiError, RequestError) as error:
        return error
    return None


def test_mutated_bodies_are_valid_or_refused_by_a_fields_name() -> None:
    rng = random.Random(45)
    count = 200_000 if LONG_FORM else 4000
    checks = (bodies.counted, bodies.message, bodies.message, bodies.message)
    found = [_refusal(_mutated(rng, BASE), checks[number % 4]) for number in range(count)]
    refusals = [error for error in found if error is not None]
    assert all(error.param for error in refusals)
    assert count / 4 < len(refusals) < count
