"""The forms in which one chat template takes messages, found by rendering conversations with it.

Owns the forms and the trials. A template shows what it reads; whatever it loses in every form stays
in the usual one, since some templates leave out parts of a conversation by intention.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
Render = Callable[[list[Message]], str]  # raises anything


class TemplateForms(NamedTuple):
    """``parts``: the roles whose content must be a list of parts. ``text_arguments``: earlier calls
    have their arguments as JSON text, else as the value. ``joined``: the roles whose messages that
    follow each other are one, with a line for each. ``early``: all messages of the system come
    before the others.
    """

    parts: frozenset[str] = frozenset()
    text_arguments: bool = False
    joined: frozenset[str] = frozenset()
    early: bool = False

    def fit(
        self, messages: Sequence[Mapping[str, Any]], *, continues: bool = False
    ) -> list[Message]:
        """Messages for the template. Their contents are texts, the arguments of calls JSON text.
        ``continues``: the last one is continued, so it stays the last.
        """
        if self.early:
            end = len(messages) - continues
            early = sorted(messages[:end], key=lambda message: message.get("role") != "system")
            messages = [*early, *messages[end:]]
        return [self._fit(message) for message in _joined(messages, self.joined)]

    def _fit(self, message: Mapping[str, Any]) -> Message:
        fields = dict(message)
        if "tool_calls" in fields and not self.text_arguments:
            fields["tool_calls"] = [_with_value(call) for call in fields["tool_calls"]]
        if self.parts and fields["role"] in self.parts:
            fields["content"] = [{"type": "text", "text": fields["content"]}]
        return fields


USUAL = TemplateForms()

_WORDS = "thewordsoftheprobe"
_ARGUMENTS = {"placeoftheprobe": _WORDS}


def forms_of(render: Render) -> TemplateForms:
    """The forms that ``render`` needs to show a text of each role, and the arguments of calls."""

    def better(forms: TemplateForms, rival: TemplateForms, trial: list[Message]) -> TemplateForms:
        """The rival, where only it shows what is tried."""
        usual, alone = (_shows(_rendered(render, form.fit(trial))) for form in (forms, rival))
        return rival if alone and not usual else forms

    forms = USUAL
    for role, trial in _TEXTS.items():
        forms = better(forms, forms._replace(parts=forms.parts | {role}), trial)
    # Coding tools send their instructions and the developer's, what is around and the question.
    for role, trial in _TWICE.items():
        forms = better(forms, forms._replace(joined=forms.joined | {role}), trial)
    forms = better(forms, forms._replace(early=True), _LATE)
    forms = better(forms, forms._replace(text_arguments=True), [*_QUESTION, _calls(_ARGUMENTS)])
    result = {**_message("tool", _WORDS), "tool_call_id": _CALL_ID}
    with_tool = forms._replace(parts=forms.parts | {"tool"})
    return better(forms, with_tool, [*_QUESTION, _calls({}), result])


def _shows(text: str) -> bool:
    """Whether the words stand there, and not in a value as Python writes it."""
    return _WORDS in text and f": '{_WORDS}'" not in text


def _rendered(render: Render, messages: list[Message]) -> str:
    """The text; "" where the template refuses the messages."""
    try:
        return render(messages)
    except Exception:  # noqa: BLE001 - a template is a program by its author: it may raise anything
        return ""


def _message(role: str, content: str = "x") -> Message:
    return {"role": role, "content": content}


def _calls(arguments: Mapping[str, str]) -> Message:
    """An earlier call of the assistant, without text."""
    function = {"name": "nameoftheprobe", "arguments": json.dumps(arguments)}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {**_message("assistant", ""), "tool_calls": [call]}


_CALL_ID = "abcdefghi"  # nine letters: the templates of Mistral refuse any other id
_QUESTION = [_message("user")]
_LATE = [_message("system"), *_QUESTION, _message("assistant"), _message("system", _WORDS)]
_LATE += _QUESTION
# By role, conversations with the words in the second of two messages of it.
_TWICE = {
    "system": [_message("system"), _message("system", _WORDS), *_QUESTION],
    "user": [*_QUESTION, _message("user", _WORDS)],
}
# By role, conversations with the words in a message of it.
_TEXTS = {
    "user": [_message("user", _WORDS)],
    "system": [_message("system", _WORDS), *_QUESTION],
    "assistant": [*_QUESTION, _message("assistant", _WORDS), *_QUESTION],
}


def _joined(
    messages: Sequence[Mapping[str, Any]], roles: frozenset[str]
) -> list[Mapping[str, Any]]:
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        role, texts = message.get("role"), (last.get("content"), message.get("content"))
        # What is neither a role nor a text is for the template to refuse.
        known = isinstance(role, str) and role in roles and role == last.get("role")
        if known and all(isinstance(text, str) for text in texts):
            # A name is that of the whole only where both have it.
            same = {key: value for key, value in last.items() if message.get(key) == value}
            joined[-1] = {**same, "content": "\n".join(map(str, texts))}
        else:
            joined.append(message)
    return joined


def _with_value(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with the value of its arguments. Text that is no JSON object, which a model may have
    written, stays text.
    """
    function = call["function"]
    try:
        value = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": value}}
