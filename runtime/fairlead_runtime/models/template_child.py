"""The program that renders templates of requests: ``python -m
fairlead_runtime.models.template_child``.

A template is a program of its author, and transformers' sandbox bounds what it reaches, not how
long it runs or what it takes: each is rendered in a fork (``child.forks``). Owns the messages,
which ``child.program`` numbers: in, first ``Setup``, then one ``Render`` for each question; out,
one ``Rendered`` for each.
"""

import functools
import json
import sys
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.child.forks import Ending, Forks
from fairlead_runtime.child.frames import Channel, Codec, Message
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.child.life import parent_socket
from fairlead_runtime.models.chat import TemplateInputs, render_chat
from fairlead_runtime.request.sequence import RequestError

FIELD = "chat_template"
SLOW = "takes too long to render: simplify it"
CRASHED = "takes too much memory to render: simplify it"
FAILED = "cannot be rendered here: simplify it"
NO_TEXT = "renders what is no valid text: it has half of a surrogate pair"
LONG = "renders more text than this model could read: simplify it"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one rendering, as ``child.forks.Limits``."""

    seconds: float = 3.5
    cpu_seconds: int = 1
    memory: int = 128 * 1024 * 1024


class Setup(Message):
    """``special_tokens`` and ``chat_template``: the tokenizer's own, as JSON."""

    special_tokens: str
    chat_template: str
    limits: RenderLimits


class Render(Message):
    """``chat``: messages, tools and the fields of TemplateInputs, as JSON. ``most``: characters of
    the result.
    """

    chat: str
    most: int


class Rendered(Message):
    """``error``: why there is no ``text``, about the field ``param``. ``late``: the processor was
    busy, and the rest says nothing.
    """

    text: str = ""
    param: str = ""
    error: str = ""
    late: bool = False


QUESTION: Codec[tuple[int, Setup | Render]] = Codec(tuple[int, Setup | Render])
ANSWER: Codec[tuple[int, Rendered]] = Codec(tuple[int, Rendered])


class Templates:
    """What rendering reads of a tokenizer."""

    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template
    get_chat_template = PreTrainedTokenizerBase.get_chat_template

    def __init__(self, special_tokens: dict[str, Any], chat_template: Any) -> None:
        self.special_tokens_map = special_tokens
        self.chat_template = chat_template


def main() -> int:
    channel = Channel(parent_socket(), ANSWER, QUESTION)
    first = channel.receive()
    if first is None or not isinstance(first[1], Setup):
        return 0
    setup = first[1]
    templates = Templates(json.loads(setup.special_tokens), json.loads(setup.chat_template))
    release_memory()
    forks = Forks(setup.limits, ANSWER, functools.partial(_rendered, templates), _verdict)
    forks.serve(channel)
    return 0


def _rendered(templates: Any, question: Render) -> Rendered:
    chat = json.loads(question.chat)
    inputs = TemplateInputs(**{**chat["inputs"], "documents": tuple(chat["inputs"]["documents"])})
    try:
        text = render_chat(templates, chat["messages"], tools=chat["tools"], inputs=inputs)
    except RequestError as error:
        return Rendered(param=error.param, error=str(error).removeprefix(f"{error.param}: "))
    if len(text) > question.most:
        return Rendered(param=FIELD, error=LONG)
    try:
        text.encode()
    except UnicodeEncodeError:
        return Rendered(param=FIELD, error=NO_TEXT)
    return Rendered(text)


def _verdict(rendered: Rendered | Ending, _seconds: float) -> Rendered:
    match rendered:
        case Ending.LATE:
            return Rendered(late=True)
        case Ending.SLOW:
            return Rendered(param=FIELD, error=SLOW)
        case Ending.CRASHED:
            return Rendered(param=FIELD, error=CRASHED)
        case Ending.FAILED:
            return Rendered(param=FIELD, error=FAILED)
    return rendered


if __name__ == "__main__":
    sys.exit(main())
