"""Messages and texts to token ids, by the model's own tokenizer and chat template.

Owns both steps and their errors. Renders only the model's own template, in transformers' sandbox,
never one from a request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.request.sequence import RequestError


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, the one for tools where the tokenizer has several; "" without any."""
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(templates, dict):
        templates = templates.get("tool_use") or templates.get("default") or ""
    return str(templates)


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template reads ``tools``."""
    return "tools" in template_text(tokenizer)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that the template renders from ``messages`` (each with role and content), for
    ``encode_chat``.

    Raises RequestError for a model without a template, for tools that the template does not read
    and for messages that it refuses.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    if not has_chat_template(tokenizer):
        raise RequestError(
            "messages", "this model has no chat template: use /v1/completions with a prompt instead"
        )
    if tools and not takes_tools(tokenizer):
        raise RequestError(
            "tools", "this model's chat template has no place for tools; leave them out"
        )
    template: Any = tokenizer.apply_chat_template
    try:
        text = template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    # A template is a program by the model's author: any error it raises is about the messages.
    except Exception as error:
        raise RequestError(
            "messages", f"the model's chat template refuses them: {error}"[:500]
        ) from error
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
