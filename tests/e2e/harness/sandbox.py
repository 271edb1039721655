"""A place of its own for a cluster with a node: namespaces, a control group and one folder.

``python -m e2e.harness.sandbox COMMAND ...`` runs a command there as root. Inside, the network has
only a loopback device; mounts, processes, control groups and the host's name are its own; /run,
/var/lib and /var/log take changes that the machine never sees; and the settings of the kernel that
a kubelet writes are files that stand in for the kernel's own. When this process ends, however it
ends, the kernel ends every process inside and drops every mount and network device. What is left
after a SIGKILL is the folder and the empty control groups: the next run removes them.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.harness.controlplane import end_with_parent

HOME = "FAIRLEAD_E2E_HOME"  # set inside: the sandbox's folder
RUNS = Path("/var/tmp/fairlead-e2e")  # a folder on disk: images of gigabytes are unpacked there
ADDRESS = "10.250.0.1"  # of the node inside: names are looked up there
PREFIX = "fairlead-e2e-"
CGROUPS = Path("/sys/fs/cgroup")
# What a kubelet writes although it belongs to the whole machine, with what it wants to find.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# Folders of the machine that a node writes to: inside they are copies on write.
WRITTEN = ("/var/lib", "/var/log")
NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "ipset": "ipset",
    "ip": "iproute2",
    "unshare": "util-linux",
    "openssl": "openssl",
}
# A group shares the processors with the processes outside as if it were one process: a node runs a
# dozen, and about so many of them at a time.
BUSY = 4
PLUGINS = Path("/usr/lib/cni")
LACKING = "a node of Kubernetes cannot run here; missing: "


class NoSandboxError(RuntimeError):
    """This machine cannot run a node; the message says what is missing."""


def missing() -> list[str]:
    """What this machine lacks, in words; empty where a node can run."""
    lacks = [] if os.geteuid() == 0 else ["root (namespaces, mounts and control groups)"]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    packages = {package for name, package in NEEDED.items() if not shutil.which(name, path=path)}
    if not (PLUGINS / "bridge").is_file():
        packages.add("containernetworking-plugins")
    lacks += [f"the Debian package {package}" for package in sorted(packages)]
    if not hierarchies():
        lacks.append(f"control groups below {CGROUPS}, of version 1 or 2")
    return lacks


def hierarchies() -> list[Path]:
    """The mount points of the machine's control groups: one in version 2, several in version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(mount[1]) for mount in mounts if mount[2] in {"cgroup", "cgroup2"}]


def run(command: Sequence[str]) -> int:
    """Run the command inside a new sandbox; returns its exit code. Raises NoSandboxError."""
    if lacks := missing():
        raise NoSandboxError(LACKING + ", ".join(lacks))
    RUNS.mkdir(parents=True, exist_ok=True)
    remove_dead_runs()
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=RUNS))
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it back when this process ends
        try:
            return _run_inside(home, command)
        finally:
            _remove(home)


def remove_dead_runs() -> list[str]:
    """Remove what runs left whose process has ended; returns their names."""
    removed = []
    for home in sorted(RUNS.glob(PREFIX + "*")):
        # A run without its lock file is being made or removed right now.
        with contextlib.suppress(OSError), (home / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(home)
            removed.append(home.name)
    return removed


def _run_inside(home: Path, command: Sequence[str]) -> int:
    for group in _groups(home.name):
        _make_group(group)

    def join() -> None:
        end_with_parent(parent)()
        for group in _groups(home.name):
            (group / "cgroup.procs").write_text("0")

    parent = os.getpid()
    kinds = ("mount", "net", "pid", "ipc", "uts", "cgroup")
    process = subprocess.Popen(
        [
            "unshare",
            *(f"--{kind}" for kind in kinds),
            "--fork",
            "--kill-child=KILL",
            "--propagation=private",
            sys.executable,
            "-m",
            "e2e.harness.inside",
            *command,
        ],
        env={**os.environ, HOME: str(home)},
        preexec_fn=join,  # noqa: PLW1509 - system calls only, no lock taken
        start_new_session=True,
    )
    with _signals_to(process):
        return process.wait()


@contextlib.contextmanager
def _signals_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """SIGINT and SIGTERM end the inside first, so that this process can clean up after it."""

    def forward(_number: int, _frame: object) -> None:
        process.kill()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _groups(name: str) -> list[Path]:
    return [mount / name for mount in hierarchies()]


def _make_group(group: Path) -> None:
    group.mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):  # version 1: a new group has none
        share = group / name
        if share.exists() and not share.read_text().strip():
            share.write_text((group.parent / name).read_text())
    for name, one in (("cpu.shares", 1024), ("cpu.weight", 100)):  # versions 1 and 2
        with contextlib.suppress(OSError):
            (group / name).write_text(str(BUSY * one))


def _remove(home: Path) -> None:
    """End what still runs in the run's control groups, then remove them and the folder."""
    for group in _groups(home.name):
        _remove_group(group)
    shutil.rmtree(home, ignore_errors=True)


def _remove_group(top: Path) -> None:
    """Remove a control group and those below it; ends the processes in them."""
    deadline = time.monotonic() + 20
    while top.is_dir():
        groups = [top, *(path for path in top.rglob("*") if path.is_dir())]
        for group in sorted(groups, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                group.rmdir()
        if time.monotonic() > deadline:
            raise NoSandboxError(f"processes in {top} do not end")
        time.sleep(0.02)


def main() -> int:
    try:
        return run(sys.argv[1:])
    except NoSandboxError as error:
        print(f"[e2e] {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
