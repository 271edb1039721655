"""The device of the tests of a GPU: on a CPU they are rehearsed before a GPU is at hand, where they
have a form for it.
"""

import os

import torch

DEVICE = torch.device(os.environ.get("FAIRLEAD_TEST_DEVICE", "cuda"))
REHEARSAL = DEVICE.type == "cpu"
# The attention of models that flashinfer can serve; another where its own tests have failed.
KERNELS = "auto" if REHEARSAL else os.environ.get("FAIRLEAD_TEST_KERNELS", "flashinfer")
