"""How much memory and how many CPUs this process may use (the tightest cgroup limit, else the
machine's own), and its age.

Owns the reading of /proc and /sys, under a root that tests replace. Knows nothing of models.
"""

import os
import time
from pathlib import Path, PurePosixPath

# cgroup v1 writes a huge page-aligned number where v2 writes "max".
UNLIMITED = 1 << 60


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes. Limits of enclosing groups count too; in a container the namespace hides them, and its
    own is the root.
    """
    ram = _ram(root / "proc/meminfo")
    names = ("memory.max", "memory.limit_in_bytes")  # of version 2 and of version 1
    limits = [
        n for folder in _groups(root, "memory") for name in names for n in _number(folder / name)
    ]
    return min([ram, *(limit for limit in limits if 0 < limit < UNLIMITED)])


def cpu_limit(root: Path = Path("/"), cpus: int | None = None) -> int:
    """Threads that can run at once, at least 1. ``cpus`` is how many the scheduler may use, unset:
    as it says.

    A CPU limit is a share of time, not a number of cores: threads beyond it only get each other
    throttled.
    """
    usable = len(os.sched_getaffinity(0)) if cpus is None else cpus
    quotas = [quota for folder in _groups(root, "cpu") for quota in _quota(folder)]
    return max(1, min([usable, *(round(quota + 0.49) for quota in quotas)]))


def process_age(root: Path = Path("/")) -> float:
    """Seconds since this process was started, the interpreter's own start and imports included."""
    # The name may hold blanks and brackets; the state, field 3, follows its last bracket, the start
    # is field 22.
    fields = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _quota(folder: Path) -> list[float]:
    """CPUs that one group's limit is worth, by either version's files; empty where it has none."""
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


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's group and of those around it, in either version's hierarchy."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.is_dir():  # cpu,cpuacct is often reached through a link named cpu
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        found += [mount / group for group in (inside, *inside.parents)]
    return found


def _number(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # a group outside the namespace, or the root group, which has no limit file
        return []
    return [int(text)] if text.isdigit() else []
