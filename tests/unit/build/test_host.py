"""The memory and CPU limits of the process and its age, read from fake trees of files."""

import os
import time
from pathlib import Path

import pytest

from fairlead_runtime.build.host import cpu_limit, has_nvidia_device, memory_limit, process_age

RAM = "MemFree: 12 kB\nMemTotal:       8388608 kB\n"
GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": RAM, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/kubepods/pod1/c1\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 8 * GIB),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/memory.max": "2147483648\n"}, 2 * GIB),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/memory.max": "max\n"}, 8 * GIB),
        (
            V2
            | {
                "sys/fs/cgroup/kubepods/pod1/c1/memory.max": "4294967296\n",
                "sys/fs/cgroup/kubepods/memory.max": "1073741824\n",
            },
            GIB,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "3221225472\n"}, 3 * GIB),
        (V2 | {"sys/fs/cgroup/memory.max": "3221225472\n"}, 3 * GIB),
        (V1 | {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "1073741824\n"}, GIB),
        (V1 | {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * GIB),
        (V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"}, GIB),
        (V2 | {"sys/fs/cgroup/memory.max": str(99 * GIB)}, 8 * GIB),
    ],
    ids=[
        "ram",
        "v2",
        "v2-max",
        "v2-parent",
        "v2-namespace",
        "v2-hidden",
        "v1",
        "v1-unlimited",
        "v1-hidden",
        "above-ram",
    ],
)
def test_the_tightest_memory_limit_counts(
    tmp_path: Path, files: dict[str, str], limit: int
) -> None:
    assert memory_limit(tree(tmp_path, files)) == limit


def test_this_machine_has_a_memory_limit() -> None:
    assert memory_limit() > 64 << 20


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 8),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "400000 100000\n"}, 4),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "150000 100000\n"}, 2),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "50000 100000\n"}, 1),
        (V2 | {"sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "max 100000\n"}, 8),
        (V2 | {"sys/fs/cgroup/kubepods/cpu.max": "300000 100000\n"}, 3),
        (V2 | {"sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
    ids=[
        "none",
        "v2",
        "v2-part",
        "v2-half",
        "v2-max",
        "v2-parent",
        "above-cpus",
        "v1",
        "v1-link",
        "v1-none",
    ],
)
def test_threads_follow_the_tightest_cpu_limit(
    tmp_path: Path, files: dict[str, str], limit: int
) -> None:
    assert cpu_limit(tree(tmp_path, files), cpus=8) == limit


def test_this_machine_runs_at_least_one_thread() -> None:
    assert cpu_limit() >= 1


def test_the_process_age_is_right_for_any_process_name(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    started = (time.clock_gettime(time.CLOCK_BOOTTIME) - 12.5) * os.sysconf("SC_CLK_TCK")
    fields = ["S", *["0"] * 18, str(int(started)), *["0"] * 30]
    (tmp_path / "proc/self/stat").write_text(f"42 (a ) name (S 9 9) {' '.join(fields)}\n")
    assert process_age(tmp_path) == pytest.approx(12.5, abs=0.5)
    assert 0 < process_age() < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_device_is_seen_by_its_drivers_file(tmp_path: Path) -> None:
    assert not has_nvidia_device(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert has_nvidia_device(tmp_path)
