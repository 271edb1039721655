"""Fields of other servers that would change the answer and have no counterpart here.

Owns their names, the values that change nothing, and the refusal. A name that nothing reads stays
without effect, as in OpenAI's API; ``unread`` finds it, for the answer's header.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fairlead_runtime.api.bodies.field_names import listed, refuse_slips, unread_names
from fairlead_runtime.api.bodies.harmless_fields import HARMLESS
from fairlead_runtime.api.bodies.messages import Message
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import BodyT, StrictBody, check_model, validated


class Refused(NamedTuple):
    """``neutral``: the values beside null that change nothing. ``instead``: what does the same."""

    neutral: tuple[Any, ...] = ()
    instead: str = "leave it out"


_OFF, _ON, _NO_LIST, _ZERO = Refused((False,)), Refused((True,)), Refused(([],)), Refused((0,))
_ID = Refused(instead="send request_id")
_BUDGET = Refused((-1,), "send thinking_token_budget")
_LENGTH = Refused((-1,), "send max_tokens")

# By the server whose field it is; of a name that several have, the first.
REFUSED: dict[str, Refused] = {
    # OpenAI
    "suffix": Refused(("",)),
    "echo": _OFF,
    "tools": _NO_LIST,
    "tool_choice": Refused(("none", "auto")),
    "functions": Refused(([],), "send tools"),
    "function_call": Refused(("none", "auto"), "send tool_choice"),
    "modalities": Refused((["text"],)),
    "audio": Refused(),
    "prediction": Refused(),
    "web_search_options": Refused(),
    "prompt": Refused(instead="send messages, or this body to /v1/completions"),
    "messages": Refused(instead="send a prompt, or this body to /v1/chat/completions"),
    "top_logprobs": Refused((0,), "send logprobs"),
    "instructions": Refused(("",), "send a system message"),
    "max_output_tokens": Refused(instead="send max_tokens"),
    "moderation": Refused(),
    # vLLM
    "use_beam_search": _OFF,
    "length_penalty": Refused((1,)),
    "logits_processors": _NO_LIST,
    "add_special_tokens": _ON,
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "chat_template": Refused(),
    "chat_template_kwargs": Refused(({},)),
    "documents": _NO_LIST,
    "prompt_embeds": Refused(),
    "repetition_detection": Refused(),
    "logprob_token_ids": _NO_LIST,
    "return_prompt_text": _OFF,
    "enable_response_messages": _OFF,
    "watermarking": _OFF,
    "guided_json_object": Refused((False,), "send response_format"),
    "guided_whitespace_pattern": Refused(),
    # SGLang
    "stop_regex": _NO_LIST,
    "no_stop_trim": Refused((False,), "send include_stop_str_in_output"),
    "custom_logit_processor": Refused(),
    "input_ids": Refused(instead="send a prompt of token ids to /v1/completions"),
    "lora_path": Refused(),
    "session_params": Refused(({},)),
    "rid": _ID,
    "extra_key": Refused(instead="send cache_salt"),
    "separate_reasoning": _ON,
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "return_prompt_token_ids": Refused((False,), "send return_token_ids"),
    "return_meta_info": _OFF,
    "return_cached_tokens_details": _OFF,
    "reasoning": Refused(({},), "send reasoning_effort or chat_template_kwargs"),
    "task": Refused(),
    # llama.cpp
    "n_predict": _LENGTH,
    "n_probs": Refused((0,), "send logprobs"),
    "repeat_penalty": Refused((1,), "send repetition_penalty"),
    "typical_p": Refused((1,)),
    "min_keep": _ZERO,
    "mirostat": _ZERO,
    "dynatemp_range": _ZERO,
    "xtc_probability": _ZERO,
    "dry_multiplier": _ZERO,
    "top_n_sigma": Refused((-1, 0)),
    "samplers": Refused(),
    "t_max_predict_ms": Refused((0, -1), "send timeout"),
    "n_indent": _ZERO,
    "post_sampling_probs": _OFF,
    "return_tokens": Refused((False,), "send return_token_ids"),
    "image_data": _NO_LIST,
    "lora": _NO_LIST,
    "parse_tool_calls": _ON,
    "reasoning_format": Refused(("auto", "deepseek")),
    "thinking_budget_tokens": _BUDGET,
    "reasoning_budget_tokens": _BUDGET,
    "reasoning_budget_message": Refused(("",)),
    "generation_prompt": Refused(("",)),
    "adaptive_target": Refused((-1,)),
    "n_cmpl": Refused((1,), "send n"),
    "grammar_lazy": _OFF,
    "grammar_triggers": _NO_LIST,
    "response_fields": _NO_LIST,
    # TGI
    "max_new_tokens": _LENGTH,
    "min_new_tokens": Refused((0,), "send min_tokens"),
    "do_sample": Refused((True,), "send temperature 0"),
    "adapter_id": Refused(),
    "guideline": Refused(),
    "tool_prompt": Refused(),
    "truncate": Refused(),
    "watermark": _OFF,
    "return_full_text": Refused((False,), "send echo to /v1/completions"),
}
# Of a message, where they would change the prompt.
REFUSED_OF_MESSAGES: dict[str, Refused] = {
    "refusal": Refused(("",), "send it as content"),
    "audio": Refused(),
    "tools": Refused(([],), "send them beside messages"),
    "prefix": Refused((False,), "send continue_final_message"),
}

# vLLM takes these in place of the request's own messages; the rest of the object is harmless.
_REFUSED_OF_TRANSFER = {
    "prompt_token_ids": Refused(([],), "send them as the prompt of /v1/completions"),
}


def refuse_fields(
    body: Mapping[str, Any],
    known: Collection[str],
    refused: Mapping[str, Refused] = REFUSED,
    path: str = "",
) -> None:
    """Raise ApiError 400 for a field of ``refused`` that is not among the ``known`` ones and says
    something. ``path``: of the object within the body, with a dot at its end.
    """
    for name, (neutral, instead) in refused.items():
        value = body.get(name)
        if value is not None and value not in neutral and name not in known:
            raise invalid(path + name, f"is not supported; {instead}", "unsupported_parameter")


def unsupported(kind: type[StrictBody]) -> dict[str, Refused]:
    """Of REFUSED what ``kind`` does not have."""
    return {name: field for name, field in REFUSED.items() if name not in kind.model_fields}


def unread(
    kind: type[StrictBody],
    body: Mapping[str, Any],
    refused: Mapping[str, Refused] = REFUSED,
    known: Mapping[type, Collection[str]] = MappingProxyType({}),
    more_names: Collection[str] = (),
) -> bytes:
    """The names that nothing reads, those of harmless fields among them, as a header's value.
    ``known``: by type what else has a meaning there; ``more_names``: what else is in the header.
    Raises ApiError 400 for a slip of a known one.
    """
    own = {*refused, *known.get(kind, ())}
    names = unread_names(kind, body, {Message: REFUSED_OF_MESSAGES, **known, kind: own})
    fields = kind.model_fields
    instead = {name: each.instead for name, each in refused.items() if name not in fields}
    refuse_slips(names, HARMLESS, instead)
    return listed(dict.fromkeys([*more_names, *(each.shown for each in names)]))


def accept(
    kind: type[BodyT],
    body: Mapping[str, Any],
    served: str,
    refused: Mapping[str, Refused] = REFUSED,
) -> tuple[BodyT, bytes]:
    """The body, whose messages may still be of any type while their fields are looked at, and what
    ``unread`` returns. Raises ApiError 400, or 404 for a model other than ``served``.
    """
    check_model(body.get("model"), served)
    refuse_fields(body, kind.model_fields, refused)
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict):
        refuse_fields(transfer, (), _REFUSED_OF_TRANSFER, "kv_transfer_params.")
    messages = body.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            path = f"messages.{place}."
            refuse_fields(message, Message.model_fields, REFUSED_OF_MESSAGES, path)
    ignored = unread(kind, body, refused)
    return validated(kind, body), ignored
