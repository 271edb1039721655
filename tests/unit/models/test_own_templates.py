"""A chat template of the command line: in place of the model's own, or refused by its flag."""

from pathlib import Path

import pytest

from fairlead_runtime.models.chat import MAX_TEMPLATE, render_chat, use_template
from fairlead_runtime.settings.engine_config import ConfigError
from support import tiny

CHAT = [{"role": "user", "content": "hi"}]


def test_the_file_takes_the_place_of_every_template_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}é: {{ m.content }}]{% endfor %}")
    for own in (None, "{{ 1 }}", {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = own
        use_template(tokenizer, str(path))
        assert render_chat(tokenizer, CHAT) == "[useré: hi]"


def test_a_template_that_wants_another_chat_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ raise_exception('no') if messages | length < 2 }}{{ messages[1].content }}")
    tokenizer = tiny.tokenizer()
    use_template(tokenizer, str(path))
    assert render_chat(tokenizer, [*CHAT, {"role": "user", "content": "two"}]) == "two"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"a\n{% for m in messages %}", "line 2: "),
        (b"{{ messages[0].content", "line 1: "),
        (b"{% nothing %}", "line 1: "),
        (b"\xff\xfe", "is not UTF-8"),
        (b" \n", "is empty"),
        (b"", "is empty"),
        (b"x" * (MAX_TEMPLATE + 1), "has more than 1048576 bytes"),
    ],
)
def test_what_is_no_template_is_refused_by_the_flag(
    content: bytes, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.jinja"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--chat-template: ") as refusal:
        use_template(tiny.tokenizer(), str(path))
    assert what in refusal.value.message


def test_a_file_that_cannot_be_read_is_refused_by_the_flag(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"^--chat-template: .*readable file"):
            use_template(tiny.tokenizer(), str(path))
