"""The way from a body's bytes to token ids: parse, validate, render, tokenize.

Owns the order of these steps and the limits on text before tokenizing. Runs in a pool thread, never
on the event loop; changes no state.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.answers.prompt_echo import echoed
from fairlead_runtime.api.bodies.messages import characters
from fairlead_runtime.api.bodies.request_bodies import GenerationRequest
from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.api.tools.reasoning import BEGIN, END
from fairlead_runtime.front.errors import ApiError, invalid
from fairlead_runtime.front.limits import is_large, waits_apart
from fairlead_runtime.front.strict_body import by_first_name
from fairlead_runtime.front.strict_json import parse_object
from fairlead_runtime.models.chat import (
    NO_INPUTS,
    TemplateInputs,
    bad_word_ids,
    render_chat,
    template_names,
)
from fairlead_runtime.request.sequence import RequestError, pack_ids
from fairlead_runtime.serving.intake import check_prompt_logprobs
from fairlead_runtime.serving.prompt_encoder import PromptEncoder

# A text with more than so many times max_model_len, or than the longest token's where that has
# more, is refused before it is tokenized.
CHARS_PER_TOKEN = 16
TEMPLATE_GROWTH = 4  # a rendered chat may have this many times the characters of its messages,
PROMPT_END = 64  # characters of a rendered chat that say how the answer begins
TEMPLATE_ROOM = 64 * 1024  # plus this many

Validate = Callable[[Mapping[str, Any], str], GenerationRequest]
Check = Callable[[Mapping[str, Any]], None]


def check_nothing(_body: Mapping[str, Any]) -> None:
    """Raises for no body."""


class PreparedRequest(NamedTuple):
    """``request`` has no prompt and no messages any more: it is held until its answer ends."""

    request: GenerationRequest
    prompts: tuple[Sequence[int], ...]  # token ids of each prompt, as ``pack_ids`` returns them
    prompt_end: str  # of a chat, as text; of a message that goes on, the mark that counts there
    echo: tuple[str, ...] = ()  # the text of each prompt, if the answer shows it
    model: str = ""  # the name that the body was sent with, or the first one


def prepare(
    body: bytes,
    validate: Validate,
    served: str,
    encoder: PromptEncoder,
    max_model_len: int,
    rules: BodyRules,
    check: Check = check_nothing,
) -> PreparedRequest:
    """``check`` has the body as it was sent, ``validate`` with the model's values too, and with its
    first name, ``served``. Raises
    ApiError or RequestError, which name the field as the client sent it, and ServiceError.
    """
    fields, model = by_first_name(parse_object(body), served, rules.aliases)
    check(fields)
    request = validate(_with_defaults(fields, rules.sampling), served)
    check_place(body, request.template)
    try:
        prepared = _prepared(
            _with_bad_word_ids(request, encoder.tokenizer),
            encoder,
            max_model_len,
            rules,
            large=is_large(body),
        )
    except (ApiError, RequestError) as error:
        raise error.renamed(request.sent_names) from None
    return prepared._replace(model=model)


def _with_defaults(body: dict[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the model's sampling values; what it says itself counts first."""
    return body | {name: value for name, value in sampling.items() if body.get(name) is None}


def _prepared(
    request: GenerationRequest,
    encoder: PromptEncoder,
    max_model_len: int,
    rules: BodyRules,
    *,
    large: bool,
) -> PreparedRequest:
    without_prompts = replace(request, prompts=(), messages=())
    if request.messages:
        text = chat_text(
            request.messages,
            encoder.tokenizer,
            max_model_len,
            rules,
            tools=request.tools.for_template,
            inputs=request.template,
        )
        whole = pack_ids(encoder.encode(text, special=False, large=large))
        ids = _kept(whole, request, max_model_len)
        clipped = _clipped(without_prompts, len(ids), max_model_len)
        ends_there = ids is whole or request.truncation.keeps_end
        end = _prompt_end(text, request, encoder, rules) if ends_there else ""
        return PreparedRequest(clipped, (ids,), end)
    shown = list(request.prompts)
    kept: list[Sequence[int]] = []
    for place, prompt in enumerate(request.prompts):
        whole = pack_ids(
            text_ids(prompt, encoder, max_model_len, large=large)
            if isinstance(prompt, str)
            else prompt
        )
        kept.append(_kept(whole, request, max_model_len))
        if kept[-1] is not whole:
            shown[place] = tuple(kept[-1])
    prompts = tuple(kept)
    if request.params.prompt_logprobs is not None:
        check_prompt_logprobs(sum(map(len, prompts)), request.params.prompt_logprobs)
    echo = echoed(shown, encoder.tokenizer) if request.show_prompt else ()
    return PreparedRequest(without_prompts, prompts, "", echo)


def _clipped(
    request: GenerationRequest, prompt_tokens: int, max_model_len: int
) -> GenerationRequest:
    """The request with max_tokens that fit, where it lets them be clipped. Raises ApiError where
    not even one fits.
    """
    wanted = request.params.max_tokens
    if not request.clips_tokens or wanted is None or prompt_tokens + wanted <= max_model_len:
        return request
    if prompt_tokens >= max_model_len:
        # In these words Anthropic's clients know that a conversation must be made shorter.
        raise invalid(
            "messages",
            f"prompt is too long: {prompt_tokens} tokens > {max_model_len - 1} maximum",
            "context_length_exceeded",
        )
    return replace(request, params=replace(request.params, max_tokens=None))


