"""OpenAI's client uses the Responses API; its own types check every event and every object."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.sequence import FinishReason, RequestError
from support import tiny
from support.api_harness import TEXT, FakeService, Server, fake_server, is_error, run

ROUTE = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
OPENED = ["response.created", "response.in_progress"]


def a_text(kind: str = "output_text") -> list[str]:
    """The events of one item of text, repeated deltas left out."""
    return [
        "response.output_item.added",
        "response.content_part.added",
        f"response.{kind}.delta",
        f"response.{kind}.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


A_CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


async def whole(server: Server, **fields: Any) -> Response:
    fields = {"model": "tiny", "input": "hello", **fields}
    answer: Response = await server.openai.responses.create(**fields)
    Response.model_validate(answer.model_dump(), strict=True)
    return answer


async def streamed(server: Server, **fields: Any) -> list[Any]:
    """All events, checked: types, numbers, and that each delta belongs to the item that is open."""
    fields = {"model": "tiny", "input": "hello", **fields, "stream": True}
    events = [event async for event in await server.openai.responses.create(**fields)]
    open_item = ""
    for number, event in enumerate(events):
        EVENT.validate_python(event.model_dump())
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            open_item = event.item.id
        elif hasattr(event, "item_id"):
            assert event.item_id == open_item
    return events


def kinds(events: list[Any]) -> list[str]:
    """The types in order; deltas that follow each other count once."""
    types = [event.type for event in events]
    return [
        kind
        for place, kind in enumerate(types)
        if not (kind.endswith(".delta") and place and types[place - 1] == kind)
    ]


def same(answer: Response) -> dict[str, Any]:
    """Without what differs between two answers."""
    fields = answer.model_dump(exclude={"id", "created_at"})
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
    return fields


def test_a_text_is_answered_whole_and_streamed_alike() -> None:
    async def scenario() -> None:
        async with fake_server(FakeService(finish=FinishReason.STOP)) as (server, service):
            answer = await whole(server, max_output_tokens=12)
            assert (answer.output_text, answer.status, answer.object) == (
                TEXT[:12],
                "completed",
                "response",
            )
            assert answer.id.startswith("resp_")
            assert answer.usage is not None
            assert answer.usage.input_tokens == len(service.seen[0].prompt)
            assert answer.usage.input_tokens_details.cached_tokens == 3
            assert answer.usage.output_tokens == 12
            assert answer.usage.total_tokens == answer.usage.input_tokens + 12
            events = await streamed(server, max_output_tokens=12)
            assert kinds(events) == [*OPENED, *a_text(), "response.completed"]
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == TEXT[:12]
            (done,) = [e for e in events if e.type == "response.output_text.done"]
            assert done.text == TEXT[:12]
            assert events[0].response.status == "in_progress"
            assert events[0].response.output == []
            assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
            assert same(events[-1].response) == same(answer)

    run(scenario())


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    async def scenario() -> None:
        service = FakeService(
            says=SAID, finish=FinishReason.STOP, reasoning_parser="qwen3", max_model_len=4096
        )
        async with fake_server(service) as (server, _):
            answer = await whole(server, tools=[WEATHER])
            reasoning, message, *calls = answer.output
            assert [item.type for item in answer.output] == [
                "reasoning",
                "message",
                "function_call",
                "function_call",
            ]
            assert reasoning.content[0].text == "Where?"  # type: ignore[union-attr,index]
            assert message.content[0].text == "I look."  # type: ignore[union-attr,index]
            for call in calls:
                assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)  # type: ignore[union-attr]
            assert len({call.call_id for call in calls}) == 2  # type: ignore[union-attr]
            assert answer.usage is not None
            thought = answer.usage.output_tokens_details.reasoning_tokens
            assert len("Where?") <= thought <= len("<think>\nWhere?\n</think>\n\n")
            events = await streamed(server, tools=[WEATHER])
            assert kinds(events) == [
                *OPENED,
                *a_text("reasoning_text"),
                *a_text(),
                *A_CALL,
                *A_CALL,
                "response.completed",
            ]
            assert same(events[-1].response) == same(answer)
            added = [e for e in events if e.type == "response.output_item.added"]
            assert [e.output_index for e in added] == [0, 1, 2, 3]
            first = [
                e.delta
                for e in events
                if e.type == "response.function_call_arguments.delta" and e.output_index == 2
            ]
            assert "".join(first) == ARGUMENTS

    run(scenario())


def test_an_answer_that_is_cut_is_incomplete() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            answer = await whole(server, max_output_tokens=5)
            assert answer.status == "incomplete"
            assert answer.incomplete_details is not None
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
            events = await streamed(server, max_output_tokens=5)
            assert events[-1].type == "response.incomplete"
            assert same(events[-1].response) == same(answer)

    run(scenario())


def test_an_answer_without_text_has_an_empty_message() -> None:
    async def scenario() -> None:
        service = FakeService(says=" ", finish=FinishReason.STOP, reasoning_parser="qwen3")
        async with fake_server(service) as (server, _):
            service.says = "<think></think>"
            answer = await whole(server)
            assert (answer.output_text, answer.status) == ("", "completed")
            events = await streamed(server)
            without_delta = [kind for kind in a_text() if not kind.endswith(".delta")]
            assert kinds(events) == [*OPENED, *without_delta, "response.completed"]

    run(scenario())


def test_a_stream_is_named_events_and_a_failure_is_the_last() -> None:
    async def scenario() -> None:
        service = FakeService(error=ServiceError("the engine stopped"))
        async with fake_server(service) as (server, _), server.client() as client:
            body = {"model": "tiny", "input": "x", "stream": True, "max_output_tokens": 3}
            answer = await client.post(ROUTE, json=body)
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            frames = [each.split("\n") for each in answer.text.removesuffix("\n\n").split("\n\n")]
            for name, data in frames:
                event = EVENT.validate_json(data.removeprefix("data: "))
                assert name == f"event: {event.type}"
            assert event.type == "response.failed"
            assert event.response.status == "failed"
            assert event.response.error.message == "the engine stopped"

    run(scenario())


def test_a_conversation_is_sent_as_items() -> None:
    tokenizer: Any = tiny.tokenizer()

    async def scenario() -> None:
        service = FakeService(says=CALL, finish=FinishReason.STOP, max_model_len=4096)
        async with fake_server(service) as (server, _):
            first = await whole(server, tools=[WEATHER], instructions="Be kind.")
            (call,) = first.output
            items: list[Any] = [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
                *first.output,
                {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},  # type: ignore[union-attr]
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "It rains.", "annotations": []}],
                },
                {"role": "developer", "content": "Be brief."},
            ]
            await whole(server, input=items, tools=[WEATHER], instructions="Be kind.")
            one, two = (tokenizer.decode(each.prompt) for each in service.seen)
            head = one.removesuffix("<|assistant|>")
            assert "<|system|>Be kind.\n\nYou may call" in head
            assert two == head + (
                f"<|assistant|>\n{CALL}<|end|><|user|><tool_response>\nrain\n</tool_response><|end|>"
                "<|assistant|>It rains.<|end|><|system|>Be brief.<|end|><|assistant|>"
            )

    run(scenario())


def test_the_request_is_repeated_and_reaches_the_engine() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service):
            answer = await whole(
                server,
                temperature=0.5,
                top_p=0.9,
                max_output_tokens=7,
                metadata={"a": "b"},
                user="ada",
                store=False,
                tools=[WEATHER],
                tool_choice="none",
                parallel_tool_calls=False,
                extra_body={"top_k": 3, "seed": 5, "ignore_eos": True},
            )
            assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 7)
            assert (answer.metadata, answer.user, answer.tool_choice) == ({"a": "b"}, "ada", "none")
            assert answer.tools[0].name == "get_weather"  # type: ignore[union-attr]
            assert answer.parallel_tool_calls is False
            (seen,) = service.seen
            params = seen.params
            assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 7)
            assert (params.top_k, params.seed, params.ignore_eos, params.n) == (3, 5, True, 1)
            assert seen.tenant == "ada"

    run(scenario())


def test_logprobs_come_with_the_text_when_they_are_asked_for() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _):
            fields: dict[str, Any] = {
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
                "max_output_tokens": 4,
            }
            answer = await whole(server, **fields)
            logprobs = answer.output[0].content[0].logprobs  # type: ignore[union-attr,index]
            assert [each.token for each in logprobs] == list(TEXT[:4])  # type: ignore[union-attr]
            assert [len(each.top_logprobs) for each in logprobs] == [2] * 4  # type: ignore[union-attr]
            events = await streamed(server, **fields)
            counts = [len(e.logprobs) for e in events if e.type == "response.output_text.delta"]
            assert counts == [1] * 4
            assert same(events[-1].response) == same(answer)

    run(scenario())


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ({"conversation": "conv_1"}, 400, "conversation"),
    ({"store": True}, 400, "store"),
    ({"background": True}, 400, "background"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
    ({"truncation": "auto"}, 400, "truncation"),
    ({"n": 2}, 400, "n"),
    ({"model": "other"}, 404, "model"),
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input.0.content"),
    ({"input": [{"role": "wizard", "content": "x"}]}, 400, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, 400, "input.0.content"),
    (
        {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}]},
        400,
        "input.1.call_id",
    ),
    ({"input": "x" * 10_000}, 400, "input"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": "3"}, 400, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, 400, "max_output_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"tools": [{"type": "file_search"}]}, 400, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, 400, "tools.0.name"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, 400, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {}, "name": 5}}},
        400,
        "text.format.name",
    ),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"text": {"format": 5}}, 400, "text.format"),
]


def test_what_is_wrong_or_needs_stored_state_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, service), server.client() as client:
            for fields, status, param in REFUSED:
                answer = await client.post(ROUTE, json={"model": "tiny", "input": "x", **fields})
                assert answer.status_code == status, (fields, answer.text)
                assert is_error(answer.json())
                error = answer.json()["error"]
                assert error["param"] == param, (fields, answer.text)
                assert error["message"].startswith(param), error
            assert not service.live

    run(scenario())


def test_every_problem_in_a_message_has_the_name_that_the_client_sent() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            tools = [{"type": "function", "name": name} for name in ("a b", "c d")]
            answer = await client.post(ROUTE, json={"model": "tiny", "input": "x", "tools": tools})
            message = answer.json()["error"]["message"]
            assert message.startswith("tools.0.name: ")
            assert "; tools.1.name: " in message
            body = {"model": "tiny", "input": "x", "tools": [WEATHER], "tool_choice": 3}
            message = (await client.post(ROUTE, json=body)).json()["error"]["message"]
            assert '{"type": "function", "name": ...}' in message

    run(scenario())


@pytest.mark.parametrize(
    ("engines", "sent"),
    [
        ("structured_outputs.json", "text.format.schema"),
        ("max_tokens", "max_output_tokens"),
        ("prompt", "input"),
        ("temperature", "temperature"),
    ],
)
def test_a_refusal_of_the_engine_has_the_name_that_the_client_sent(engines: str, sent: str) -> None:
    async def scenario() -> None:
        service = FakeService(refuse=RequestError(engines, "cannot be"))
        async with fake_server(service) as (server, _), server.client() as client:
            form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
            body = {"model": "tiny", "input": "x", "text": {"format": form}}
            error = (await client.post(ROUTE, json=body)).json()["error"]
            assert (error["param"], error["message"]) == (sent, f"{sent}: cannot be")

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_byte_has_its_status(stream: bool) -> None:
    async def scenario() -> None:
        service = FakeService(finish=FinishReason.ERROR)
        async with fake_server(service) as (server, _), server.client() as client:
            body = {"model": "tiny", "input": "x", "stream": stream, "max_output_tokens": 1}
            answer = await client.post(ROUTE, json=body)
            assert answer.status_code == 500
            assert is_error(answer.json())

    run(scenario())
