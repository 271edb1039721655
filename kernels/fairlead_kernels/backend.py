"""Which kernels a process runs on: picked once, at start, and said aloud.

Owns the choice and its reason. A faster backend joins by one entry in ``pick``; nothing else asks
for the device type.
"""

from dataclasses import dataclass

import torch

from fairlead_kernels.attention import AttentionBackend, Heads
from fairlead_kernels.torch_attention import TorchAttention


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The attention backend of this process and why it is that one."""

    attention: AttentionBackend
    why: str

    def __str__(self) -> str:
        return f"attention: {self.attention.name} ({self.why})"


def pick(heads: Heads, device: torch.device) -> Choice:
    """The backend for a model with these heads on this device. Plain torch serves every device
    there is.
    """
    threads = torch.get_num_threads()
    what = f"{threads} CPU threads" if device.type == "cpu" else f"{device.type}, portable kernels"
    return Choice(TorchAttention(heads, device), f"plain torch on {what}")
