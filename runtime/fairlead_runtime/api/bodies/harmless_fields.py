"""Fields of other servers that are ignored because no answer would differ with them.

Owns their names and why; ``refused_fields`` those that would change the answer.
"""

_ROUTING = "places a request among several servers"
_MEDIA = "is about images, sound or video, which no request has here"
_CACHE = "is about a cache of the other server: prompts share blocks here without it"
_STATISTICS = "asks for figures of the other server's run beside the answer"
_EVENTS = "is about the pace of events, not what they say"
_ACCOUNT = "is about the client's account or its records"


def _with(name: str) -> str:
    return f"changes nothing without `{name}`, which is refused"


_TEMPLATE = "is what the other server derives from its chat template"

# By name: why it is harmless, as the end of a sentence.
HARMLESS: dict[str, str] = {
    # OpenAI
    "metadata": _ACCOUNT,
    "store": _ACCOUNT,
    "service_tier": _ACCOUNT,
    "safety_identifier": _ACCOUNT,
    "access_programs": _ACCOUNT,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "verbosity": "is a wish that only OpenAI's models were trained on",
    # vLLM
    "spaces_between_special_tokens": "changes no text of a fast tokenizer, there neither",
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "return_mm_kwargs": _MEDIA,
    "session_id": _ROUTING,
    "kv_transfer_params": f"{_ROUTING}; its `prompt_token_ids` is refused",
    "ec_transfer_params": _ROUTING,
    "vllm_xargs": "is for extensions of the other server",
    "routed_experts_prompt_start": _with("return_routed_experts"),
    "return_token_offsets": "is read there by routes that generate nothing",
    "stream_interval": _EVENTS,
    # SGLang
    "routed_experts_start_len": _with("return_routed_experts"),
    "stream_reasoning": _EVENTS,
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "use_audio_in_video": _MEDIA,
    "images_config": _MEDIA,
    "custom_params": _with("custom_logit_processor"),
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
    "ngram_corpus_id": "is about the speed of the other server",
    "custom_labels": _STATISTICS,
    # llama.cpp
    "timings_per_token": _STATISTICS,
    "return_progress": _STATISTICS,
    "sse_ping_interval": _EVENTS,
    "cache_prompt": _CACHE,
    "n_cache_reuse": _CACHE,
    "n_keep": "is about contexts that are shifted, which none is here",
    "n_discard": "is about contexts that are shifted, which none is here",
    "id_slot": _ROUTING,
    "backend_sampling": "is about the speed of the other server",
    "xtc_threshold": _with("xtc_probability"),
    "dynatemp_exponent": _with("dynatemp_range"),
    "repeat_last_n": _with("repeat_penalty"),
    "dry_base": _with("dry_multiplier"),
    "dry_allowed_length": _with("dry_multiplier"),
    "dry_penalty_last_n": _with("dry_multiplier"),
    "dry_sequence_breakers": _with("dry_multiplier"),
    "mirostat_tau": _with("mirostat"),
    "mirostat_eta": _with("mirostat"),
    "adaptive_decay": _with("adaptive_target"),
    "grammar_type": _TEMPLATE,
    "preserved_tokens": _TEMPLATE,
    "chat_format": _TEMPLATE,
    "chat_parser": _TEMPLATE,
    "reasoning_control": _with("reasoning_budget_tokens"),
    "reasoning_budget_start_tag": _with("reasoning_budget_tokens"),
    "reasoning_budget_end_tag": _with("reasoning_budget_tokens"),
    "reasoning_budget_end_tags": _with("reasoning_budget_tokens"),
}
