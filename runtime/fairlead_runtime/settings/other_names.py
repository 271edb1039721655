"""The names that other engines give to our settings, and the hint for a name that is no setting.

Owns the table: error messages follow it, and so does a table in docs/runtime.md. Imports nothing of
ours.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

TRANSFORMERS, VLLM, SGLANG = "transformers", "vLLM", "SGLang"


class OtherName(NamedTuple):
    """``setting``: the field of EngineConfig, "" where there is none; ``note``: how values differ,
    or why there is none.
    """

    name: str
    whose: str
    setting: str
    note: str = ""


OTHER_NAMES = (
    OtherName("max_requests_per_batch", TRANSFORMERS, "max_requests"),
    OtherName("max_queue_size", TRANSFORMERS, "max_queue"),
    OtherName("page_size", TRANSFORMERS, "block_size"),
    OtherName("use_async_batching", TRANSFORMERS, "async_batching", "on, off or auto"),
    OtherName("use_cuda_graph", TRANSFORMERS, "cuda_graphs", "on, off or auto"),
    OtherName("q_padding_interval_size", TRANSFORMERS, "q_padding_interval", "rows of a step"),
    OtherName(
        "kv_padding_interval_size",
        TRANSFORMERS,
        "",
        "a captured step serves keys of every length, so these are not padded: leave it out",
    ),
    OtherName("max_num_seqs", VLLM, "max_requests"),
    OtherName("max_num_batched_tokens", VLLM, "max_batch_tokens"),
    OtherName("max_num_scheduled_tokens", VLLM, "max_batch_tokens"),
    OtherName("token_budget", VLLM, "max_batch_tokens"),
    OtherName("gpu_memory_utilization", VLLM, "max_memory_percent"),
    OtherName("num_gpu_blocks_override", VLLM, "num_blocks"),
    OtherName("kv_cache_dtype", VLLM, "cache_dtype"),
    OtherName("swap_space", VLLM, "cpu_offload_space", "GiB; 0 unless set, there 4"),
    OtherName("watermark", VLLM, "safety_margin", "a share; 0.2 unless set, there 0.01"),
    OtherName("watermark_blocks", VLLM, "safety_margin", "a share of all blocks"),
    OtherName("scheduling_policy", VLLM, "scheduler_type", "fifo is its fcfs"),
    OtherName("enable_prefix_caching", VLLM, "allow_block_sharing"),
    OtherName("enforce_eager", VLLM, "cuda_graphs", "off is its true"),
    OtherName("async_scheduling", VLLM, "async_batching", "on, off or auto"),
    OtherName("tensor_parallel_size", VLLM, "tensor_parallel"),
    OtherName("served_model_name", VLLM, "served_name"),
    OtherName("api_key", VLLM, "api_key_file", "a file of keys"),
    OtherName("allowed_origins", VLLM, "cors_origin", "one origin, or *"),
    OtherName(
        "enable_chunked_prefill", VLLM, "", "every prompt may take several steps: leave it out"
    ),
    OtherName("pipeline_parallel_size", VLLM, "", "a model is split by tensor_parallel alone"),
    OtherName("max_running_requests", SGLANG, "max_requests"),
    OtherName("max_prefill_tokens", SGLANG, "max_batch_tokens"),
    OtherName("chunked_prefill_size", SGLANG, "max_batch_tokens"),
    OtherName("mem_fraction_static", SGLANG, "max_memory_percent"),
)
_BY_NAME = {alias.name: alias for alias in OTHER_NAMES}


def hint_for(name: str, settings: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """What to write in place of ``name``, which is none of ``settings``; "" if nothing is like it.
    ``spell`` writes a setting as the reader does, such as a flag.
    """
    if alias := _BY_NAME.get(name):
        if not alias.setting:
            return alias.note
        note = f" ({alias.note})" if alias.note else ""
        return f"use {spell(alias.setting)}, {alias.whose}'s {spell(name)}{note}"
    nearest = difflib.get_close_matches(name, list(settings), n=1)
    return f"did you mean {spell(nearest[0])}?" if nearest else ""
