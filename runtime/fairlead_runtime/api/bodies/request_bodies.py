"""The bodies of OpenAI's two generating routes, and their meaning for the engine.

Owns the fields and their types; ``refused_fields`` those of other servers.
SamplingParams owns the ranges of sampling values, so that HTTP and Python refuse the same ones.
Tokenizes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, FailFast, Field, WithJsonSchema, field_validator

from fairlead_runtime.api.bodies.messages import MAX_MESSAGES, Message, for_template
from fairlead_runtime.api.bodies.refused_fields import accept
from fairlead_runtime.api.bodies.structured_bodies import StructuredBody, structured_outputs
from fairlead_runtime.api.bodies.template_bodies import TemplateBody, template_inputs
from fairlead_runtime.api.bodies.tool_bodies import MAX_TOOLS, NO_TOOLS, Tool, Tools, tools_of
from fairlead_runtime.api.bodies.truncation import WHOLE, Truncation, not_zero
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.key_limits import PRIORITIES
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody, Whole, Wholes, wholes
from fairlead_runtime.models.chat import NO_INPUTS, TemplateInputs
from fairlead_runtime.request.sequence import MAX_LOGPROBS, RequestError, SamplingParams
from fairlead_runtime.request.structured import PARAM

MAX_PROMPTS = 1024
MAX_BODY_CHOICES = 4096  # of all prompts of a body together
MAX_TIMEOUT = 24 * 3600  # seconds
MAX_ID_DIGITS = 10
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat's is "what fits"

Prompt = str | tuple[int, ...]

# For the OpenAPI document; the validators check the values.
_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_STOP = {"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {**_TEXTS, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(StructuredBody):
    """The fields of both routes. None means the default: clients send null for unset fields."""

    model: str | None = Field(default=None, max_length=MAX_NAME)  # None: the one that is served
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    n: Whole | None = None
    seed: Whole | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Wholes | None = Field(default=None, max_length=64)
    stop: Annotated[Any, WithJsonSchema(_STOP)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[Whole, AfterValidator(not_zero)] | None = Field(
        default=None, ge=-1
    )
    thinking_token_budget: Whole | None = Field(default=None, ge=-1, lt=2**31)
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Wholes | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=MAX_NAME)
    cache_salt: str | None = Field(default=None, max_length=MAX_NAME)
    priority: Whole | None = Field(default=None, ge=PRIORITIES[0], le=PRIORITIES[-1])
    best_of: Whole | None = None
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT)

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: Any) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise ValueError("must be text or a list of texts")
        return tuple(stops)

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        keys = value or {}
        if not all(key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS for key in keys):
            raise ValueError("its keys must be token ids, as text")
        return value


class CompletionBody(_Body):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    logprobs: Whole | None = None
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> tuple[Prompt, ...]:
        return _prompts(value)


class ChatBody(TemplateBody, _Body):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None


BodyT = TypeVar("BodyT", bound=_Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A valid body in the engine's terms. It has either ``prompts`` (completions) or ``messages``
    (chat).
    """

    params: SamplingParams
    stream: bool
    include_usage: bool
    running_usage: bool  # shown before the end
    timeout: float | None  # seconds from the request's arrival to the end of the answer
    user: str
    cache_salt: str | None
    priority: int | None
    sent_names: Mapping[str, str]  # of fields that the client sent under another name
    prompt_logprobs: int | None  # to show; echo needs them too
    clips_tokens: bool = False  # max_tokens beyond what fits are what fits
    show_token_ids: bool = False
    tokens_by_id: bool = False  # in log-probabilities
    request_id: str = ""  # of the answer; empty: that of the request
    truncation: Truncation = WHOLE
    thinking_budget: int | None = None  # tokens; None: no bound
    begun: str = ""  # of a chat, text that the answer shows before its own
    show_prompt: bool = False  # before the text of each choice
    prompt_only: bool = False  # generate nothing: echo with max_tokens 0
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template: TemplateInputs = NO_INPUTS
    tools: Tools = NO_TOOLS
    show_reasoning: bool = True
    echo: Mapping[str, Any] = field(default_factory=dict)  # what the answer repeats of the body
    ignored: bytes = b""  # names of the body that nothing read, as the header's value


def completion(body: Mapping[str, Any], served: str) -> GenerationRequest:
    """A completions body. Raises ApiError 400, or 404 for a model other than ``served``, and
    RequestError for sampling values out of range.
    """
    parsed, ignored = _validate(CompletionBody, body, served)
    show_prompt = bool(parsed.echo)
    # The engine generates one token, which the answer leaves out.
    prompt_only = _max_tokens(parsed) == 0
    params = _params(
        parsed,
        max_tokens=1 if prompt_only else _max_tokens(parsed, COMPLETION_TOKENS),
        logprobs=parsed.logprobs,
    )
    if len(parsed.prompt) * params.n > MAX_BODY_CHOICES:
        raise invalid(
            "n",
            f"{len(parsed.prompt)} prompts * {params.n} are more than {MAX_BODY_CHOICES} choices "
            "of one body: send fewer of either",
        )
    if show_prompt and parsed.logprobs is not None:
        params = replace(params, prompt_logprobs=max(parsed.logprobs, parsed.prompt_logprobs or 0))
    return GenerationRequest(
        ignored=ignored,
        prompts=parsed.prompt,
        show_prompt=show_prompt,
        prompt_only=prompt_only,
        **_common(parsed, params),
    )


