"""Models of a stated shape with random weights, made from a seed: what most benchmarks measure does
not depend on the values of the weights. And a published model, for real text.
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 49152
LONGEST = 4096  # tokens of a request, but of GPT2's
SHAPES: dict[str, dict[str, int]] = {
    "15 M": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "135 M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "0.5 B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
# Layers that keep a state, and some with keys. The first two are beside other engines
# (``cpu_peers.py``), the others alone (``state_steps.py``): Qwen3.5's is its smallest but for the
# vocabulary, Nemotron-H's layers are half MLPs.
_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
STATES: dict[str, dict[str, Any]] = {
    "Qwen3.5, 0.5 B": _QWEN3_5 | {"num_hidden_layers": 20},
    "Nemotron-H, 0.5 B": {
        "model_type": "nemotron_h",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "layers_block_type": 3 * (6 * ["mamba", "mlp"] + ["attention", "mlp"])
        + 3 * ["mamba", "mlp"],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    "Qwen3.5, 24 layers": _QWEN3_5 | {"num_hidden_layers": 24},
    "Nemotron-H, wide": {
        "model_type": "nemotron_h",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "layers_block_type": [*["linear_attention", "mlp"] * 5, "full_attention", "mlp"] * 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_num_heads": 48,
        "n_groups": 8,
    },
}
STATES_ALONE = {"qwen3_5_text": "Qwen3.5, 24 layers", "nemotron_h": "Nemotron-H, wide"}
STATES_BESIDE_PEERS = tuple(name for name in STATES if name not in STATES_ALONE.values())
GPT2 = "GPT-2"  # at full size: 124 million parameters
SMOLLM2 = "SmolLM2"  # 135 million parameters that somebody trained


def with_states(family: str, layers: int) -> dict[str, Any]:
    """The settings of a family's shape of ``STATES_ALONE``, of the first of its layers, in a
    configuration of transformers.
    """
    limits = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "pad_token_id": 0}
    shape = limits | STATES[STATES_ALONE[family]]
    del shape["model_type"]
    if "layers_block_type" in shape:
        return shape | {"layers_block_type": shape["layers_block_type"][:layers]}
    return shape | {"num_hidden_layers": min(layers, shape["num_hidden_layers"])}


class Size(NamedTuple):
    """Parameters. ``layers`` and ``head`` are what a step reads: of an embedding it reads a row per
    token, and where the head is tied to it, the matrix counts as the head.
    """

    total: int
    layers: int
    head: int


def save(name: str, folder: Path) -> Size:
    """Write the model ``name``, of SHAPES or STATES, GPT2 or SMOLLM2, in float32, but those of
    STATES in bfloat16, as such models are published, with no end of sequence, and its tokenizer.
    With random weights every character of a prompt is a token, and every token has a text.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST}
    model: Any  # transformers' classes are untyped
    if name == SMOLLM2:
        model = AutoModelForCausalLM.from_pretrained(published(), dtype=torch.float32)
        model.config.update(ids)
    elif name == GPT2:
        model = GPT2LMHeadModel(GPT2Config(**ids))
    elif name in STATES:
        shape = limits | STATES[name] | {"tie_word_embeddings": True} | ids
        config = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(**limits | SHAPES[name], tie_word_embeddings=True, **ids)
        )
    model.generation_config = GenerationConfig(do_sample=False)
    model.save_pretrained(folder)
    if name == SMOLLM2:
        for file in published().glob("tokenizer*"):
            shutil.copy(file, folder)
    else:
        save_tokenizer(folder, model.config.vocab_size)
    return size(model)


def published() -> Path:
    """The folder of SmolLM2 in bfloat16. Raises pytest's Skipped where it cannot be fetched."""
    from support import real_weights

    return real_weights.SMOLLM2.folder()


def size(model: Any) -> Size:
    """Of a model of transformers with a head, tied or not."""
    from torch.nn import Embedding

    head = model.get_output_embeddings().weight
    rows = {one.weight for one in model.modules() if isinstance(one, Embedding)}
    parameters = list(model.parameters())
    return Size(
        sum(one.numel() for one in parameters),
        sum(one.numel() for one in parameters if one not in rows and one is not head),
        head.numel(),
    )


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġw{number}" for number in range(vocabulary - len(texts))]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def vocabulary(name: str) -> int:
    return 50257 if name == GPT2 else SHAPES.get(name, {}).get("vocab_size", VOCABULARY)
