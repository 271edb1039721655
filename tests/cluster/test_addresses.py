"""Each pod has its own address, also when the tests run without rights; where that is impossible,
the run fails at once.
"""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.harness import addresses

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
# Without the right to configure network devices, like any user except root.
POWERLESS = (
    shutil.which("setpriv") or "setpriv",
    "--bounding-set=-net_admin",
    "--inh-caps=-net_admin",
    "--",
)


@pytest.mark.usefixtures("pod_addresses")
def test_two_pods_listen_on_the_same_port() -> None:
    first, second = addresses.take(), addresses.take()
    try:
        with (
            socket.create_server((first, 0)) as one,
            socket.create_server((second, one.getsockname()[1])) as two,
        ):
            assert one.getsockname()[1] == two.getsockname()[1]
    finally:
        addresses.release(first)
        addresses.release(second)
    with pytest.raises(OSError, match="Cannot assign"):
        socket.create_server((first, 0))


@pytest.mark.usefixtures("pod_addresses")
def test_an_address_of_another_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = addresses.take()
    number = int(theirs.split(".")[2]) * 250 + int(theirs.split(".")[3]) - 1
    monkeypatch.setattr(addresses, "_numbers", itertools.count(number))
    ours = addresses.take()
    try:
        assert ours != theirs
    finally:
        addresses.release(ours)
        addresses.release(theirs)


def pytest_of_that_test(prefix: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    test = f"{Path(__file__).relative_to(ROOT)}::{test_two_pods_listen_on_the_same_port.__name__}"
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    clean = {name: value for name, value in os.environ.items() if name != addresses.MARK}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**clean, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_rights_the_tests_run_again_in_a_namespace_of_their_own_or_fail() -> None:
    allowed = subprocess.run(
        [*POWERLESS, *addresses.inside(["true"])], capture_output=True, check=False
    )
    done = pytest_of_that_test(POWERLESS)
    if allowed.returncode == 0:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout
    else:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert addresses.FIX in done.stderr


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PATH": "/nowhere"}, "neither here nor in a namespace of the tests' own"),
        ({addresses.MARK: "1"}, "even in a namespace of the tests' own"),
    ],
    ids=["no unshare", "no rights inside"],
)
def test_without_addresses_no_test_runs_and_the_error_names_the_fix(
    environ: dict[str, str], message: str
) -> None:
    done = pytest_of_that_test(POWERLESS, **environ)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert message in done.stderr
    assert addresses.FIX in done.stderr
    assert "passed" not in done.stdout


@pytest.mark.parametrize("inside_already", [True, False])
@pytest.mark.parametrize("unshare", [True, False])
def test_with_rights_the_tests_run_here(inside_already: bool, unshare: bool) -> None:
    assert (
        addresses.where_to_run(add=True, inside_already=inside_already, unshare=unshare) == "here"
    )
