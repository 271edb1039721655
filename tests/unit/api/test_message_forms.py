"""The forms in which clients send the messages of a chat, and what a template gets of them."""

from typing import Any

import pytest

from fairlead_runtime.api.bodies import request_bodies
from fairlead_runtime.front.errors import ApiError
from support.api_harness import MODEL, chat

ASKED = {"role": "user", "content": "x"}


def templated(*messages: Any) -> tuple[dict[str, Any], ...]:
    return request_bodies.chat(chat(messages=[*messages]), MODEL).messages


def legacy(name: str, arguments: Any = "{}") -> dict[str, Any]:
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "function_call": call}


def test_functions_are_called_and_answer_as_tools_are() -> None:
    result = {"role": "function", "name": "f", "content": "1"}
    got = templated(ASKED, legacy("f", '{"a":1}'), result, legacy("g"), result, ASKED)
    ids = [got[place]["tool_calls"][0]["id"] for place in (1, 3)]
    assert [got[place]["tool_call_id"] for place in (2, 4)] == ids
    assert len({*ids}) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)  # as Mistral's templates want
    assert [message["role"] for message in got] == [
        *("user", "assistant", "tool", "assistant", "tool", "user"),
    ]
    assert got[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert (got[2]["name"], got[2]["content"]) == ("f", "1")


def test_a_functions_result_without_its_call_is_one_of_a_tool() -> None:
    alone = templated(ASKED, {"role": "function", "name": "f", "content": "1"})[1]
    assert (alone["role"], len(alone["tool_call_id"])) == ("tool", 9)
    second = {"role": "function", "name": "f", "content": "2"}
    _, _, first, other = templated(ASKED, legacy("f"), second, second)
    assert first["tool_call_id"] != other["tool_call_id"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        legacy("f") | {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_a_function_call_stands_alone_in_a_message_of_the_assistant(message: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\.1\.function_call: is allowed only") as refused:
        templated(ASKED, message)
    assert refused.value.param == "messages.1.function_call"


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"arguments": {"a": [1, None]}}, '{"a":[1,null]}'),
        ({"arguments": {}}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_of_earlier_calls_may_be_objects_or_left_out(sent: Any, text: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", **sent}}
    called = templated(ASKED, {"role": "assistant", "tool_calls": [call]})[1]
    assert called["tool_calls"][0]["function"]["arguments"] == text
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": [1]}}
    with pytest.raises(ApiError, match=r"tool_calls\.0\.function\.arguments: "):
        templated(ASKED, {"role": "assistant", "tool_calls": [call]})


def test_parts_of_responses_and_texts_alone_are_text_in_a_chat() -> None:
    parts = [{"type": "input_text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert templated({"role": "user", "content": parts})[0]["content"] == "a\nb\nc"
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]}
    assert templated(ASKED, said)[1]["content"] == "d"


def test_thinking_among_the_parts_of_an_answer_is_its_reasoning() -> None:
    parts: list[Any] = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
    _, got = templated(ASKED, {"role": "assistant", "content": parts})
    assert (got["content"], got["reasoning_content"]) == ("so", "hm")
    _, own = templated(ASKED, {"role": "assistant", "content": parts, "reasoning": "own"})
    assert (own["content"], own["reasoning_content"]) == ("so", "own")
    _, alone = templated(ASKED, {"role": "assistant", "content": parts[:1]})
    assert (alone["content"], alone["reasoning_content"]) == ("", "hm")
    with pytest.raises(ApiError, match=r"messages\.0\.content: "):
        templated({"role": "user", "content": parts})


def test_a_functions_result_answers_the_newer_call_of_its_name() -> None:
    def call(id_: str, name: str) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}

    calls = [call("a", "f"), call("b", "g"), call("c", "f"), call("d", "f")]
    results = [{"role": "function", "name": name, "content": "1"} for name in "gffh"]
    shown = templated(
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call("old", "f")]},
        {"role": "tool", "tool_call_id": "old", "content": "0"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        *results,
    )
    ids = [message["tool_call_id"] for message in shown[5:]]
    assert ids[:3] == ["b", "a", "d"]
    assert ids[3] not in {"a", "b", "c", "d", "old"}, "no call has this name"