def chat(body: Mapping[str, Any], served: str) -> GenerationRequest:
    """A chat body. Raises as ``completion`` does."""
    parsed, ignored = _validate(ChatBody, body, served)
    if parsed.top_logprobs and not parsed.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if parsed.top_logprobs is not None and not 0 <= parsed.top_logprobs <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    params = _params(
        parsed,
        max_tokens=_max_tokens(parsed),
        logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
    )
    tools = tools_of(parsed.tools, parsed.tool_choice, parallel=parsed.parallel_tool_calls)
    common = _common(parsed, params)
    if tools.schema is not None:
        common |= _forcing(tools.schema, params, common["sent_names"])
    return GenerationRequest(
        ignored=ignored,
        messages=for_template(parsed.messages),
        template=template_inputs(parsed),
        tools=tools,
        show_reasoning=parsed.include_reasoning is not False,
        begun=_last_of_assistant(parsed.messages) if parsed.echo else "",
        **common,
    )


def _last_of_assistant(messages: list[Message]) -> str:
    return (messages[-1].content or "") if messages[-1].role == "assistant" else ""


def _forcing(
    schema: dict[str, Any], params: SamplingParams, names: Mapping[str, str]
) -> dict[str, Any]:
    """A call that must be made leaves no room for another form of the answer."""
    sent_names = {**names, "structured_outputs": "tools", "structured_outputs.json": "tools"}
    try:
        params = replace(params, structured_outputs={"json": schema, "compact": True})
    except RequestError as error:
        raise error.renamed(sent_names) from None
    return {"params": params, "sent_names": sent_names}


def _validate(kind: type[BodyT], body: Mapping[str, Any], served: str) -> tuple[BodyT, bytes]:
    """The body, and the names in it that nothing reads, as a header's value."""
    parsed, ignored = accept(kind, body, served)
    _check_together(parsed)
    return parsed, ignored


def _check_together(parsed: _Body) -> None:
    if parsed.stream_options is not None and not parsed.stream:
        raise invalid("stream_options", "is allowed only with stream: true")
    if parsed.best_of is not None and parsed.best_of != (parsed.n or 1):
        raise invalid("best_of", "is not supported beyond n; leave it out", "unsupported_parameter")
    if parsed.stream and parsed.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not available with stream: true")
    old, new = parsed.max_tokens, parsed.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "contradicts max_completion_tokens; send one of them")


def _max_tokens(parsed: _Body, default: int | None = None) -> int | None:
    limit = parsed.max_completion_tokens if parsed.max_tokens is None else parsed.max_tokens
    return default if limit is None else limit


def _params(parsed: _Body, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    allowed = parsed.allowed_token_ids
    try:
        return SamplingParams(
            temperature=1.0 if parsed.temperature is None else parsed.temperature,
            top_k=_top_k(parsed.top_k),
            top_p=1.0 if parsed.top_p is None else parsed.top_p,
            min_p=parsed.min_p or 0.0,
            seed=parsed.seed,
            n=1 if parsed.n is None else parsed.n,
            max_tokens=max_tokens,
            min_tokens=parsed.min_tokens or 0,
            stop_token_ids=tuple(parsed.stop_token_ids or ()),
            ignore_eos=bool(parsed.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=parsed.prompt_logprobs,
            presence_penalty=parsed.presence_penalty or 0.0,
            frequency_penalty=parsed.frequency_penalty or 0.0,
            repetition_penalty=(
                1.0 if parsed.repetition_penalty is None else parsed.repetition_penalty
            ),
            logit_bias={int(key): bias for key, bias in (parsed.logit_bias or {}).items()},
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=tuple(parsed.bad_words or ()),
            stop=parsed.stop or (),
            include_stop_str_in_output=bool(parsed.include_stop_str_in_output),
            skip_special_tokens=parsed.skip_special_tokens is not False,
            structured_outputs=structured_outputs(parsed)[0],
        )
    except RequestError as error:
        raise error.renamed(_sent_names(parsed)) from None


def _sent_names(parsed: _Body) -> dict[str, str]:
    newer = parsed.max_tokens is None and parsed.max_completion_tokens is not None
    names = {"max_tokens": "max_completion_tokens"} if newer else {}
    if isinstance(parsed, CompletionBody) and parsed.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"  # of an echo
    if parsed.thinking_token_budget is not None:
        names[PARAM] = "thinking_token_budget"
    names |= structured_outputs(parsed)[1]
    return names | ({"prompt": "messages"} if isinstance(parsed, ChatBody) else {})


def _top_k(value: int | None) -> int:
    """0 switches the filter off; vLLM's clients send -1."""
    return 0 if value is None or value == -1 else value


def _common(parsed: _Body, params: SamplingParams) -> dict[str, Any]:
    options = parsed.stream_options
    usage = options is not None and bool(options.include_usage)
    budget = parsed.thinking_token_budget
    return {
        "params": params,
        "tokens_by_id": bool(parsed.return_tokens_as_token_ids),
        "request_id": parsed.request_id or "",
        "thinking_budget": None if budget == -1 else budget,
        "truncation": Truncation(parsed.truncate_prompt_tokens, parsed.truncation_side != "right"),
        "prompt_logprobs": parsed.prompt_logprobs,
        "show_token_ids": bool(parsed.return_token_ids),
        "stream": bool(parsed.stream),
        "include_usage": usage,
        "running_usage": usage and options is not None and bool(options.continuous_usage_stats),
        "timeout": parsed.timeout,
        "user": parsed.user or "",
        "cache_salt": parsed.cache_salt,
        "priority": parsed.priority,
        "sent_names": _sent_names(parsed),
    }


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A tuple of prompts from text, a list of texts, token ids or a list of lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be text, a list of texts, token ids or a list of token ids, and not empty"
        )
    value = wholes(value)
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts may be given")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    value = [wholes(item) for item in value]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError(
        "must be text, a list of texts, token ids or a list of token ids, not a mixture"
    )
