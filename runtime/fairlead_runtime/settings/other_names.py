"""The names that other engines give to our settings, and the hint for a name that is no setting.

Owns the table: error messages follow it, and so do tables in docs/runtime.md and, of vLLM's, in
docs/from-vllm.md. Imports no other room.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fairlead_runtime.settings.vllm_names import FLAGS, SHORT

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
    *(OtherName(name, VLLM, *ours) for name, ours in FLAGS.items()),
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
    settings = list(settings)
    alias = _BY_NAME.get(name)
    if alias and (not alias.setting or alias.setting in settings):
        if not alias.setting:
            return alias.note
        note = f" ({alias.note})" if alias.note else ""
        theirs = f"-{name}" if name in SHORT else spell(name)
        return f"use {spell(alias.setting)}, {alias.whose}'s {theirs}{note}"
    nearest = difflib.get_close_matches(name, settings, n=1)
    return f"did you mean {spell(nearest[0])}?" if nearest else ""
