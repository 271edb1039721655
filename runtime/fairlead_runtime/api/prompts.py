"""From a body's bytes to token ids: parse, validate, render, tokenize.

Owns the order of these steps and the limits on text before tokenizing. Runs in a pool thread, never
on the event loop; changes no state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.api.request_bodies import GenerationRequest
from fairlead_runtime.api.strict_json import parse_object
from fairlead_runtime.models.chat import encode, encode_chat, render_chat

CHARS_PER_TOKEN = 16  # a text longer than this times max_model_len is refused before tokenizing
TEMPLATE_GROWTH = 4  # a rendered chat may have this many times the characters of its messages,
TEMPLATE_ROOM = 64 * 1024  # plus this many

Validate = Callable[[Mapping[str, Any], str], GenerationRequest]


class PreparedRequest(NamedTuple):
    request: GenerationRequest
    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt


def prepare(
    body: bytes,
    validate: Validate,
    served: str,
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
) -> PreparedRequest:
    """Raises ApiError or RequestError; both name the field."""
    request = validate(parse_object(body), served)
    if request.messages:
        return PreparedRequest(request, (chat_ids(request.messages, tokenizer, max_model_len),))
    return PreparedRequest(
        request,
        tuple(
            tuple(text_ids(prompt, tokenizer, max_model_len)) if isinstance(prompt, str) else prompt
            for prompt in request.prompts
        ),
    )


def text_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, max_model_len: int, *, special: bool = True
) -> list[int]:
    """Token ids of a plain prompt; ``special``: with the special tokens that the tokenizer adds.
    Raises ApiError for a text that is too long, before it is tokenized.
    """
    _check_chars("prompt", len(text), max_model_len)
    return encode(tokenizer, text) if special else encode_chat(tokenizer, text)


def chat_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
    *,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Token ids of a chat. Raises ApiError or RequestError."""
    written = sum(len(message["content"]) for message in messages)
    _check_chars("messages", written, max_model_len)
    text = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    if len(text) > TEMPLATE_GROWTH * written + TEMPLATE_ROOM:
        raise ApiError(
            400,
            "messages: too long once the model's chat template is applied; send less",
            param="messages",
        )
    return tuple(encode_chat(tokenizer, text))


def _check_chars(field: str, chars: int, max_model_len: int) -> None:
    if chars > CHARS_PER_TOKEN * max_model_len:
        raise ApiError(
            400,
            f"{field}: {chars} characters cannot fit into the {max_model_len} tokens "
            "of this model; send less",
            param=field,
            code="context_length_exceeded",
        )
