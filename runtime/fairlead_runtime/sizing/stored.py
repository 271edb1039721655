"""How a quantized checkpoint stores the matrices of its layers, as a plain value.

Owns the names and sizes of its tensors, and the words of a refusal. Pure. Which configuration means
what is ``published``'s; ``models/published.py`` reads the tensors.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from fairlead_runtime.sizing.config_json import ShapeError

KEY = "quantization_config"
HEAD = ("lm_head", "re:.*lm_head", "re:.*lm_head.*", "embed_out")
# compressed-tensors' names, beside a weight: what it is multiplied by, what stands for 0, and what
# belongs to the order of columns, to activations or to calibration.
SCALE, ZERO, INDEX = "weight_scale", "weight_zero_point", "weight_g_idx"
SIDE_TENSORS = (SCALE, ZERO, INDEX, "weight_shape", "input_scale", "input_zero_point")
# The same of GPTQ and AWQ.
GROUP_SCALES, GROUP_ZEROS, GROUP_INDEX = "scales", "qzeros", "g_idx"
GROUP_SIZES = (32, 64, 128)
# Rows: an int32 holds neighbours of a row, the first in the lowest bits. gptq: neighbours of a
# column, and each zero point minus one; gptq_v2: as it is. awq: neighbours of a column of the
# transposed matrix, in an order of their own.
# mxfp4: blocks of neighbours of a row, of one matrix for each expert.
Layout = Literal["rows", "gptq", "gptq_v2", "awq", "mxfp4"]
# What a checkpoint's weights are, as the setting ``quantization`` names it; "": plain. mxfp4 is no
# setting: such weights are widened at load and held plain.
Stored = Literal["", "int8", "fp8", "int4", "mxfp4"]
# MXFP4's, beside the name of the plain tensor.
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
MXFP4_BLOCK = 32  # numbers that share a scale

# What files and configurations call the text of a model of several parts, and a layer's matrices.
_TEXTS = (
    *("", "model.", "language_model.", "language_model.model.", "model.language_model."),
    *("text_model.", "model.text_model.", "model.text_model.model."),
)
_MATRICES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("self_attn.qkv_proj", "self_attn.out_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    *("self_attn.query_key_value", "attention.query_key_value", "attention.dense", "fc1", "fc2"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj", "mlp.c_fc"),
    *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "attn.c_attn", "attn.c_proj", "mlp.c_proj"),
    # Of layers with states.
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b"),
    *("linear_attn.in_proj_a", "linear_attn.out_proj", "conv.in_proj", "conv.out_proj"),
    *("self_attn.g_proj", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)
_NUMBER = re.compile(r"\d+")
# Patterns that do not take long to try on names: these signs, and so few of those that branch.
_PATTERN = re.compile(r"(?:[\w.-]|\\[.d_-]|[|()^$]|(?<=[.d])[*+]|(?<=[\w.)])\?){1,200}")
_MOST_PATTERNS, _MOST_REPEATS, _MOST_BRANCHES, _MOST_NUMBERS = 8, 3, 5, 2


class QuantizedError(ShapeError):
    """A quantized checkpoint that is not served; the message names the key of its configuration."""


@dataclass(frozen=True, slots=True)
class Published:
    """How the matrices of all layers, or all experts, are stored. ``format``: the value of the
    setting ``quantization`` that serves them, "" for plain ones, or mxfp4; ``weight``: the name of
    the tensor that holds the numbers of a matrix, several of them in each element if there are
    ``packed`` in one.

    ``int4_group_size``: so many neighbours in a row share a scale, 0: all. ``ordered``: which do is
    said column by column. ``dtype``: of the other tensors where the config names none.
    """

    format: Stored
    weight: str = "weight"
    packed: int = 1
    layout: Layout = "rows"
    int4_group_size: int = 0
    ordered: bool = False
    dtype: str | None = None

    @property
    def scale(self) -> str:
        return SCALE if self.layout == "rows" else GROUP_SCALES

    @property
    def needed(self) -> tuple[str, ...]:
        """The tensors that each matrix has."""
        rows = self.layout == "rows"
        return (self.weight, SCALE) if rows else (self.weight, GROUP_SCALES, GROUP_ZEROS)

    @property
    def side_tensors(self) -> tuple[str, ...]:
        """The tensors that a matrix may have beside its numbers."""
        return SIDE_TENSORS if self.layout == "rows" else (GROUP_SCALES, GROUP_ZEROS, GROUP_INDEX)

    def plain(self, name: str, dimensions: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """The tensor of the unquantized checkpoint in the place of this one, None for none."""
        module, _, leaf = name.rpartition(".")
        if leaf in self.side_tensors:
            return None
        if leaf != self.weight or self.packed == 1 or len(dimensions) < 2:
            return name, dimensions
        *before, first, last = dimensions
        if self.layout == "rows":
            last *= self.packed
        elif self.layout == "awq":
            first, last = last * self.packed, first
        else:
            first, last = last, first * self.packed
        return f"{module}.weight", (*before, first, last)

    def int4_groups(self, matrices: int, channels: int, widths: Iterable[int]) -> int:
        """How many scales int4 matrices of so many elements and rows have; else 0. Raises
        QuantizedError where the groups do not divide one of ``widths``, the matrices' columns.
        """
        if self.format != "int4":
            return 0
        for width in widths:
            if width % (self.int4_group_size or 8):
                served = f"sizes that divide the model's width {width} are served"
                raise refusal("group_size", self.int4_group_size or -1, served)
        return matrices // self.int4_group_size if self.int4_group_size else channels


def refusal(key: str, value: object, served: str) -> QuantizedError:
    return QuantizedError(KEY, f"{key} {str(value)[:60]!r} is not supported: {served}")


def check_value(
    settings: Mapping[str, Any], key: str, works: Sequence[object], *, prefix: str = ""
) -> None:
    """Raise QuantizedError for a value that is none of these. JSON's true is no 1."""
    value = settings.get(key, works[0])
    if not any(value == x and isinstance(value, bool) is isinstance(x, bool) for x in works):
        raise refusal(prefix + key, value, " or ".join(map(str, works)) + " is served")


