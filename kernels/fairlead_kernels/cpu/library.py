"""The library of C++ kernels for this machine: found, checked and loaded with ctypes.

Owns which instruction set is used, the signatures of the C functions and the hand-over of torch's
threads. Knows no tensor. docs/design/0005-cpu-kernels.md says why it is a plain C library.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairlead_kernels.cpu import compilation, first_start
from fairlead_kernels.cpu.compilation import NotBuiltError
from fairlead_kernels.cpu.sources import hash_sources
from fairlead_kernels.interface.not_available import NotAvailableError

FOLDER = Path(__file__).parents[1] / "native"  # of what was installed
SOURCES = compilation.SOURCES
# The fastest first: the name of a library, and after "+" what more the processor has that the
# products of some weights use.
INSTRUCTION_SETS = ("avx512+amx", "avx512+vnni", "avx512", "avx2", "baseline")

Pointer = ctypes.c_void_p
Long = ctypes.c_int64
Int = ctypes.c_int32
Float = ctypes.c_float


class NormStruct(ctypes.Structure):
    """``Norm`` of norm.h."""

    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("eps", Float),
        ("offset", Float),
        ("centered", Int),
    )


class WeightStruct(ctypes.Structure):
    """``Weight`` of linear.h."""

    _fields_ = (
        ("data", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("bias", Pointer),
        ("scales", Pointer),
        ("stored", Int),
    )


class HeadsStruct(ctypes.Structure):
    """``Heads`` of attention.h."""

    _fields_ = (("query", Int), ("kv", Int), ("dim", Int), ("value_dim", Int))


class CachesStruct(ctypes.Structure):
    """``Caches`` of attention.h."""

    _fields_ = (
        ("keys", Pointer),
        ("values", Pointer),
        ("key_stride", Long),
        ("value_stride", Long),
        ("half", Int),
    )


class RowsStruct(ctypes.Structure):
    """``Rows`` of attention.h."""

    _fields_ = (
        ("starts", Pointer),
        ("lens", Pointer),
        ("tables", Pointer),
        ("tasks", Pointer),
        ("count", Int),
        ("table_width", Int),
        ("block_size", Int),
        ("window", Int),
        ("task_count", Int),
        ("merge_count", Int),
        ("fixed", Int),
    )


class AttentionStruct(ctypes.Structure):
    """``Attention`` of attention.h."""

    _fields_ = (
        ("query", Pointer),
        ("caches", CachesStruct),
        ("sinks", Pointer),
        ("out", Pointer),
        ("parts", Pointer),
        ("q_stride", Long),
        ("first", Long),
        ("scale", Float),
        ("softcap", Float),
        ("keep", Pointer),
        ("keep_count", Long),
    )


class RopeStruct(ctypes.Structure):
    """``Rope`` of rope.h."""

    _fields_ = (("cos", Pointer), ("sin", Pointer), ("rotated", Int))


class LayerStruct(ctypes.Structure):
    """``Layer`` of layers.cpp."""

    _fields_ = (
        ("input_norm", NormStruct),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("after_attention", NormStruct),
        ("mlp_norm", NormStruct),
        ("after_mlp", NormStruct),
        ("qkv", WeightStruct),
        ("out", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("caches", CachesStruct),
        ("sinks", Pointer),
        ("scale", Float),
        ("softcap", Float),
        ("activation", Int),
        ("parallel", Int),
        ("rope", Int),
        ("group", Int),
    )


class GroupStruct(ctypes.Structure):
    """``Group`` of layers.cpp."""

    _fields_ = (("rows", RowsStruct), ("slots", Pointer))


class SsdStruct(ctypes.Structure):
    """``Ssd`` of ssd.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("x", "dt", "b", "c")),
        *((f"{name}_stride", Long) for name in ("x", "dt", "b", "c")),
        *((name, Pointer) for name in ("a", "d", "bias", "out")),
        *((name, Int) for name in ("heads", "dim", "groups", "size")),
        ("least", Float),
        ("most", Float),
        ("softplus", Int),
        ("half", Int),
    )


