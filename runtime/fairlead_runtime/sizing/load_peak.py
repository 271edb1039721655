"""What an engine takes while it loads its weights, which may be more than what it serves with.

Owns the arithmetic of that moment: the weights as they are loaded, and what is held beside them
while the layers of a CPU are quantized and packed, one after the other. Pure: reads no device.
"""

from dataclasses import replace

from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.config_json import DTYPE_BYTES
from fairlead_runtime.sizing.element_types import bytes_of, matrix_dtype_of, packs_on_cpu
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import PROCESS, RANK_WORD_BYTES
from fairlead_runtime.sizing.weight_bytes import held_weights

# Rows of logits in float32, in which comparisons keep what is expected, with plain and with
# quantized weights, what the kernels give, and differences in float64.
TESTED_ROWS = 192
# Temporaries of a matrix that is rounded or widened a chunk after the other.
CHUNK_TEMPORARIES = 16 << 20


def loading_bytes(shape: ModelShape, config: EngineConfig, kind: str) -> int:
    """The most bytes that the accelerator, or a CPU's pod with its process, takes while it loads;
    0 where that is known to be less than what it takes afterwards. Ranks of a split model leave the
    weights in their files until each has its shard.

    Weights count as if they were read into memory. Those that are served in the type of the
    checkpoint are mapped from its file, which takes less: their pages may be dropped at any time.
    """
    rounds = config.quantization != "none" and not shape.quantized
    plain = replace(config, quantization="none") if rounds else config
    if config.tensor_parallel > 1:
        return 0
    if kind != "cpu":
        if shape.held != shape.quantized:
            # A layer's experts as they are stored, a byte for each block's scale, and their rows.
            return (
                held_weights(shape, plain, 1, kind)
                + shape.largest_layer * 17 // 32
                + CHUNK_TEMPORARIES
            )
        return held_weights(shape, plain, 1, kind) if rounds else 0
    loaded = held_weights(shape, plain, 1, kind, loading=True)
    tested = 4 * TESTED_ROWS * shape.vocab  # compared in float32
    # The HTTP process reads its tokenizer afterwards.
    process = PROCESS + shape.vocab * RANK_WORD_BYTES
    return process + loaded + _peak_beside_weights(shape, config, rounds=rounds) + tested


def _peak_beside_weights(shape: ModelShape, config: EngineConfig, *, rounds: bool) -> int:
    """Peak bytes beside the loaded weights, the most of four cases. *Quantize a layer*, and the
    head: their rounded matrices. *Pack a layer*: its packed matrices. Both also hold that layer in
    float32 where the model is in another type. *Pack the head*: embeddings and head in float32,
    where they are in another type. *Join experts*: transformers makes one matrix of those of a
    layer, in two steps.
    """
    element, layer = bytes_of(shape, config), shape.largest_layer
    packs = packs_on_cpu(shape, config)
    vocab_matrices = 4 * shape.vocab * shape.hidden if packs and element < 4 else 0
    temporaries = CHUNK_TEMPORARIES if vocab_matrices else 0
    if shape.experts:
        return max(2 * layer * element, vocab_matrices + temporaries)
    if not packs:
        return 0
    vocab_matrices *= 1 if shape.tied else 2
    # Rows of queries, keys and values may be packed in another order.
    widened = layer if element < 4 else 0
    projected = max((kind.projected_width for kind in shape.head_kinds), default=0)
    ordered = projected * shape.hidden
    if not rounds:
        packed = 1 if shape.quantized else DTYPE_BYTES[matrix_dtype_of(shape, config)]
        ordered *= 1 if shape.quantized else 4
        return max(4 * widened + packed * layer + ordered, vocab_matrices) + temporaries
    # By the time the head is rounded the layers take a quarter of what they were loaded with.
    head = shape.vocab * shape.hidden - 3 * shape.layer_matrices if element == 4 else 0
    return max(4 * widened + layer, head, vocab_matrices) + CHUNK_TEMPORARIES
