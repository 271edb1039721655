"""Errors after which a device computes nothing any more.

An illegal address or a failed assertion ends the process's context on a GPU: each later call fails
as well, and no batch without the row at fault would succeed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fairlead_runtime.models.model_error import first_line
from fairlead_runtime.scheduling.plan import DeviceLostError


@contextmanager
def lost_device(device: torch.device) -> Iterator[None]:
    """Raise DeviceLostError in place of an accelerator's error that lasts. One that does not, a
    launch with arguments that the device refuses, goes on as it is.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if not is_lost(device):
            raise
        reason = f"{device} can compute nothing any more: {first_line(error)}"
        raise DeviceLostError(reason) from error


def is_lost(device: torch.device) -> bool:
    """Whether the device computes nothing any more: then it refuses to wait, too."""
    try:
        torch.accelerator.synchronize(device)
    except torch.AcceleratorError:
        return True
    return False
