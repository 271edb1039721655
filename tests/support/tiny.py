"""Tiny random models of every supported family, for tests and for comparing engines on equal
weights.

Owns their sizes and their weights. They are scaled so that greedy output varies and depends on the
whole context: the errors an engine can make (a lost block, a wrong position, a wrong window) change
the text.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from support.byte_tokenizer import SPECIAL, byte_level

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "gemma3n_text",
)
# Buildable too: families of the table that are not in the full matrix of token equality, and
# families that are not in the table.
SIZED = (
    *("gemma", "granite", "olmo2", "cohere", "cohere2", "starcoder2"),
    *("mimo_v2_flash", "gemma4_text", "gemma4_unified_text"),
)
UNLISTED = (
    "apertus",
    "arcee",
    "ernie4_5",
    "exaone4",
    "glm",
    "glm4",
    "gpt_bigcode",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "ministral",
    "ministral3",
    "nemotron",
    "olmo",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phimoe",
    "qwen2_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
)
# Buildable too, but their RoPE depends on the longest sequence of a batch unless it is pinned.
VARIANTS = ("phi3_longrope", "llama_dynamic")

CONTEXT = 1024
HIDDEN = 64
WINDOW = 12  # not a multiple of any block size, so windows end inside blocks
_MERGES = (
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of"),
    *("ed", "is", "it", "al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le"),
)
VOCAB = len(SPECIAL) + 256 + len(_MERGES)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL, _SLIDING]}
_SETTINGS: dict[str, dict[str, Any]] = {
    **{family: {} for family in (*SIZED, *UNLISTED)},
    **{
        family: {"head_dim": 16}
        for family in ("gemma", "ernie4_5", "glm", "glm4", "helium", "seed_oss")
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), _WINDOWS),
    "ministral": {**_WINDOWS, "head_dim": 16},
    # Queries grow with their positions, from the seventeenth on.
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "granitemoe": _MOE,
    "olmoe": {**_MOE, "num_experts": 4},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": HIDDEN},
    "phimoe": _MOE,
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"shared_expert_intermediate_size": 64},
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {
        **_GEMMA,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": {**_GEMMA, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
    # Of both kinds of layers that keep keys the last is not the first, and readers of both.
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 3,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING],
        "sliding_window": WINDOW,
        "intermediate_size": [128, 96, 128, 96, 64, 128, 96],
        "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.8, 0.0],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB - 8,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "tie_word_embeddings": True,
    },
    "phi3": {"original_max_position_embeddings": CONTEXT},
    "phi3_longrope": {"original_max_position_embeddings": 64, "rope_parameters": _LONGROPE},
    "llama_dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "gpt2": {"n_inner": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    # Readers of both kinds; full layers have one wide key-value head, the others two.
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": [_SLIDING, _FULL] * 4,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 20.0,
    },
    # Wider full layers, of which each keeps its own keys.
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 5,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "sliding_window": WINDOW,
    },
    # Units hold two windowed layers, or three full ones and an empty place.
    "mimo_v2_flash": {
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "qwen3_moe": {**_MOE, "head_dim": 16, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {**_MOE, "head_dim": 16},
    "gpt_oss": {
        **_MOE,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_UNGROUPED = {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "persimmon"}
_MODEL_TYPES = {"phi3_longrope": "phi3", "llama_dynamic": "llama"}


def build(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of ``family`` (of FAMILIES, SIZED, UNLISTED or VARIANTS) in float32 on the
    CPU, in eval mode, eager attention.

    ``overrides`` are settings of the family's transformers configuration. Equal arguments give
    equal weights. Raises ValueError for an unknown family.
    """
    if family not in _SETTINGS:
        raise ValueError(f"{family}: unknown family, use one of {', '.join(_SETTINGS)}")
    settings = {**settings_of(family), **overrides}
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **settings)
    factory: Any = AutoModelForCausalLM  # transformers' classes are untyped
    model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in stored(model):
            _fill(name, tensor, seed)
        if config.model_type.startswith("gemma"):
            # Gemma multiplies embeddings by sqrt(hidden). Without this division the last token
            # alone would decide the output.
            model.get_input_embeddings().weight.div_(math.sqrt(config.hidden_size))
    if model.generation_config is not None:
        model.generation_config.pad_token_id = config.pad_token_id
    model.eval()
    return cast("PreTrainedModel", model)


def settings_of(family: str) -> dict[str, Any]:
    """What the configuration of its model is made of."""
    grouped = {} if family in _UNGROUPED else {"num_key_value_heads": 2}
    return {**_COMMON, **grouped, **_SETTINGS[family]}


def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of all tiny models, with VOCAB ids."""
    return byte_level([(pair[0], pair[1]) for pair in _MERGES], max_length=CONTEXT)


def save(model: PreTrainedModel, directory: Path | str) -> Path:
    """Write ``model`` and the tokenizer as a checkpoint (safetensors and JSON)."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def stored(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What training makes of a model: its parameters, and buffers that its files have."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            yield name, buffer


def _fill(name: str, parameter: torch.Tensor, seed: int) -> None:
    """Set one parameter from (seed, name) alone, so that an added layer leaves the others as they
    are.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 1:
        # Norm weights stay near the family's initial value (1, or 0 for Gemma), biases and sinks
        # near 0.
        scale = 1.0 if name.endswith("sinks") else 0.1
        if name.endswith(("bias", "sinks")):
            parameter.zero_()  # gpt_oss begins with random ones
        parameter.add_(scale * noise)
    else:
        parameter.copy_(noise * (_gain(name) / math.sqrt(HIDDEN)))


def _gain(name: str) -> float:
    """The standard deviation of a parameter's output for a unit input of HIDDEN features.

    Chosen by measurement: logits with a standard deviation near 2.5, attention neither flat nor on
    one token, and little of the embedding left in the last hidden state.
    """
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf in {"lm_head", "embed_out"}:
        return 2.5
    if leaf in {"embed_tokens", "wte", "embed_in"}:
        return 0.5 * math.sqrt(HIDDEN)
    if leaf == "wpe":
        return 0.3 * math.sqrt(HIDDEN)
    return 1.5 if any(part in name for part in ("attn", "attention", "router")) else 1.0
