"""The routes that tokenize: ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with vLLM's
bodies and answers, and ``/v1/messages/count_tokens``, with Anthropic's.

The same template and tokenizer as in a generation, so that the counts agree. Tokenizes in the pool,
never on the event loop.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, FailFast, Field
from starlette.requests import Request
from starlette.responses import Response
from transformers import AddedToken, PreTrainedTokenizerBase

from fairlead_runtime.api.anthropic.bodies import counted
from fairlead_runtime.api.bodies.field_names import header_of
from fairlead_runtime.api.bodies.messages import MAX_MESSAGES, Message, for_template
from fairlead_runtime.api.bodies.prompts import chat_text, check_place, prepare, text_ids
from fairlead_runtime.api.bodies.refused_fields import REFUSED, Refused, accept, unread
from fairlead_runtime.api.bodies.template_bodies import TemplateBody, template_inputs
from fairlead_runtime.api.bodies.tool_bodies import MAX_TOOLS, Tool, tools_of
from fairlead_runtime.api.bodies.truncation import Truncation, not_zero
from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.front.auth import tenant_of
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.limits import PromptPool, is_large, read_body
from fairlead_runtime.front.strict_body import (
    MAX_NAME,
    StrictBody,
    Whole,
    by_first_name,
    check_model,
    validated,
    wholes,
)
from fairlead_runtime.front.strict_json import parse_object

Answer = tuple[Mapping[str, Any], bytes]  # and the names of the body that nothing read

# Settings of a tokenizer that name files or folders of this machine.
_FILES = frozenset({"name_or_path", "cache_dir", "is_local", "local_files_only"})
# llama.cpp's names of this route.
_REFUSED = {
    "content": Refused(instead="send prompt"),
    "add_special": Refused((False,), "send add_special_tokens"),
    "parse_special": Refused((True,)),
    "with_pieces": Refused((False,), "send return_token_strs"),
}


class TokenizeBody(TemplateBody):
    """Either ``prompt`` or ``messages``; the other fields are those of a chat. Special tokens are
    added to a prompt unless ``add_special_tokens`` is false.
    """

    model: str | None = Field(default=None, max_length=MAX_NAME)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    return_token_strs: bool | None = None
    truncate_prompt_tokens: Annotated[Whole, AfterValidator(not_zero)] | None = Field(
        default=None, ge=-1
    )
    truncation_side: Literal["left", "right"] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Any = None


class DetokenizeBody(StrictBody):
    model: str | None = Field(default=None, max_length=MAX_NAME)
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast(), BeforeValidator(wholes)
    ]


class TokenizeRoutes:
    def __init__(self, state: ServerState, pool: PromptPool) -> None:
        self._state = state
        self._pool = pool

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, detokenize)

    async def count(self, request: Request) -> Response:
        return await self._answer(request, count_tokens)

    async def info(self) -> Response:
        answer = tokenizer_info(self._state.loaded().encoder.tokenizer)
        return Response(orjson.dumps(answer), media_type="application/json")

    async def _answer(
        self, request: Request, work: Callable[[bytes, str, Backend], Answer]
    ) -> Response:
        with self._state.request() as backend, self._pool.bodies.hold() as take:
            body = await read_body(request.scope, request.receive, take, backend.max_body)
            tenant = tenant_of(request.scope)
            answer, ignored = await self._pool.run(tenant, work, body, self._state.name, backend)
        response = Response(orjson.dumps(answer), media_type="application/json")
        response.raw_headers += header_of(ignored)
        return response


def tokenize(body: bytes, served: str, backend: Backend) -> Answer:
    """Raises ApiError or RequestError, which name the field, and ServiceError."""
    fields, _ = by_first_name(parse_object(body), served, backend.rules.aliases)
    parsed, ignored = accept(TokenizeBody, fields, served, REFUSED | _REFUSED)
    tokenizer, longest = backend.encoder.tokenizer, backend.service.max_model_len
    large = is_large(body)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise invalid("prompt", "send either prompt or messages")
    if parsed.messages is None:
        special = parsed.add_special_tokens is not False
        prompt = parsed.prompt or ""
        ids = list(text_ids(prompt, backend.encoder, longest, special=special, large=large))
    else:
        inputs = template_inputs(parsed)
        check_place(body, inputs)
        text = chat_text(
            for_template(parsed.messages),
            tokenizer,
            longest,
            backend.rules,
            tools=tools_of(parsed.tools, parsed.tool_choice, parallel=None).for_template,
            inputs=inputs,
        )
        ids = list(backend.encoder.encode(text, special=False, large=large))
    side = parsed.truncation_side != "right"
    ids = list(Truncation(parsed.truncate_prompt_tokens, side).of(ids, longest))
    pieces = tokenizer.convert_ids_to_tokens(ids) if parsed.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": pieces}
    return answer, ignored


def count_tokens(body: bytes, served: str, backend: Backend) -> Answer:
    """Raises as ``tokenize`` does."""
    longest = backend.service.max_model_len
    prepared = prepare(body, counted, served, backend.encoder, longest, backend.rules)
    return {"input_tokens": len(prepared.prompts[0])}, prepared.request.ignored


def detokenize(body: bytes, served: str, backend: Backend) -> Answer:
    """Raises ApiError, also for an id that the tokenizer does not have."""
    fields = parse_object(body)
    check_model(fields.get("model"), served, *backend.rules.aliases)
    ignored = unread(DetokenizeBody, fields, {})
    ids = validated(DetokenizeBody, fields).tokens
    for place, token in enumerate(ids):
        if not _known(backend.encoder.tokenizer, token):
            raise invalid(f"tokens.{place}", "the tokenizer has no token of this id")
    return {"prompt": backend.vocabulary.decode(ids)}, ignored


def tokenizer_info(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """What the tokenizer was made from, in the shape of vLLM's, without the names of its files."""
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name not in _FILES and not name.endswith("_file")
    }
    info = {**_plain(settings), "tokenizer_class": type(tokenizer).__name__}
    template = tokenizer.chat_template
    return info if template is None else {**info, "chat_template": template}


def _plain(value: Any) -> Any:
    """A setting in JSON's types: a token as its text, and what has no such type as Python prints
    it.
    """
    match value:
        case AddedToken():
            return value.content
        case dict():
            return {str(key): _plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain(entry) for entry in value]
        case int() if abs(value) >= 1 << 63:  # "no limit", in some models' files
            return float(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def _known(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    try:
        return tokenizer.convert_ids_to_tokens(token) is not None
    except IndexError:  # of tokenizers that have no Rust backend
        return False
