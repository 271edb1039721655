"""How much memory this process may use: the tightest cgroup limit, else the machine's RAM.

Owns the reading of /proc and /sys, under a root that tests replace. Knows nothing of models.
"""

from pathlib import Path, PurePosixPath

# cgroup v1 writes a huge page-aligned number where v2 writes "max".
UNLIMITED = 1 << 60


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes. Limits of enclosing groups count too; in a container the namespace hides them, and its own is the root."""
    ram = _ram(root / "proc/meminfo")
    return min([ram, *(limit for limit in _limits(root) if 0 < limit < UNLIMITED)])


def _ram(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no MemTotal")


def _limits(root: Path) -> list[int]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[int] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            found += _number(mount / group / name)
    return found


def _number(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # a group outside the namespace, or the root group, which has no limit file
        return []
    return [int(text)] if text.isdigit() else []
