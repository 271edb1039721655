"""Settings of the whole suite: properties without deadlines, OpenMP without spinning, no more
threads than cores when workers of pytest-xdist share them, and Triton's kernels in its interpreter.

A deadline would test how busy the machine is. Threads that spin while they wait make small models
crawl when two test processes share the cores; OpenMP reads this when torch is first imported.
Triton reads its setting when it is first imported; `make gpu` sets 0.
"""

import os

import pytest
from hypothesis import settings

from support.heap import Heap
from support.times import Times

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRITON_INTERPRET", "1")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

settings.register_profile("fairlead", deadline=None, print_blob=True)
settings.load_profile("fairlead")


# What takes minutes begins, so that at the end of a run no worker has much more left than another.
LONGEST = (
    "test_token_equality.py",
    "test_planted_bugs.py",
    "test_whole_run.py",
    "test_plan_and_start.py",
    "test_fused_layers.py",
    "test_starts.py",
    "test_scale.py",
    "test_faults_outage.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torchless", action="store_true", help="skip what imports torch or transformers"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a value of FAIRLEAD_FULL that has no meaning before any test runs, and time the tests
    in the process that reports them.
    """
    try:
        import support.full  # noqa: F401 - reads the variable
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Heap())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(getattr(config.option, "numprocesses", None) or 1))
    if config.option.torchless:
        from support.torchless import refuse_torch

        refuse_torch()
