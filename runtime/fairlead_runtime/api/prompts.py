"""From a body's bytes to token ids: parse, validate, render, tokenize.

Owns the order of these steps and the limits on text before tokenizing. Runs in a pool thread, never
on the event loop; changes no state.
"""

from collections.abc import Callable, Mapping
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
    limit = CHARS_PER_TOKEN * max_model_len
    if request.messages:
        return PreparedRequest(request, (_chat_ids(request, tokenizer, limit, max_model_len),))
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            _check_chars("prompt", len(prompt), limit, max_model_len)
            prompts.append(tuple(encode(tokenizer, prompt)))
        else:
            prompts.append(prompt)
    return PreparedRequest(request, tuple(prompts))


def _chat_ids(
    request: GenerationRequest, tokenizer: PreTrainedTokenizerBase, limit: int, max_model_len: int
) -> tuple[int, ...]:
    written = sum(len(message["content"]) for message in request.messages)
    _check_chars("messages", written, limit, max_model_len)
    text = render_chat(tokenizer, request.messages)
    if len(text) > TEMPLATE_GROWTH * written + TEMPLATE_ROOM:
        raise ApiError(
            400,
            "messages: too long once the model's chat template is applied; send less",
            param="messages",
        )
    return tuple(encode_chat(tokenizer, text))


def _check_chars(field: str, chars: int, limit: int, max_model_len: int) -> None:
    if chars > limit:
        raise ApiError(
            400,
            f"{field}: {chars} characters cannot fit into the {max_model_len} tokens "
            "of this model; send less",
            param=field,
            code="context_length_exceeded",
        )
