"""The sandbox by itself, from outside: the machine stays as it is, also after a kill, and two runs
do not meet.

These tests run on the machine, before `make e2e` enters a sandbox for the others.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness.apiclient import eventually
from e2e.harness import sandbox

pytestmark = pytest.mark.e2e_machine
TESTS = Path(__file__).parents[1]
# What a node does to its machine, in one line each.
CHANGES = """
ip link add flnode0 type bridge && ip address add 10.250.0.1/32 dev flnode0
ip link set flnode0 up && ip route add 10.96.0.0/16 dev flnode0
nft add table ip kube-proxy
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 77 > /proc/sys/kernel/panic && test "$(cat /proc/sys/kernel/panic)" = 77
mkdir -p /var/lib/kubelet/device-plugins /var/log/containers /run/containerd
mount -t tmpfs tmpfs /mnt
for g in /sys/fs/cgroup /sys/fs/cgroup/*; do test -e $g/cgroup.procs && mkdir $g/kubepods; done
hostname somebody-else
"""


def start(script: str) -> "subprocess.Popen[str]":
    """A shell inside a new sandbox that stops at the first failing line."""
    return subprocess.Popen(
        [sys.executable, "-m", "e2e.harness.sandbox", "sh", "-ec", script],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def changed() -> Iterator["subprocess.Popen[str]"]:
    """A sandbox that has made its changes and waits for its input to end."""
    process = start(CHANGES + "echo changed\ncat")
    assert process.stdout
    assert process.stdout.readline() == "changed\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def machine() -> dict[str, object]:
    """What a node could change on the machine."""
    settings = {**dict.fromkeys(sandbox.KERNEL_SETTINGS), "net/ipv4/ip_forward": None}
    return {
        "network": [told("ip", *kind.split()) for kind in ("-o link", "-o address", "route")],
        "rules": told("nft", "list", "tables"),
        "settings": {
            name: (Path("/proc/sys") / name).read_text()
            for name in settings
            if (Path("/proc/sys") / name).exists()
        },
        "mounts": [line for line in told("cat", "/proc/mounts").splitlines() if "fairl" in line],
        "folders": [
            path
            for path in ("/var/lib/kubelet", "/var/log/containers", "/run/containerd")
            if Path(path).exists()
        ],
        "name": os.uname().nodename,
    }


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def left_of(home: Path) -> list[Path]:
    """The folder and the control groups of a run, as far as they exist."""
    groups = [mount / home.name for mount in sandbox.hierarchies()]
    return [path for path in (home, *groups) if path.exists()]


def homes() -> set[Path]:
    return set(sandbox.RUNS.glob(sandbox.PREFIX + "*"))


def test_the_machine_stays_as_it_is_while_a_sandbox_changes_everything_and_after() -> None:
    before, runs = machine(), homes()
    with changed() as process:
        assert machine() == before
        (home,) = homes() - runs
        assert len(left_of(home)) == 1 + len(sandbox.hierarchies())
        process.communicate("")
        assert process.returncode == 0
    assert left_of(home) == []
    assert machine() == before


def test_after_a_kill_everything_inside_ends_and_the_next_run_removes_what_is_left() -> None:
    before, runs = machine(), homes()
    with changed() as process:
        (home,) = homes() - runs
        inside = pids_of(home)
        assert inside
        process.kill()
    eventually(lambda: not pids_of(home), 20, "every process inside has ended")
    assert machine() == before
    assert left_of(home), "nothing was left, so the next assertion would show nothing"

    subsequent = start("true")
    subsequent.communicate("")
    assert subsequent.returncode == 0
    assert left_of(home) == []


def test_an_interrupted_run_cleans_up_after_itself() -> None:
    before, runs = machine(), homes()
    with changed() as process:
        (home,) = homes() - runs
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert left_of(home) == []
    assert machine() == before


def test_two_runs_side_by_side_have_the_same_addresses_and_do_not_meet() -> None:
    runs = homes()
    with changed() as one, changed() as other:
        assert len(homes() - runs) == 2
        for process in (one, other):
            process.communicate("")
            assert process.returncode == 0
    assert homes() == runs


def test_the_exit_code_of_the_command_comes_out() -> None:
    process = start("exit 7")
    process.communicate("")
    assert process.returncode == 7


def test_without_root_the_message_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(sandbox.NoSandboxError, match=r"missing: root \("):
        sandbox.run(["true"])


def test_without_the_programs_the_message_names_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "PLUGINS", tmp_path)
    monkeypatch.setattr(sandbox, "NEEDED", {"no-such-program": "no-such-package"})
    with pytest.raises(
        sandbox.NoSandboxError, match=r"containernetworking-plugins.*no-such-package"
    ):
        sandbox.run(["true"])


def pids_of(home: Path) -> list[str]:
    """The processes in the run's control groups."""
    pids: list[str] = []
    for mount in sandbox.hierarchies():
        for path in (mount / home.name).rglob("cgroup.procs"):
            pids += path.read_text().split()
    return pids
