"""The memory and the CPUs that this process may use, by the tightest cgroup limit or else the
machine, the RAM that it uses now, its age, and whether it sees an NVIDIA device.

Owns the reading of /dev, /proc and /sys, under a root that tests replace.
"""

import os
import time
from pathlib import Path, PurePosixPath

# For no limit, cgroup v1 writes a huge page-aligned number and v2 writes "max".
UNLIMITED = 1 << 60


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes. The limits of enclosing cgroups count, too; in a container the cgroup namespace hides
    them, and the container's own cgroup is the root.
    """
    ram = _ram(root / "proc/meminfo")
    names = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2 and v1
    limits = [
        n for folder in _cgroups(root, "memory") for name in names for n in _number(folder / name)
    ]
    return min([ram, *(limit for limit in limits if 0 < limit < UNLIMITED)])


def has_nvidia_device(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver lets this process, or its container, use a device."""
    return (root / "dev/nvidiactl").exists()


def cpu_limit(root: Path = Path("/"), cpus: int | None = None) -> int:
    """Threads that can run at once, at least 1. ``cpus`` replaces the process's CPU affinity.

    A CPU limit is a share of time, not a number of cores: more threads than it allows only cause
    throttling.
    """
    usable = len(os.sched_getaffinity(0)) if cpus is None else cpus
    quotas = [quota for folder in _cgroups(root, "cpu") for quota in _quota(folder)]
    return max(1, min([usable, *(round(quota + 0.49) for quota in quotas)]))


def process_age(root: Path = Path("/")) -> float:
    """Seconds since this process started, including the interpreter's start and the imports."""
    # The process name may contain blanks and parentheses. After its last parenthesis comes field 3,
    # the state; the start time is field 22.
    fields = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process uses now."""
    pages = (root / "proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _quota(folder: Path) -> list[float]:
    """The CPU limit of one cgroup, v2 or v1, in CPUs; empty where it has none."""
    try:
        words = (folder / "cpu.max").read_text().split()
    except OSError:
        words = []
    if len(words) == 2 and words[0].isdigit():
        return [int(words[0]) / int(words[1])]
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return [quota[0] / period[0]] if quota and period and period[0] else []


def _ram(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no MemTotal")


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and of the enclosing ones, v2 or v1."""
    try:
        cgroups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in cgroups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.is_dir():  # cpu,cpuacct is often mounted through a link named cpu
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        cgroup_path = PurePosixPath(path.lstrip("/"))
        folders += [mount / cgroup for cgroup in (cgroup_path, *cgroup_path.parents)]
    return folders


def _number(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # a cgroup outside the namespace, or the root cgroup, which has no such file
        return []
    return [int(text)] if text.isdigit() else []
