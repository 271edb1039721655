"""Which kernels a process runs on: picked once, at start, and logged.

Owns the choice and its reason. A faster backend is one more entry in ``pick``; nothing else chooses
by device type.
"""

from dataclasses import dataclass

import torch

from fairlead_kernels import cpu
from fairlead_kernels.attention import AttentionBackend, Heads
from fairlead_kernels.cpu import CpuOperations
from fairlead_kernels.cpu_attention import CpuAttention
from fairlead_kernels.layer import LayerOperations
from fairlead_kernels.library import NotAvailableError
from fairlead_kernels.torch_attention import TorchAttention


@dataclass(frozen=True, slots=True, eq=False)
class BackendChoice:
    """The kernels of this process and the reason for them. ``operations`` are those of fused
    layers; None: the model's own code computes its layers.
    """

    attention: AttentionBackend
    operations: LayerOperations | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.attention.name} ({self.reason})" if self.reason else self.attention.name


def pick(heads: Heads, device: torch.device, kernels: str = "auto") -> BackendChoice:
    """The kernels for a model with these heads on this device: with ``auto`` the fastest, ``cpu``
    those in C++, with ``torch`` plain torch, which runs on every device.

    Raises NotAvailableError when ``cpu`` is asked for and ``cpu_operations`` raises it.
    """
    reason = ""
    if kernels != "torch":
        try:
            operations = cpu_operations(device.type, heads.dtype)
        except NotAvailableError as error:
            if kernels == "cpu":
                raise
            reason = f"; no C++ kernels: {error}"
        else:
            return BackendChoice(CpuAttention(heads, operations.library), operations)
    target = (
        f"{torch.get_num_threads()} CPU threads"
        if device.type == "cpu"
        else f"{device.type}, portable kernels"
    )
    attention = TorchAttention(heads, device)
    return BackendChoice(attention, None, f"plain torch on {target}{reason}")


def cpu_operations(device: str, dtype: torch.dtype) -> CpuOperations:
    """The C++ kernels for a model of this type on a device of this kind. Raises NotAvailableError
    with the reason where they cannot serve it.
    """
    if device != "cpu":
        raise NotAvailableError(f"the model runs on {device}")
    if dtype is not torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise NotAvailableError(f"they compute in float32, the model in {name}")
    return cpu.load()
