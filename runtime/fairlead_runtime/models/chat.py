"""Messages and texts to token ids, by the model's own tokenizer and chat template.

Owns both steps and their errors. Renders in transformers' sandbox, which bounds what a template
reaches and not how long it runs.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.models.template_forms import TemplateForms, forms_of
from fairlead_runtime.request.sequence import RequestError

# The names that rendering itself gives to a template, or reads.
RESERVED = frozenset(
    {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
)


class TemplateInputs(NamedTuple):
    """What a request says to the template beside messages and tools. ``continue_final_message``:
    the prompt ends within the last message. ``chat_template``: in place of the model's own.
    ``kwargs``: further names that the template may read, none of RESERVED.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: tuple[Mapping[str, Any], ...] = ()
    chat_template: str | None = None
    kwargs: Mapping[str, Any] = MappingProxyType({})


NO_INPUTS = TemplateInputs()
_NO_PARAMETERS = {"type": "object", "properties": {}}
_SOME_TOOLS = (
    {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": _NO_PARAMETERS},
    },
)


def template_text(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, *, tools: bool = True
) -> str:
    """The chat template that transformers renders: ``chat_template``, else the model's; where that
    has several, the one for ``tools`` or the default. "" without any.
    """
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(templates, dict):
        name = chat_template or ("tool_use" if tools and "tool_use" in templates else "default")
        return str(templates.get(name, chat_template or ""))
    return chat_template or str(templates)


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
    source = template_text(tokenizer, inputs.chat_template, tools=bool(tools))
    if not source:
        raise RequestError(
            "messages", "this model has no chat template: use /v1/completions with a prompt instead"
        )
    for field, value in (("tools", tools), ("documents", inputs.documents)):
        if value and field not in source:
            raise RequestError(
                field, f"this model's chat template has no place for {field}; leave them out"
            )
    try:
        forms = _forms(tokenizer, source, tools=bool(tools))
        return _rendered(tokenizer, forms.fit(messages), tools or (), inputs)
    # A template is a program by its author: any error it raises is about what it was given.
    except Exception as error:
        raise RequestError(
            "messages", f"the model's chat template refuses them: {error}"[:500]
        ) from error


@functools.lru_cache(maxsize=16)
def _forms(tokenizer: PreTrainedTokenizerBase, source: str, *, tools: bool) -> TemplateForms:
    """The forms of the template ``source``, which are tried once."""
    inputs = TemplateInputs(chat_template=source, add_generation_prompt=False)
    return forms_of(
        lambda messages: _rendered(tokenizer, messages, _SOME_TOOLS if tools else (), inputs)
    )


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    inputs: TemplateInputs,
) -> str:
    template: Any = tokenizer.apply_chat_template  # transformers' method is untyped
    text = template(
        messages,
        tools=[dict(tool) for tool in tools] or None,
        documents=[dict(document) for document in inputs.documents] or None,
        chat_template=inputs.chat_template,
        add_generation_prompt=inputs.add_generation_prompt,
        continue_final_message=inputs.continue_final_message,
        tokenize=False,
        **inputs.kwargs,
    )
    return str(text)


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
        raise RequestError("prompt", f"is not valid Unicode text: {error}"[:300]) from error
    return ids