def _kept(ids: Sequence[int], request: GenerationRequest, max_model_len: int) -> Sequence[int]:
    """The ids of a prompt that the request keeps, the same object where it keeps all."""
    return request.truncation.of(ids, max_model_len, request.params.max_tokens or 1)


def _prompt_end(
    text: str, request: GenerationRequest, encoder: PromptEncoder, rules: BodyRules
) -> str:
    """The end of a chat's ``text``. Where the answer goes on with what the last message says, that
    may end anywhere: then the mark of reasoning that counts, the last one of this message.
    """
    *earlier, message = request.messages
    if not request.template.continue_final_message or not message["content"].strip():
        return text[-PROMPT_END:]
    if BEGIN not in text:
        return END
    inputs = request.template._replace(continue_final_message=False)
    try:
        before = _rendered(
            earlier, encoder.tokenizer, rules, request.tools.for_template, inputs, len(text)
        )
    except RequestError:  # no message is before it, or none that the template takes as the last
        before = ""
    # Some templates open the reasoning after a question, whoever goes on.
    before = before.rstrip().removesuffix(BEGIN)
    pairs = enumerate(zip(before, text, strict=False))
    own = text[next((place for place, (a, b) in pairs if a != b), len(before)) :]
    return BEGIN if own.rfind(BEGIN) > own.rfind(END) else END


def _with_bad_word_ids(
    request: GenerationRequest, tokenizer: PreTrainedTokenizerBase
) -> GenerationRequest:
    words = request.params.bad_words
    if not words:
        return request
    params = replace(request.params, bad_words=bad_word_ids(tokenizer, words))
    return replace(request, params=params)


def text_ids(
    text: str, encoder: PromptEncoder, max_model_len: int, *, large: bool, special: bool = True
) -> Sequence[int]:
    """Token ids of a plain prompt; ``special``: with the special tokens that the tokenizer adds.
    Raises ApiError for a text that is too long, before it is tokenized, and ServiceError.
    """
    _check_chars("prompt", len(text), max_model_len, encoder.tokenizer)
    return encoder.encode(text, special=special, large=large)


def chat_text(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
    rules: BodyRules,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    inputs: TemplateInputs = NO_INPUTS,
) -> str:
    """A chat as its template writes it, with its special tokens. Raises ApiError, RequestError."""
    if not rules.templates and inputs.chat_template not in {None, *template_names(tokenizer)}:
        raise invalid(
            "chat_template",
            "is not taken: the server runs only the model's own; send the name of one, leave it "
            "out, or start the server with --trust-request-chat-template",
            "unsupported_parameter",
        )
    sizes = {
        "messages": sum(map(characters, messages)),
        "tools": _json_bytes(tools),
        "documents": _json_bytes(inputs.documents),
        "chat_template_kwargs": _json_bytes(inputs.kwargs),
        "chat_template": len(inputs.chat_template or ""),
    }
    for field, size in sizes.items():
        _check_chars(field, size, max_model_len, tokenizer)
    most = TEMPLATE_GROWTH * sum(sizes.values()) + TEMPLATE_ROOM
    text = _rendered(messages, tokenizer, rules, tools, inputs, most)
    if len(text) > most:
        raise ApiError(
            400,
            "messages: too long once the model's chat template is applied; send less",
            param="messages",
        )
    return text


def _rendered(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    rules: BodyRules,
    tools: Sequence[Mapping[str, Any]],
    inputs: TemplateInputs,
    most: int,
) -> str:
    """By a model's own template here, by one of the request in a process with limits, which also
    bound the text to ``most`` characters. Raises RequestError and ServiceError.
    """
    if inputs.chat_template in {None, *template_names(tokenizer)} or rules.renderer is None:
        return render_chat(tokenizer, messages, tools=tools, inputs=inputs)
    return rules.renderer.render(messages, tools, inputs, most)


def check_place(body: bytes, inputs: TemplateInputs) -> None:
    """Raise ApiError for a template that the body's bytes do not show: it would be rendered where
    others wait for it.
    """
    if inputs.chat_template is not None and not waits_apart(body):
        raise invalid("chat_template", "write the name of this field without escapes")


def _json_bytes(value: Any) -> int:
    return len(orjson.dumps(value)) if value else 0


@functools.lru_cache(maxsize=1)  # a walk over the whole vocabulary
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token, such as a run of blanks or dashes."""
    return max(map(len, tokenizer.get_vocab()), default=0)


def _check_chars(
    field: str, chars: int, max_model_len: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    if chars <= CHARS_PER_TOKEN * max_model_len:
        return
    if chars > _longest_token(tokenizer) * max_model_len:
        raise ApiError(
            400,
            f"{field}: prompt is too long: {chars} characters cannot fit into the "
            f"{max_model_len} tokens of this model; send less",
            param=field,
            code="context_length_exceeded",
        )