class SelectiveStruct(ctypes.Structure):
    """``Selective`` of selective.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("x", "dt", "b", "c", "z")),
        ("x_stride", Long),
        ("dt_stride", Long),
        ("dt_column", Long),
        *((f"{name}_stride", Long) for name in ("b", "c", "z")),
        *((name, Pointer) for name in ("a", "d", "bias", "out")),
        *((name, Int) for name in ("channels", "size", "softplus", "half")),
    )


class StepStruct(ctypes.Structure):
    """``Step`` of layers.cpp."""

    _fields_ = (
        ("count", Long),
        ("units", Long),
        ("heads", HeadsStruct),
        ("threads", Int),
        ("ropes", Pointer),
        ("groups", Pointer),
        ("x", Pointer),
        ("normed", Pointer),
        ("qkv", Pointer),
        ("attended", Pointer),
        ("gate_up", Pointer),
        ("gated", Pointer),
        ("parts", Pointer),
        ("normed_digits", Pointer),
        ("digits", Pointer),
        ("slabs", Pointer),
        ("slab_count", Long),
        ("keep", Pointer),
        ("keep_count", Long),
        ("first", Long),
    )


class StatePlaceStruct(ctypes.Structure):
    """``StatePlace`` of states.h."""

    _fields_ = (("pool", Pointer), ("unit_bytes", Long), ("offset", Long))


class StateRowsStruct(ctypes.Structure):
    """``StateRows`` of states.h."""

    _fields_ = (
        ("starts", Pointer),
        ("prompts", Pointer),
        ("begins", Pointer),
        ("source", Pointer),
        ("target", Pointer),
        ("count", Long),
        ("units", Long),
    )


class ConvolutionStruct(ctypes.Structure):
    """``Convolution`` of convolution.cpp."""

    _fields_ = (
        ("x", Pointer),
        ("weight", Pointer),
        ("bias", Pointer),
        ("out", Pointer),
        ("channels", Long),
        ("taps", Int),
        ("half", Int),
        ("activated", Int),
    )


class DeltaStruct(ctypes.Structure):
    """``Delta`` of delta.cpp."""

    _fields_ = (
        ("q", Pointer),
        ("k", Pointer),
        ("v", Pointer),
        ("g", Pointer),
        ("beta", Pointer),
        ("out", Pointer),
        ("q_stride", Long),
        ("k_stride", Long),
        ("v_stride", Long),
        ("key_heads", Int),
        ("value_heads", Int),
        ("key_dim", Int),
        ("value_dim", Int),
        ("half", Int),
        ("normalizes", Int),
        ("scale", Float),
    )


# Name → arguments, and the result where there is one.
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "sources": ((), ctypes.c_char_p),
    "supports": ((ctypes.c_char_p,), Int),
    "tiles_agree": ((), Int),
    "use_openmp": ((Pointer, Pointer, Pointer), None),
    "team_size": ((Int,), Int),
    "panel_width": ((), Int),
    "use_large_pages": ((Pointer, Long), None),
    "give_back": ((Pointer, Long), None),
    "pack": ((Pointer, Pointer, Long, Long, Long, Long, Int), None),
    "pack_bfloat16": ((Pointer, Pointer, Long, Long, Long, Long, Int), None),
    "pack_int8": ((Pointer, Pointer, Long, Long, Long, Long, Int), None),
    "pack_int8_fours": ((Pointer, Pointer, Long, Long, Long, Long, Int), None),
    "pack_bfloat16_pairs": ((Pointer, Pointer, Long, Long, Long, Long, Int), None),
    "digits_bytes": ((Long, Int, Int), Long),
    "linears": (
        (
            *(Pointer, Long, Int, Pointer, ctypes.POINTER(WeightStruct)),
            *(ctypes.POINTER(Pointer), Int, Int),
        ),
        None,
    ),
    "mlp": (
        (
            *(Pointer, Long, Int, Pointer, *(ctypes.POINTER(WeightStruct),) * 2, Int),
            *(ctypes.POINTER(WeightStruct), Pointer, Pointer, Pointer, Int),
        ),
        None,
    ),
    "angles": ((Pointer, Long, Pointer, Int, Float, Pointer, Pointer, Int), None),
    "embed": (
        (
            *(Pointer, Long, ctypes.POINTER(WeightStruct), Float),
            *(Pointer, Pointer, Long, Pointer, Int),
        ),
        Int,
    ),
    "likeliest_part": ((), Int),
    "likeliest": (
        (
            *(Pointer, Long, ctypes.POINTER(NormStruct), Pointer),
            *(ctypes.POINTER(WeightStruct), Pointer, Pointer, Pointer, Int),
        ),
        None,
    ),
    "norm": (
        (
            *(Pointer, Pointer, ctypes.POINTER(NormStruct), Long, Long),
            *(Pointer, Pointer, Int, Int),
        ),
        None,
    ),
    "gated_norm": (
        (
            *(Pointer, Pointer, ctypes.POINTER(NormStruct), Long, Long, Long, Int),
            *(Pointer, Int, Int, Int),
        ),
        None,
    ),
    "rope_write": (
        (
            *(Pointer, Long, Int, Int, Int),
            *(Pointer, Pointer, Int),
            *(ctypes.POINTER(NormStruct),) * 2,
            *(Pointer, ctypes.POINTER(CachesStruct), Int),
        ),
        None,
    ),
    "gated": ((Pointer, Long, Long, Int, Pointer, Int), None),
    "activate": ((Pointer, Long, Long, Int, Pointer, Int), None),
    "attention_plan": (
        (ctypes.POINTER(HeadsStruct), ctypes.POINTER(RowsStruct), Int, Pointer),
        Int,
    ),
    "slabs": (
        (
            ctypes.POINTER(HeadsStruct),
            ctypes.POINTER(ctypes.POINTER(RowsStruct)),
            Int,
            Int,
            Pointer,
        ),
        Int,
    ),
    "attention_part": ((ctypes.POINTER(HeadsStruct),), Long),
    "attend": (
        (
            ctypes.POINTER(HeadsStruct),
            ctypes.POINTER(RowsStruct),
            ctypes.POINTER(AttentionStruct),
            Int,
        ),
        None,
    ),
    "convolution": (
        (
            ctypes.POINTER(ConvolutionStruct),
            ctypes.POINTER(StateRowsStruct),
            ctypes.POINTER(StatePlaceStruct),
            Int,
        ),
        None,
    ),
    "gated_delta": (
        (
            ctypes.POINTER(DeltaStruct),
            ctypes.POINTER(StateRowsStruct),
            ctypes.POINTER(StatePlaceStruct),
            Int,
        ),
        None,
    ),
    "layers": ((Pointer, Int, ctypes.POINTER(StepStruct)), None),
    "ssd": (
        (*(ctypes.POINTER(x) for x in (SsdStruct, StateRowsStruct, StatePlaceStruct)), Int),
        None,
    ),
    "selective": (
        (*(ctypes.POINTER(x) for x in (SelectiveStruct, StateRowsStruct, StatePlaceStruct)), Int),
        None,
    ),
}
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Library:
    """The loaded C functions of one instruction set, as attributes."""

    def __init__(self, instruction_set: str) -> None:
        try:
            path = first_start.find(instruction_set.partition("+")[0], FOLDER)
        except NotBuiltError as error:
            raise NotAvailableError(f"they are not built ({error})") from error
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotAvailableError(f"{path.name} cannot be loaded: {error}") from error
        self.instruction_set = instruction_set
        more = instruction_set.partition("+")[2]
        self.amx = more == "amx"  # of which each processor has VNNI
        self.vnni = self.amx or more == "vnni"
        for name, (arguments, result) in _FUNCTIONS.items():
            try:
                function = loaded[f"fairlead_{name}"]
            except AttributeError as error:
                raise NotAvailableError(first_start.OUTDATED) from error
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        # Beside VNNI or AMX, or without them.
        self.bfloat16 = more != "" and self.supports(b"avx512+bf16") == 1
        if SOURCES.exists() and self.sources().decode() != hash_sources(SOURCES):
            raise NotAvailableError(first_start.OUTDATED)
        share_threads(self.use_openmp)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the library has no function {name}")


def share_threads(use_openmp: Callable[..., Any]) -> None:
    """Let the kernels of the library whose function this is run on the threads of the OpenMP
    runtime that torch is linked with. A torch without one leaves them on the caller's thread.
    """
    # Looks a name up in the libraries that this one is linked with, too.
    torch_library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - torch has no public name for it
    try:
        functions = [ctypes.cast(torch_library[name], Pointer) for name in _OPENMP]
    except AttributeError:
        return
    use_openmp(*functions)


def supported() -> list[str]:
    """The instruction sets that this machine has, the fastest first. Raises NotAvailableError."""
    try:
        names = first_start.supported(INSTRUCTION_SETS, FOLDER)
    except NotBuiltError as error:
        raise NotAvailableError(f"they are not built ({error})") from error
    # No product of ours has run on a processor with AMX yet: it is compared once, here.
    if names[0] == "avx512+amx" and not Library(names[0]).tiles_agree():
        del names[0]
    return names


@functools.cache
def load(instruction_set: str | None = None) -> Library:
    """The library of an instruction set; None: of the fastest that this machine has.

    Raises NotAvailableError where the kernels are not built or the machine lacks it.
    """
    if instruction_set == "baseline":
        return Library("baseline")
    names = supported()
    name = instruction_set or names[0]
    if name not in names:
        raise NotAvailableError(f"this machine has {', '.join(names)}, not {name!r}")
    return Library(name)
