"""The tables of fields in docs/http.md have every field that a body may have, and no other."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from fairlead_runtime.api.anthropic import bodies as anthropic
from fairlead_runtime.api.bodies.harmless_fields import HARMLESS
from fairlead_runtime.api.bodies.messages import Message
from fairlead_runtime.api.bodies.refused_fields import REFUSED, REFUSED_OF_MESSAGES
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody, StreamOptions
from fairlead_runtime.api.responses import bodies
from fairlead_runtime.api.responses.bodies import ResponseBody
from fairlead_runtime.api.routes import tokenize

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def tables(section: str) -> list[list[list[str]]]:
    """The cells of each table of a section, by row, without the heads."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\) ?\| ?", line.strip("|\n ")) for line in block.splitlines()]
        found.append(rows[2:])
    return found


def named(table: Iterable[list[str]], *, route: str = "") -> set[str]:
    """The fields in the first cells; with ``route`` without those of another route."""
    fields: set[str] = set()
    for first, *_ in table:
        other = re.search(r"\((\w+)\)$", first)
        if not (route and other) or (other and other[1] == route):
            fields |= set(re.findall(r"`([a-z_.]+)`", first))
    return fields


def fields(*kinds: type[BaseModel]) -> set[str]:
    return {name for kind in kinds for name in kind.model_fields}


FIELDS, MESSAGES = tables("Fields")


@pytest.mark.parametrize(("route", "kind"), [("chat", ChatBody), ("completions", CompletionBody)])
def test_the_table_has_every_field_of_a_generating_route(route: str, kind: type[BaseModel]) -> None:
    options = {f"stream_options.{name}" for name in fields(StreamOptions)}
    assert named(FIELDS, route=route) == fields(kind) - {"stream_options"} | options


def test_the_page_of_other_servers_has_every_field_that_is_refused_or_harmless() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    fates = {row[0].strip("| `"): row[2:] for row in rows}
    for name in REFUSED:
        assert any("refused" in fate for fate in fates[name]), name
    for name in HARMLESS:
        assert any("ignored" in fate or "refused" in fate for fate in fates[name]), name
    for name, (chat, completions, _) in fates.items():
        for kind, fate in ((ChatBody, chat), (CompletionBody, completions)):
            if fate != "-":
                assert (fate == "honoured") == (name in kind.model_fields), name


def test_every_field_has_a_default_values_and_a_convention() -> None:
    for row in FIELDS:
        assert len(row) == 4, row
        assert all(row), row
        assert re.match(r"OpenAI|vLLM|transformers|ours", row[3]), row


def test_the_table_of_messages_has_every_field() -> None:
    assert named(MESSAGES) == fields(Message)


def test_the_text_below_it_has_what_is_refused_of_a_message() -> None:
    after = PAGE.split("\nA message of a chat:\n")[1].split("\n## ")[0]
    for name in REFUSED_OF_MESSAGES:
        assert re.search(rf"`{name}\b", after), name


def test_the_table_of_responses_has_every_field_and_the_text_what_is_refused() -> None:
    (table,) = tables("Responses")
    assert named(table) == fields(ResponseBody)
    text = PAGE.split("\n## Responses\n")[1].split("\n## ")[0]
    for name in bodies._REFUSED:
        assert re.search(rf"`{name}\b", text), name


def test_the_table_of_messages_has_every_field_and_the_text_what_is_refused_or_ignored() -> None:
    table, _ = tables("Messages")
    assert named(table) == fields(anthropic.MessagesBody)
    text = PAGE.split("\n## Messages\n")[1].split("\n## ")[0]
    for name in anthropic._REFUSED.keys() | anthropic.IGNORED:
        assert re.search(rf"`{name}\b", text), name


def test_the_table_of_tokens_has_every_field() -> None:
    (table,) = tables("Tokens")
    assert named(table) == fields(tokenize.TokenizeBody, tokenize.DetokenizeBody)
