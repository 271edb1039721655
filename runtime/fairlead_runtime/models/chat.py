"""Messages and texts to token ids, by the model's own tokenizer and chat template.

Owns both steps and their errors. Renders in transformers' sandbox, which bounds what a template
reaches and not how long it runs.
"""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.models.template_forms import TemplateForms, forms_of
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.settings.terminal import printable

_log = logging.getLogger("fairlead.serve")

# The names that rendering itself gives to a template, or reads.
RESERVED = frozenset(
    {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
)


class TemplateInputs(NamedTuple):
    """What a request says to the template beside messages and tools. ``continue_final_message``:
    the prompt ends within the last message. ``chat_template``: in place of the model's own, or the
    name of one of these. ``kwargs``: further names that the template may read, none of RESERVED.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: tuple[Mapping[str, Any], ...] = ()
    chat_template: str | None = None
    reasoning_effort: str | None = None
    kwargs: Mapping[str, Any] = MappingProxyType({})


NO_INPUTS = TemplateInputs()
MAX_WORDS = 400  # characters of what a template says
MAX_TEMPLATE = 1024 * 1024  # bytes of a file
_TEMPLATE_FIX = "name a file with a chat template in Jinja"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_SOME_TOOLS = (
    {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": _NO_PARAMETERS},
    },
)
_SOME_DOCUMENTS = ({"title": "", "text": ""},)
_SILENT = {"enable_thinking": False, "thinking": False}  # the names that templates read
_NOT_SHOWN = "the chat template does not show the last message's content as it is; leave this out"
# The file names of what runs in a template, as Jinja's tracebacks have them.
_IN_TEMPLATE = ("<template>", "<unknown>")


def template_names(tokenizer: PreTrainedTokenizerBase) -> Collection[str]:
    """The names of the model's own templates; empty where it has one without a name, or none."""
    templates: Any = getattr(tokenizer, "chat_template", None)
    return templates.keys() if isinstance(templates, dict) else ()


def use_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Make the text of a file the tokenizer's chat template. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_TEMPLATE + 1)
        tokenizer.chat_template = content.decode("utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError("chat_template", f"{path}: {reason}", "name a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError("chat_template", f"{path}: is not UTF-8 text", _TEMPLATE_FIX) from None
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise ConfigError("chat_template", f"{path}: {reason}", _TEMPLATE_FIX) from None
    # What it says about this chat: it may want another one.
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        _log.debug("the chat template refuses a chat of one message: %s", type(error).__name__)
    if len(content) > MAX_TEMPLATE or not content.strip():
        reason = "is empty" if not content.strip() else f"has more than {MAX_TEMPLATE} bytes"
        raise ConfigError("chat_template", f"{path}: {reason}", _TEMPLATE_FIX)


def template_text(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    *,
    tools: bool = True,
    documents: bool = False,
) -> str:
    """The chat template to render: ``chat_template``, else the model's; where that has several, the
    one for ``tools``, for ``documents`` or the default. "" without any.
    """
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    if not isinstance(templates, dict):
        return chat_template or str(templates)
    uses = {"tool_use": tools, "rag": documents and not tools}
    name = next((name for name, use in uses.items() if use and name in templates), "default")
    return str(templates.get(chat_template or name, chat_template or ""))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    inputs: TemplateInputs = NO_INPUTS,
) -> str:
    """The prompt that the template renders from ``messages`` (each with role and content), for
    ``encode_chat``.

    Raises RequestError for a model without a template, for tools and documents that the template
    does not read and for messages that it refuses.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    some = {"tools": bool(tools), "documents": bool(inputs.documents)}
    source = template_text(tokenizer, inputs.chat_template, **some)
    if not source:
        raise RequestError(
            "messages", "this model has no chat template: use /v1/completions with a prompt instead"
        )
    for field, sent in some.items():
        if sent and field not in source:
            raise RequestError(
                field, f"this model's chat template has no place for {field}; leave them out"
            )
    forms = _forms(tokenizer, source, **some)
    fitted = forms.fit(messages, continues=inputs.continue_final_message)

    def render(inputs: TemplateInputs) -> str:
        return _rendered(tokenizer, source, fitted, tools or (), inputs)

    try:
        return render(inputs)
    # A template is a program by its author: any error it raises is about what it was given.
    except Exception as error:
        own = inputs.chat_template is not None and source == inputs.chat_template
        raise _refusal(error, inputs, render, own=own) from error


def _refusal(
    error: Exception, inputs: TemplateInputs, render: Callable[[TemplateInputs], str], *, own: bool
) -> RequestError:
    """The refusal of the field without which the template renders, else of the request's ``own``
    template or of the messages. Quotes what a template says of its input, and else no input.
    """
    words = type(error) is TemplateError  # that its author raises
    problem = (
        printable(str(error)[:MAX_WORDS])[:MAX_WORDS]
        if words
        else f"{type(error).__name__}{_line(error)}"
    )
    trials = (
        ("continue_final_message", inputs._replace(continue_final_message=False), _NOT_SHOWN),
        (
            "chat_template_kwargs",
            inputs._replace(kwargs={}),
            f"the template refuses them: {problem}",
        ),
        ("reasoning_effort", inputs._replace(reasoning_effort=None), f"is refused: {problem}"),
    )
    for field, trial, message in trials:
        if trial != inputs and _renders(render, trial):
            return RequestError(field, message)
    if own:
        return RequestError("chat_template", f"fails: {problem}")
    return RequestError("messages", f"the model's chat template refuses them: {problem}")


def _renders(render: Callable[[TemplateInputs], str], inputs: TemplateInputs) -> bool:
    try:
        render(inputs)
    except Exception:  # noqa: BLE001 - as in render_chat
        return False
    return True


def _line(error: Exception) -> str:
    """Where in a template it was raised, in words; "" for an error outside of it."""
    lines = [error.lineno] if isinstance(error, TemplateSyntaxError) else []
    calls = traceback.walk_tb(error.__traceback__)
    lines += [line for frame, line in calls if frame.f_code.co_filename in _IN_TEMPLATE]
    return f" in line {lines[-1]}" if lines else ""


@functools.lru_cache(maxsize=16)
def _forms(
    tokenizer: PreTrainedTokenizerBase, source: str, *, tools: bool, documents: bool
) -> TemplateForms:
    """The forms of the template ``source``, which are tried once."""
    inputs = TemplateInputs(
        add_generation_prompt=False, documents=_SOME_DOCUMENTS if documents else ()
    )
    some_tools = _SOME_TOOLS if tools else ()
    return forms_of(lambda messages: _rendered(tokenizer, source, messages, some_tools, inputs))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    inputs: TemplateInputs,
) -> str:
    template: Any = tokenizer.apply_chat_template  # transformers' method is untyped
    text = template(
        messages,
        tools=[dict(tool) for tool in tools] or None,
        documents=[dict(document) for document in inputs.documents] or None,
        chat_template=source,
        add_generation_prompt=inputs.add_generation_prompt,
        continue_final_message=inputs.continue_final_message,
        tokenize=False,
        **{**_effort(inputs.reasoning_effort), **inputs.kwargs},
    )
    return str(text)


def _effort(effort: str | None) -> Mapping[str, Any]:
    """The effort under its name, and "none" as templates of models that may think know it."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **(_SILENT if effort == "none" else {})}


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered chat, which already contains its special tokens."""
    return _encode(tokenizer, text, special=False)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds."""
    return _encode(tokenizer, text, special=True)


def bad_word_ids(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str | tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The token ids of words that must not be generated; words that are ids stay as they are.

    vLLM's rule: each word as it begins a text, and as it follows a space where that is a different
    first token and as many of them. Raises RequestError for a word without tokens.
    """
    id_runs: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            id_runs.append(word)
            continue
        try:
            bare, spaced = (
                tuple(_encode(tokenizer, prefix + word.lstrip(), special=False))
                for prefix in ("", " ")
            )
        except RequestError as error:
            raise error.renamed({"prompt": "bad_words"}) from None
        if not bare:
            raise RequestError(
                "bad_words", "has a word that the model's tokenizer has no token for"
            )
        id_runs.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            id_runs.append(spaced)
    return tuple(id_runs)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    # Lone surrogates, which JSON allows, are not valid text: the tokenizer rejects them.
    except (UnicodeEncodeError, TypeError) as error:
        reason = "is not valid Unicode text: it has a surrogate without its pair"
        raise RequestError("prompt", reason) from error
    return ids
