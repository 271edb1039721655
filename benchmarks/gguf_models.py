"""Models of `models.py` as llama.cpp reads them: GGUF files in float32, in bfloat16 or with 8-bit
weights.

Runs in llama.cpp's environment (`peers.LLAMA_CPP`). The file holds no texts of tokens: prompts and
answers are ids here. Names and the order of rows are those of llama.cpp's own converter,
`convert_hf_to_gguf.py`. The 8-bit form is Q8_0. All matrices have the form of the file but those of
convolutions, which stay in float32, as in `llama-quantize`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors
from benchmarks import gguf_states

Matrix = npt.NDArray[np.float32]
Weights = Mapping[str, Matrix]

# By the type of weights, which names the file.
FORMS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def save(model: Path, dtype: str) -> Path:
    """Write the GGUF file of the checkpoint in ``model`` beside it, unless it is there. ``dtype``:
    one of FORMS.
    """
    form = FORMS[dtype]
    file = model / f"{dtype}.gguf"
    if file.exists():
        return file
    config = json.loads((model / "config.json").read_text())
    weights = dict(_weights(model / "model.safetensors"))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(str(file), gguf_states.NAMES.get(kind, kind))
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    if kind == "gpt2":
        _describe_gpt2(writer, config)
        tensors = _gpt2(config, weights)
    elif kind in gguf_states.NAMES:
        gguf_states.describe(writer, config)
        tensors = gguf_states.tensors(config, weights)
    elif kind == "llama":
        _describe_llama(writer, config)
        tensors = _llama(config, weights)
    else:
        raise ValueError(f"{kind}: no form of llama.cpp's is written here")
    for name, values in tensors:
        if dtype != "float32" and values.ndim > 1 and "conv" not in name:
            writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _weights(file: Path) -> Iterator[tuple[str, Matrix]]:
    """The tensors in float32. numpy has no bfloat16, which is the upper half of a float32."""
    deserialize: Any = safetensors.deserialize  # untyped
    for name, stored in deserialize(file.read_bytes()):
        if stored["dtype"] == "BF16":
            halves = np.frombuffer(stored["data"], np.uint16)
            values = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(stored["data"], np.float32)
        yield name, values.reshape(stored["shape"])


def _describe_llama(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _llama(config: Mapping[str, Any], weights: Weights) -> Iterator[tuple[str, Matrix]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for number in range(config["num_hidden_layers"]):
        for name, theirs in LLAMA_LAYER.items():
            values = weights[f"model.layers.{number}.{theirs}.weight"]
            if name in heads:
                values = _paired(values, heads[name])
            yield f"blk.{number}.{name}.weight", values


def _paired(values: Matrix, heads: int) -> Matrix:
    """Rows of a head in the order in which those that rotate together are neighbours."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _describe_gpt2(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _gpt2(config: Mapping[str, Any], weights: Weights) -> Iterator[tuple[str, Matrix]]:
    yield "token_embd.weight", weights["transformer.wte.weight"]
    yield "position_embd.weight", weights["transformer.wpe.weight"]
    for part in ("weight", "bias"):
        yield f"output_norm.{part}", weights[f"transformer.ln_f.{part}"]
        for number in range(config["n_layer"]):
            for name, theirs in GPT2_LAYER.items():
                values = weights[f"transformer.h.{number}.{theirs}.{part}"]
                # Its products have the inputs first.
                yield f"blk.{number}.{name}.{part}", np.ascontiguousarray(values.T)
