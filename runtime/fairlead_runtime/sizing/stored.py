"""How a quantized checkpoint stores the matrices of its layers, as a plain value.

Owns the names and sizes of its tensors, and the words of a refusal. Pure. Which configuration means
what is ``published``'s; ``models/published.py`` reads the tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
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
