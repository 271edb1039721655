"""The tests of a GPU: without one each fails by name, and a run ends in time.

`make gpu` says in FAIRLEAD_MINUTES how long a run may take. Tests that would start in the last of
them are skipped, with the way to go on. What serves comes first.
"""

import os
import time

import pytest
import torch

VARIABLE = "FAIRLEAD_MINUTES"
SPARE = 1.0  # minutes for the test that runs when no other may start
NO_GPU = "these tests need an NVIDIA GPU, and torch sees none"
# The path that `auto` takes, each with what it is built on before it.
FIRST = (
    "test_flashinfer_on_gpu.py",
    "test_decodes_on_gpu.py",
    "test_models_on_gpu.py",
    "test_engine_on_gpu.py",
    "test_experts_on_gpu.py",
)
BEGAN = time.monotonic()


def why_not(minutes: str, seconds: float) -> str:
    """Why a test does not start after so many seconds of a run; empty where it does."""
    if not minutes or seconds <= (float(minutes) - SPARE) * 60:
        return ""
    return (
        f"not run: the {minutes} minutes of this run are over. Run it again, which goes on with "
        "what was compiled, with MINUTES=N for more of them, or with TESTS=FILE"
    )


def check_start(seconds: float) -> None:
    """Fail the test that is about to start without a GPU, and skip it after so many seconds."""
    if not torch.cuda.is_available():
        pytest.fail(NO_GPU)
    if reason := why_not(os.environ.get(VARIABLE, ""), seconds):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _gpu_and_time() -> None:
    check_start(time.monotonic() - BEGAN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))  # the order of others stays
