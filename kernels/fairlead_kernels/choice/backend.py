"""The kernels that a process runs on: picked once, at start, and logged.

Owns the choice and its reason. A faster backend is one more entry in ``pick``; nothing else chooses
by device type.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fairlead_kernels.cpu import cpu_operations as cpu
from fairlead_kernels.cpu import first_start, library
from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.gpu import triton_attention, triton_fixed, triton_operations, triton_package
from fairlead_kernels.interface.attention import AttentionBackend, GroupKinds, Heads
from fairlead_kernels.interface.layer import LayerOperations
from fairlead_kernels.interface.not_available import NotAvailableError, fall_back, name_of
from fairlead_kernels.interface.states import StateOperations
from fairlead_kernels.packages import flashinfer_package, humming_package
from fairlead_kernels.packages.flashinfer_attention import SUPPORTED, FlashinferAttention
from fairlead_kernels.packages.flashinfer_package import FlashinferPackage
from fairlead_kernels.packages.humming_products import HummingProducts
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_kernels.plain.torch_operations import TorchOperations, prove_fp8
from fairlead_kernels.proofs.attention_proof import BLOCK_SIZE, prove_attention
from fairlead_kernels.proofs.triton_proof import prove_operations

# The oldest GPUs, by their compute capability, that flashinfer's kernels run on in each type.
OLDEST_GPU = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}
PORTABLE = "plain torch on {}, portable kernels"
FP8_GPU = (8, 9)  # the oldest that multiply 8-bit floats


@dataclass(frozen=True, slots=True, eq=False)
class BackendChoice:
    """The kernels of this process and the reason for them. ``operations`` are those of fused
    layers; None: the model's own code computes its layers. ``states``: those of mixers that keep
    one, None where the model's own code changes states.
    """

    attention: AttentionBackend
    operations: LayerOperations | None
    reason: str = ""
    states: StateOperations | None = None

    def __str__(self) -> str:
        return f"{self.attention.name} ({self.reason})" if self.reason else self.attention.name


def pick(
    heads: Heads,
    kinds: GroupKinds,
    device: torch.device,
    kernels: str = "auto",
    *,
    deterministic: bool = False,
    block_size: int = BLOCK_SIZE,
    torch_because: str = "",
) -> BackendChoice:
    """The kernels for a model with these heads and kinds of layers on this device, in whose cache
    ``block_size`` tokens are a block: with ``auto`` the first that can serve it, ``cpu`` those in
    C++, ``flashinfer`` its attention, with ``torch`` plain torch, which runs on every device. On
    GPUs ``auto`` takes attention by flashinfer, else in Triton, else in torch; layers have
    operations of their own, in Triton or else in torch, beside each of them. ``torch_because``: why
    no kernels for GPUs can serve the model, whatever they are; ``heads`` are its widest layer's.

    With ``deterministic`` a token's results are the same bits whatever else is in its step, by
    kernels of ours alone.

    Raises NotAvailableError with the reason when ``cpu`` or ``flashinfer`` is asked for and cannot
    serve the model, or when ``deterministic`` is and no kernels can.
    """
    reason = ""
    if torch_because and device.type != "cpu":
        if deterministic or kernels in ("cpu", "flashinfer"):
            raise NotAvailableError(torch_because)
        kernels, reason = "torch", f"; {torch_because}"
    if deterministic:
        return fixed_kernels(heads, kinds, device, kernels)
    states: CpuStates | None = None
    if kernels == "cpu" or (kernels == "auto" and device.type == "cpu"):
        try:
            c_operations = cpu_operations(device.type, heads.dtype, fp8_cache=heads.fp8_cache)
        except NotAvailableError as error:
            if kernels == "cpu":
                raise
            reason = f"; no C++ kernels: {error}"
            states = cpu_states(heads)
        else:
            loaded = c_operations.library
            return BackendChoice(CpuAttention(heads, loaded), c_operations, "", CpuStates(loaded))
    if kernels == "flashinfer" or (kernels == "auto" and device.type == "cuda"):
        attention, description, reason = _gpu_attention(heads, kinds, device, kernels, block_size)
        layers, name = gpu_operations(heads.dtype, device, heads.cache_dtype)
        return BackendChoice(attention, layers, f"{description}, {name}{reason}")
    on_cpu = f"plain torch on {torch.get_num_threads()} CPU threads"
    description = on_cpu if device.type == "cpu" else PORTABLE.format(device.type)
    return BackendChoice(TorchAttention(heads, device), None, f"{description}{reason}", states)


def _gpu_attention(
    heads: Heads, kinds: GroupKinds, device: torch.device, kernels: str, block_size: int
) -> tuple[AttentionBackend, str, str]:
    """The first attention that can serve the model, its description, and the reason why those
    before it cannot. Raises NotAvailableError where only flashinfer may.
    """
    try:
        package = flashinfer_for(heads, device)
        flashinfer = FlashinferAttention(heads, kinds, device, package)
        prove_attention(flashinfer, heads, kinds, device, block_size)
    except NotAvailableError as error:
        if kernels == "flashinfer":
            raise
        reason = f"; no flashinfer: {fall_back(error)}"
    else:
        return flashinfer, f"attention by flashinfer {package.version}", ""
    try:
        triton = triton_attention.load(heads, device)
        prove_attention(triton, heads, kinds, device, block_size)
    except NotAvailableError as error:
        plain = TorchAttention(heads, device)
        return (
            plain,
            PORTABLE.format(device.type),
            f"{reason}; no Triton attention: {fall_back(error)}",
        )
    return triton, "attention in Triton", reason


def fixed_kernels(
    heads: Heads, kinds: GroupKinds, device: torch.device, kernels: str
) -> BackendChoice:
    """The kernels whose sums have one order. Raises NotAvailableError."""
    check_fixed(heads, device, kernels)
    if device.type == "cpu":
        c_operations = cpu_operations(device.type, heads.dtype, fp8_cache=heads.fp8_cache)
        return BackendChoice(
            c_operations.attention(heads, fixed=True),
            c_operations,
            "sums in one order",
            CpuStates(c_operations.library),
        )
    attention, operations = triton_fixed.load(heads, kinds, device)
    return BackendChoice(attention, operations, "sums in one order, layers in Triton")


def check_fixed(heads: Heads, device: torch.device, kernels: str) -> None:
    """Raise NotAvailableError, with the reason, where it is known without a look at the model's
    layers that no kernels can serve it whose sums have one order.
    """
    if kernels in ("torch", "flashinfer"):
        name = "plain torch" if kernels == "torch" else kernels
        raise NotAvailableError(f"{name} sums in an order that depends on the batch")
    if device.type == "cpu" or kernels == "cpu":
        cpu_operations(device.type, heads.dtype, fp8_cache=heads.fp8_cache)
        return
    for name in triton_fixed.MODULES:
        triton_package.load(f"fairlead_kernels.gpu.{name}")


def gpu_operations(
    dtype: torch.dtype, device: torch.device, cache_dtype: torch.dtype | None = None
) -> tuple[LayerOperations, str]:
    """The operations of a model of this type on this GPU, and what they are: Triton's where it
    runs, else those in torch and the reason. ``cache_dtype``: the cache's type, if another.
    """
    fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_GPU
    without = ""
    if fp8:
        try:
            prove_fp8(device)
        except NotAvailableError as error:
            fp8 = False
            without = f"; activations are not rounded to 8-bit floats: {fall_back(error)}"
    try:
        operations = triton_operations.load(fp8=fp8)
        prove_operations(operations, dtype, device, cache_dtype)
    except NotAvailableError as error:
        return TorchOperations(fp8=fp8), f"layers in torch: {fall_back(error)}{without}"
    return operations, f"layers in Triton{without}"


def int4_products(
    operations: LayerOperations | None, dtype: torch.dtype, device: torch.device, compilers: int = 1
) -> tuple[HummingProducts | None, str]:
    """A package's products with 4-bit weights for a model of this type whose layers have these
    operations, made by so many ``compilers`` at a time. None, and the reason, if there is one,
    where all products are those of the operations.
    """
    if device.type != "cuda" or operations is None or operations.fixed_order:
        return None, ""
    if dtype is torch.float32:
        return None, "4-bit products of ours: humming has none in float32"
    try:
        return HummingProducts(humming_package.load(), dtype, device, compilers), ""
    except NotAvailableError as error:
        return None, f"4-bit products of ours: {fall_back(error)}"


def cpu_operations(device: str, dtype: torch.dtype, *, fp8_cache: bool = False) -> CpuOperations:
    """The C++ kernels for a model of this type on a device of this kind. Raises NotAvailableError
    with the reason where they cannot serve it.
    """
    _check_cpu(device, dtype, fp8_cache=fp8_cache)
    return cpu.load()


def compile_cpu(
    kernels: str,
    device: str,
    dtype: torch.dtype,
    *,
    fp8_cache: bool,
    compilers: int,
    begun: Callable[[], None],
) -> None:
    """Compile the C++ kernels if they are those of a model of this type, and neither installed, of
    these sources, nor compiled by an earlier start, by so many ``compilers`` at a time; ``begun``
    is called first. A failure is logged.
    """
    if kernels not in ("auto", "cpu"):
        return
    try:
        _check_cpu(device, dtype, fp8_cache=fp8_cache)
    except NotAvailableError:
        return
    first_start.compile_missing(library.FOLDER, begun, compilers)


def _check_cpu(device: str, dtype: torch.dtype, *, fp8_cache: bool) -> None:
    if device != "cpu":
        raise NotAvailableError(f"the model runs on {device}")
    if dtype not in (torch.float32, torch.bfloat16):
        name = name_of(dtype)
        raise NotAvailableError(f"they have weights in float32 or bfloat16, the model in {name}")
    if fp8_cache:
        raise NotAvailableError("their cache is in float32 or bfloat16, not in fp8")


def cpu_states(heads: Heads) -> CpuStates | None:
    """The C++ operations on states of a model of this type, whatever its cache; None without."""
    try:
        return CpuStates(cpu_operations("cpu", heads.dtype).library)
    except NotAvailableError:
        return None


def flashinfer_for(heads: Heads, device: torch.device) -> FlashinferPackage:
    """The package, for a model with these heads on this device. Raises NotAvailableError with the
    reason where it cannot serve the model, whatever its layers are like.
    """
    if device.type != "cuda":
        raise NotAvailableError(f"the model runs on {device.type}")
    SUPPORTED.check_heads(heads)
    capability = torch.cuda.get_device_capability(device)
    oldest = OLDEST_GPU[heads.dtype]
    if capability < oldest:
        name = name_of(heads.dtype)
        raise NotAvailableError(
            f"in {name} flashinfer needs a GPU of compute capability {oldest[0]}.{oldest[1]}, this "
            f"one has {capability[0]}.{capability[1]}"
        )
    return flashinfer_package.load()
