"""The tests of a GPU: without one each fails by name, and a run ends in time.

`make gpu` says in FAIRLEAD_MINUTES how long a run may take. Tests that would start in the last of
them fail without running, with the way to go on. What compiles longest comes last.
"""

import os
import time

import pytest
import torch

VARIABLE = "FAIRLEAD_MINUTES"
SPARE = 1.0  # minutes for the test that runs when no other may start
# On flashinfer's kernels, which compile for minutes.
LAST = (
    "test_experts_on_gpu.py",
    "test_decodes_on_gpu.py",
    "test_models_on_gpu.py",
    "test_flashinfer_on_gpu.py",
)
BEGAN = time.monotonic()


def why_not(gpu: bool, minutes: str, seconds: float) -> str:
    """Why a test does not start after so many seconds of a run; empty where it does."""
    if not gpu:
        return "these tests need an NVIDIA GPU, and torch sees none"
    if not minutes or seconds <= (float(minutes) - SPARE) * 60:
        return ""
    return (
        f"not run: the {minutes} minutes of this run are over. Run it again, which goes on with "
        "what was compiled, with MINUTES=N for more of them, or with TESTS=FILE"
    )


@pytest.fixture(autouse=True)
def _gpu_and_time() -> None:
    seconds = time.monotonic() - BEGAN
    if reason := why_not(torch.cuda.is_available(), os.environ.get(VARIABLE, ""), seconds):
        pytest.fail(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LAST, start=1)}
    items.sort(key=lambda item: place.get(item.path.name, 0))  # the order of the others stays