def of_the_text(names: Iterable[object]) -> list[object]:
    """Of a list of modules that are not quantized in a model of several parts those that are no
    other part and not the head: they may be matrices of the text's layers.

    An entry is a name, or a piece of one, or a pattern as in ``re``, which compressed-tensors
    begins with ``re:``. Raises QuantizedError for patterns that are not tried.
    """
    listed = list(names)
    patterns = [name for name in listed if isinstance(name, str) and not _is_plain(name)]
    if len(patterns) > _MOST_PATTERNS:
        raise refusal("patterns", len(patterns), f"up to {_MOST_PATTERNS} in a list are served")
    return [name for name in listed if not isinstance(name, str) or _means_matrices(name)]


def is_head(name: object) -> bool:
    """Whether an entry of such a list that is not of the text is the head."""
    return isinstance(name, str) and (name in HEAD or name.rstrip(".*$").endswith("lm_head"))


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[\w.-]*", name) is not None


def _means_matrices(name: str) -> bool:
    if not _is_plain(name):
        pattern = _pattern(name)
        return any(pattern.match(matrix) for matrix in _names_of_matrices(name))
    layer = re.match(rf"(?:{'|'.join(map(re.escape, _TEXTS))})(?:decoder\.)?(?:layers|h)\.\d", name)
    # A name may be that of a class.
    return name == "Linear" or layer is not None or _NUMBER.sub("0", name) in _pieces()


def _pattern(name: str) -> re.Pattern[str]:
    """Raises QuantizedError for one that is not tried."""
    plain = name.removeprefix("re:")
    repeats, branches = (sum(map(plain.count, signs)) for signs in ("*+", "*+|?"))
    few = repeats <= _MOST_REPEATS and branches <= _MOST_BRANCHES
    if few and _PATTERN.fullmatch(plain) and "(?" not in plain:
        if len(_NUMBER.findall(plain)) <= _MOST_NUMBERS:
            with suppress(re.error):
                return re.compile(plain)
    raise refusal("pattern", name, "names, and short patterns of '.*' and '|', are served")


def _names_of_matrices(pattern: str = "") -> Iterator[str]:
    """Names of matrices in layers of a text, some with the numbers that ``pattern`` has."""
    numbers = {"0", "12", *_NUMBER.findall(pattern)}
    for text, number, matrix in itertools.product(_TEXTS, numbers, _MATRICES):
        yield f"{text}{'h' if matrix.startswith('attn.') else 'layers'}.{number}.{matrix}"


@functools.cache
def _pieces() -> str:
    """The same, one after the other, with 0 for each number."""
    return "\n".join(_NUMBER.sub("0", matrix) for matrix in _names_of_matrices())
