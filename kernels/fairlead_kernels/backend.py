"""Which kernels a process runs on: picked once, at start, and logged.

Owns the choice and its reason. A faster backend is one more entry in ``pick``; nothing else chooses
by device type.
"""

from dataclasses import dataclass

import torch

from fairlead_kernels.attention import AttentionBackend, Heads
from fairlead_kernels.torch_attention import TorchAttention


@dataclass(frozen=True, slots=True, eq=False)
class BackendChoice:
    """The attention backend of this process and the reason for it."""

    attention: AttentionBackend
    reason: str

    def __str__(self) -> str:
        return f"attention: {self.attention.name} ({self.reason})"


def pick(heads: Heads, device: torch.device) -> BackendChoice:
    """The backend for a model with these heads on this device. Plain torch runs on every device."""
    threads = torch.get_num_threads()
    target = (
        f"{threads} CPU threads" if device.type == "cpu" else f"{device.type}, portable kernels"
    )
    return BackendChoice(TorchAttention(heads, device), f"plain torch on {target}")
