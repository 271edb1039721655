"""Qwen3.5's text as llama.cpp reads it, whose layers keep states, for `gguf_models.py`.

Runs in llama.cpp's environment; its greedy texts are ours, token for token. Names, shapes and what
is done to values are those of llama.cpp's own converter: the logarithm of a decay becomes the
decay, norms gain the one that Qwen's code adds. With as many heads of keys as of values in a layer
with a state, no head changes its place.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
Weights = Mapping[str, Matrix]

NAMES = {"qwen3_5_text": "qwen35"}  # theirs
SECTIONS = [11, 11, 10, 0]  # of Qwen3.5's rotary angles; of text all have the same positions

QWEN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
QWEN_STATES = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
QWEN_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}


def describe(writer: Any, config: Mapping[str, Any]) -> None:
    """Write the settings of a model of one of NAMES, by its config.json. Raises ValueError for
    one with fewer heads of keys than of values.
    """
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    width, heads = config["linear_value_head_dim"], config["linear_num_value_heads"]
    if heads != config["linear_num_key_heads"]:
        raise ValueError("linear_num_key_heads: llama.cpp wants other places of heads then")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections(SECTIONS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(width * heads)


def tensors(config: Mapping[str, Any], weights: Weights) -> Iterator[tuple[str, Matrix]]:
    """Their names of tensors and values, of a model of one of NAMES."""
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"] + 1
    for number, kind in enumerate(config["layer_types"]):
        mixer = QWEN_STATES if kind == "linear_attention" else QWEN_ATTENTION
        for name, theirs in (QWEN_LAYER | mixer).items():
            values = weights[f"model.layers.{number}.{theirs}"]
            if "norm" in name and name != "ssm_norm.weight":
                values = values + 1
            yield f"blk.{number}.{name}", _converted(name, values)


def _converted(name: str, values: Matrix) -> Matrix:
    if name == "ssm_a":
        values = -np.exp(values)
    return values[:, 0] if name == "ssm_conv1d.weight" else values
