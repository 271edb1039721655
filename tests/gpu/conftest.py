"""The tests of a GPU: without one each fails by name, and a run ends in time.

`make gpu` says in FAIRLEAD_MINUTES how long a run may take. Tests that would start in the last of
them are skipped, with the way to go on. What serves comes first.

Each test's end is a line of JSON, where the environment names a file for them. Once the GPU can
compute nothing any more no other test starts. On a CPU, where FAIRLEAD_TEST_DEVICE says so, the
tests that have a form for it are rehearsed.
"""

import os
import time

import pytest
import torch
from benchmarks.result_lines import append

from fairlead_runtime.device.step.lost_device import is_lost
from support.gpu_device import DEVICE, REHEARSAL

VARIABLE = "FAIRLEAD_MINUTES"
SPARE = 1.0  # minutes for the test that runs when no other may start
NO_GPU = "these tests need an NVIDIA GPU, and torch sees none"
INTERPRETED = "Triton's kernels would be interpreted: set TRITON_INTERPRET=0"
LOST = "the GPU can compute nothing any more"
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


def check_triton() -> None:
    """Fail the test that is about to start where Triton's kernels would not run on the GPU."""
    try:
        import triton
    except ImportError:
        return  # what needs it says so
    if triton.knobs.runtime.interpret:
        pytest.fail(INTERPRETED)


@pytest.fixture(autouse=True)
def _gpu_and_time(request: pytest.FixtureRequest) -> None:
    if not REHEARSAL:
        check_start(time.monotonic() - BEGAN)
        check_triton()
    elif not is_rehearsed(request.node):
        pytest.skip("no form of it runs on a CPU")


def is_rehearsed(test: pytest.Function) -> bool:
    """Whether a CPU can run a test: it says so, and for which parameters a CPU cannot."""
    marker = test.get_closest_marker("on_cpu")
    parameters = test.callspec.params.values() if hasattr(test, "callspec") else ()
    return marker is not None and not set(parameters) & set(marker.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))  # the order of others stays


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the line of a test: when it was called, or of what kept it from that or came after."""
    if report.when != "call" and report.passed:
        return
    append(
        report.nodeid,
        None if report.skipped else report.passed,
        seconds=report.duration,
        value=dict(report.user_properties) or None,
        error="" if report.passed else reason_of(report),
    )


def reason_of(report: pytest.TestReport) -> str:
    """The reason of a test that was skipped or failed."""
    if isinstance(report.longrepr, tuple):  # of one that was skipped: its file, line and reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """After an error of the GPU's that lasts, end the process: each later test would fail too."""
    error = call.excinfo.value if call.excinfo is not None else None
    while error is not None and not isinstance(error, torch.AcceleratorError):
        error = error.__cause__ or error.__context__
    if error is not None and is_lost(DEVICE):
        append(item.nodeid, ok=False, error=f"{LOST}: {error}")
        pytest.exit(f"{LOST}: {error}", returncode=4)
