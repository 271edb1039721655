"""The error object: keeps every script, escapes control characters, stays small."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fairlead_runtime.api.bodies.messages import Message
from fairlead_runtime.api.responses.items import MessageItem
from fairlead_runtime.front.errors import ApiError, printable


@pytest.mark.parametrize("text", ["500 °C", "modèle: größer", "模型不存在", "نموذج", "🤖", "≥ 1"])
def test_a_body_keeps_the_characters_of_every_script(text: str) -> None:
    body = ApiError(400, text).body
    assert text.encode() in body
    assert json.loads(body)["error"]["message"] == text
    assert ApiError(400, text).response().body == body


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\x9b31mb", "a\\x9b31mb"),
        ("a\x00\x7fb", "a\\x00\\x7fb"),
        ("a\r\nSet-Cookie: b", "a Set-Cookie: b"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\u2028b", "a b"),
        ("a\ud800b", "a\\ud800b"),
        ("a\ufeffb\u200bc", "a\\ufeffb\\u200bc"),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(), max_size=4000))
def test_a_body_is_one_printable_line_below_4_kib_whatever_the_message(text: str) -> None:
    body = ApiError(500, text).body
    assert len(body) < 4096
    message = orjson.loads(body)["error"]["message"]
    assert message.isprintable()
    assert message == printable(text)


def test_the_largest_messages_of_each_kind_stay_below_4_kib() -> None:
    for character in ('"', "\\", "\x1b", "語", "🤖", "\ud800"):
        assert len(ApiError(400, character * 10_000).body) < 4096


def test_a_refusal_of_an_earlier_answer_is_text_in_every_body() -> None:
    parts = [{"type": "refusal", "refusal": "I cannot "}, {"type": "text", "text": "say."}]
    message = Message.model_validate({"role": "assistant", "content": parts})
    item = MessageItem.model_validate({"role": "assistant", "content": parts})
    assert message.content == item.content == "I cannot \nsay."
    for kind in (Message, MessageItem):
        with pytest.raises(ValidationError, match="must be text or a list of parts"):
            kind.model_validate({"role": "user", "content": parts})
