"""From a body's bytes to token ids: parse, validate, render, tokenize.

Owns the order of these steps and the bounds on text that hold before tokenizing. Runs in a pool
thread, never on the event loop; reads the tokenizer and changes nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.api.request_bodies import Asked
from fairlead_runtime.api.strict_json import parse_object
from fairlead_runtime.models.chat import encode, encode_chat, render_chat

CHARS_PER_TOKEN = (
    16  # a text with more characters than this for every token that fits is not tokenized at all
)
TEMPLATE_GROWTH = 4  # a rendered chat may be this many times its messages,
TEMPLATE_ROOM = 64 * 1024  # and this many characters more

Validate = Callable[[Mapping[str, Any], str], Asked]


class Prepared(NamedTuple):
    asked: Asked
    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt


def prepare(
    body: bytes,
    validate: Validate,
    served: str,
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
) -> Prepared:
    """Raises ApiError or RequestError, both of which name the field."""
    asked = validate(parse_object(body), served)
    limit = CHARS_PER_TOKEN * max_model_len
    if asked.messages:
        return Prepared(asked, (_chat_ids(asked, tokenizer, limit, max_model_len),))
    prompts = []
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            _check_chars("prompt", len(prompt), limit, max_model_len)
            prompts.append(tuple(encode(tokenizer, prompt)))
        else:
            prompts.append(prompt)
    return Prepared(asked, tuple(prompts))


def _chat_ids(
    asked: Asked, tokenizer: PreTrainedTokenizerBase, limit: int, max_model_len: int
) -> tuple[int, ...]:
    written = sum(len(message["content"]) for message in asked.messages)
    _check_chars("messages", written, limit, max_model_len)
    text = render_chat(tokenizer, asked.messages)
    if len(text) > TEMPLATE_GROWTH * written + TEMPLATE_ROOM:
        raise ApiError(
            400, "messages: the model's chat template makes them too long", param="messages"
        )
    return tuple(encode_chat(tokenizer, text))


def _check_chars(field: str, chars: int, limit: int, max_model_len: int) -> None:
    if chars > limit:
        raise ApiError(
            400,
            f"{field}: {chars} characters cannot fit into the {max_model_len} tokens of this model; send less",
            param=field,
            code="context_length_exceeded",
        )
