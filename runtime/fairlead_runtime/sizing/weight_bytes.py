"""The bytes of a model's weights as an accelerator, a rank or a CPU's kernels hold them.

Owns what quantization, splitting and packing make of a shape's parameters. Pure.
"""

from fairlead_kernels.formats.row_chunks import ELEMENTS
from fairlead_kernels.packages.humming_memory import OWN_PAIR, PAIR, takes
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import PANEL, ceil_div
from fairlead_runtime.sizing.config_json import DTYPE_BYTES
from fairlead_runtime.sizing.element_types import (
    bytes_of,
    dtype_of,
    matrix_dtype_of,
    packs_on_cpu,
)
from fairlead_runtime.sizing.shape import ModelShape

FLOAT32 = DTYPE_BYTES["float32"]


def held_weights(
    shape: ModelShape, config: EngineConfig, tp: int, kind: str, *, loading: bool = False
) -> int:
    """Bytes of the weights on one of ``tp`` accelerators that share the model, or on a CPU, with
    what is float32 in a model of 16 bits and buffers, which no rank splits. ``loading``: all in the
    model's type, as they are before they are packed.
    """
    dtype = dtype_of(shape, config)
    wide = shape.wide + (shape.wide_norms if dtype == "float16" else 0)
    element = DTYPE_BYTES[dtype]
    more = wide * (FLOAT32 - element) + shape.buffers * FLOAT32 + shape.typed_buffers * element
    return weights(shape, config, tp, kind, loading=loading) + more + shape.mask_bytes


def weights(
    shape: ModelShape, config: EngineConfig, tp: int, kind: str, *, loading: bool = False
) -> int:
    """The same of parameters in the model's type alone. Of layers only the matrices are quantized.
    They are split with the biases of their outputs, those of keys and values by heads; so is an
    output matrix that is not the embedding. The rest is whole on each, as the scales of matrices
    that are split by their inputs are.
    """
    element = bytes_of(shape, config)
    if kind == "cpu" and tp == 1 and packs_on_cpu(shape, config):
        dtype = (dtype_of if loading else matrix_dtype_of)(shape, config)
        return _packed_weights(shape, config, element, DTYPE_BYTES[dtype])
    if config.quantization != "none" and tp == 1:
        # A byte each and a float32 scale per row. int4: half of one, a scale and a zero point per
        # group, and the order of columns, if they have one.
        matrices = shape.layer_matrices + 4 * shape.layer_channels
        if config.quantization == "int4":
            scales = _scale_bytes(shape, shape.int4_groups, tp)
            matrices = shape.layer_matrices // 2 + scales + 4 * shape.reordered_columns
        return matrices + (shape.parameters - shape.layer_matrices) * element
    head = 0 if shape.tied or shape.vocab % tp else shape.vocab * shape.hidden
    unsharded = shape.parameters - shape.sharded_parameters - shape.kv_parameters - head
    keys = ceil_div(shape.kv_parameters, min(tp, shape.kv_heads))
    plain = (unsharded + ceil_div(shape.sharded_parameters, tp) + keys + head // tp) * element
    if config.quantization == "none":
        return plain
    matrices, channels = _layer_shares(shape, tp)
    if config.quantization == "int4":
        scales = matrices // shape.int4_group_size if shape.int4_group_size else channels
        return plain - matrices * element + matrices // 2 + _scale_bytes(shape, scales, tp)
    # A byte each and a float32 scale per row.
    return plain - matrices * (element - 1) + 4 * channels


def _scale_bytes(shape: ModelShape, scales: int, tp: int) -> int:
    """Bytes of so many scales of int4 weights, and of their zero points."""
    return scales * (PAIR if packaged(shape, tp) else OWN_PAIR) // 2


def packaged(shape: ModelShape, tp: int) -> bool:
    """Whether a package's products take all int4 matrices that one of ``tp`` accelerators has of
    the layers. Else all products are ours, so that the size is known.
    """
    inner = ceil_div(shape.mlp_width_unit, tp)
    return all(
        takes(
            (heads.projected_width, shape.hidden, inner),
            (shape.hidden, heads.attended_width, inner),
        )
        for heads in shape.heads_on(tp)
    )


def _layer_shares(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Elements and output rows that one of ``tp`` ranks has of the layers' matrices: its share of
    most rows, those of its keys and values, and all of the two matrices that give hidden states.
    """
    sharing, hidden_rows = min(tp, shape.kv_heads), 2 * shape.hidden * shape.layers
    keys = shape.kept_width
    matrices = ceil_div(shape.layer_matrices - keys * shape.hidden, tp)
    channels = ceil_div(shape.layer_channels - keys - hidden_rows, tp)
    shared = ceil_div(keys, sharing)
    return matrices + shared * shape.hidden, channels + shared + hidden_rows


def _packed_weights(shape: ModelShape, config: EngineConfig, element: int, packed: int) -> int:
    """Bytes of the weights in the C++ kernels for CPUs, ``packed`` of each in a matrix: the head
    has rows to a whole panel. int8, unless a checkpoint brings it, is in float32 the head's type,
    too.
    """
    rows = ceil_div(shape.vocab, PANEL) * PANEL
    if packed < element:
        # So that it is known how many there are, matrices of few rows are packed, too.
        padding = shape.joined_padding if shape.slab_width else shape.padding + shape.narrow_padding
        matrices, head = shape.layer_matrices, shape.vocab * shape.hidden
        rest = shape.parameters - matrices - head
        return (matrices + padding + rows * shape.hidden) * packed + rest * element
    plain = (shape.parameters + (rows - shape.vocab) * shape.hidden) * element
    narrow = shape.narrow_padding if shape.states else 0
    if config.quantization == "none":
        return plain + (panel_rows(shape) + narrow * config.deterministic) * element
    plain += panel_rows(shape) + narrow
    plain += shape.fours_padding
    matrices, channels = shape.layer_matrices, shape.layer_channels
    if not shape.quantized and element == 4 and not shape.states:
        matrices, channels = matrices + rows * shape.hidden, channels + shape.vocab
        plain += rows * (-shape.hidden % 4)
    return plain - matrices * (element - 1) + 4 * channels


def panel_rows(shape: ModelShape) -> int:
    """Elements, at most, of the rows that make whole panels of the layers' matrices, in the widest
    panels: as many where the model's own code multiplies by them, or they are fused.
    """
    return shape.joined_padding if shape.slab_width else shape.padding


def widened(shape: ModelShape, config: EngineConfig, kind: str, tokens: int) -> int:
    """Bytes of the largest matrix that a product on an accelerator may copy: quantized weights, in
    the type of the activations. Of int4 half of the integers are beside it, and what they multiply
    in the order of their columns.
    """
    if config.quantization == "none" or (kind == "cpu" and not shape.states):
        return 0
    element = bytes_of(shape, config)
    if shape.states:  # rows of a matrix as they are widened, and what they give beside all others'
        rows = min(ELEMENTS, shape.largest_layer) * (4 + element)
        return rows + tokens * shape.most_channels * element
    projections = max((heads.projected_width for heads in shape.head_kinds), default=0)
    widest = ceil_div(max(2 * shape.mlp_width_unit, projections), config.tensor_parallel)
    largest = shape.hidden * widest
    if config.quantization != "int4":
        return largest * element
    attended = max(heads.attended_width for heads in shape.head_kinds)
    columns = max(shape.hidden, attended, shape.mlp_width_unit) if shape.reordered_columns else 0
    return largest * element + largest // 2 + tokens * columns * element
