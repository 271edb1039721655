"""The first process of a sandbox: makes its mounts and its loopback device, runs one command,
and reaps every process whose parent ended.

The command's exit code becomes its own; then the kernel ends all other processes inside.
"""

import os
import subprocess
import sys
from pathlib import Path

from e2e.harness.sandbox import ADDRESS, CGROUPS, HOME, KERNEL_SETTINGS, WRITTEN


def main() -> int:
    home = Path(os.environ[HOME])
    groups = _groups_of_the_machine()
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    _mount_groups(groups)
    _mount("tmpfs", "/run", "tmpfs", "mode=755")
    for folder in WRITTEN:
        _copy_on_write(folder, home / folder.strip("/").replace("/", "-"))
    _stand_in_for_kernel_settings(home / "kernel-settings")
    _ask_only_the_cluster_for_names(home / "nameserver.conf")
    subprocess.run(["hostname", "node"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    child = subprocess.Popen(sys.argv[1:])
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _groups_of_the_machine() -> list[list[str]]:
    """[name, type, options] of each hierarchy, read before /sys is hidden."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [
        [str(Path(mount[1]).relative_to(CGROUPS)), mount[2], mount[3]]
        for mount in mounts
        if mount[2] in {"cgroup", "cgroup2"}
    ]


def _mount_groups(groups: list[list[str]]) -> None:
    """The same hierarchies again: in a control group namespace each begins at the own group."""
    if groups[0][0] != ".":
        _mount("tmpfs", str(CGROUPS), "tmpfs", "mode=755")
    for name, kind, options in groups:
        target = CGROUPS / name
        target.mkdir(exist_ok=True)
        controllers = [o for o in options.split(",") if o not in _PLAIN_OPTIONS]
        if any(option.startswith("name=") for option in controllers):
            controllers.insert(0, "none")
        _mount("cgroup", str(target), kind, ",".join(controllers))


_PLAIN_OPTIONS = {
    "rw",
    "ro",
    "relatime",
    "nosuid",
    "nodev",
    "noexec",
    "nsdelegate",
    "memory_recursiveprot",
    "xattr",
}


def _copy_on_write(folder: str, changes: Path) -> None:
    """A mount over the folder that keeps its changes in ``changes``."""
    upper, work = changes / "upper", changes / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    _mount("overlay", folder, "overlay", f"lowerdir={folder},upperdir={upper},workdir={work}")


def _stand_in_for_kernel_settings(folder: Path) -> None:
    """A file in the place of each setting: a kubelet finds what it wants and changes nothing."""
    for name, value in KERNEL_SETTINGS.items():
        stand_in = folder / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(value + "\n")
        subprocess.run(["mount", "--bind", str(stand_in), f"/proc/sys/{name}"], check=True)


def _ask_only_the_cluster_for_names(file: Path) -> None:
    file.write_text(f"nameserver {ADDRESS}\n")
    used = Path("/etc/resolv.conf").resolve()
    if not used.exists():  # it was below /run, which is empty now
        used.parent.mkdir(parents=True, exist_ok=True)
        used.touch()
    subprocess.run(["mount", "--bind", str(file), str(used)], check=True)


def _mount(source: str, target: str, kind: str, options: str = "") -> None:
    more = ["-o", options] if options else []
    subprocess.run(["mount", "-t", kind, *more, source, target], check=True)


if __name__ == "__main__":
    sys.exit(main())
