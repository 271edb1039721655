"""An image in the tar file that `make images` writes (docker-archive), and containers of it."""

import json
import os
import stat
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

RUNC = "runc"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as the layers leave it."""

    mode: int
    layer: int
    size: int
    place: int  # of its content, in the archive
    uid: int

    @property
    def regular(self) -> bool:
        return stat.S_ISREG(self.mode)


class Archive:
    """What the tar file says about its one image. Paths in it have no leading slash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with tarfile.open(path) as archive:
            (self.manifest,) = json.load(_member(archive, "manifest.json"))
            self.config: dict[str, Any] = json.load(_member(archive, self.manifest["Config"]))

    @property
    def tags(self) -> list[str]:
        return list(self.manifest["RepoTags"])

    @property
    def layers(self) -> list[str]:
        """The digest of each layer's tar file, uncompressed, from the bottom to the top."""
        return list(self.config["rootfs"]["diff_ids"])

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.config["config"]["Env"])

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each layer's tar file."""
        with tarfile.open(self.path) as archive:
            return [archive.getmember(name).size for name in self.manifest["Layers"]]

    @cached_property
    def files(self) -> dict[str, Entry]:
        """Every path of the root file system. The Dockerfiles only add, so no layer removes one."""
        found: dict[str, Entry] = {}
        kinds = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK}
        for number, (start, layer) in enumerate(self._layers()):
            for member in layer:
                mode = member.mode | kinds.get(member.type, stat.S_IFREG)
                place = start + member.offset_data
                entry = Entry(mode, number, member.size, place, member.uid)
                found[member.name.strip("/")] = entry
        return found

    def read(self, path: str) -> bytes:
        entry = self.files[path]
        with self.path.open("rb") as archive:
            archive.seek(entry.place)
            return archive.read(entry.size)

    def unpack(self, folder: Path) -> None:
        folder.chmod(0o755)  # it becomes the root folder, which any user must be able to enter
        for _, layer in self._layers():
            layer.extractall(folder, filter="fully_trusted")

    def _layers(self) -> Iterator[tuple[int, tarfile.TarFile]]:
        """Each layer, and where in the archive its tar file starts."""
        with tarfile.open(self.path) as archive:
            for name in self.manifest["Layers"]:
                with tarfile.open(fileobj=_member(archive, name)) as layer:
                    yield archive.getmember(name).offset_data, layer


def _member(archive: tarfile.TarFile, name: str) -> Any:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(name)
    return member


@contextmanager
def container(
    archive: Archive,
    root: Path,
    bundle: Path,
    command: list[str],
    uid: int,
    shown: dict[str, Path] | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """The command in a container as a restricted pod has it: a read-only root, no capabilities, no
    new privileges, a network of its own, and only /tmp and /dev/shm to write to. ``shown``: folders
    of this machine, by where the container sees them, below /tmp.

    The container's name is the bundle's folder name. Standard output and error are one pipe.
    """
    config = archive.config["config"]
    bundle.mkdir(parents=True, exist_ok=True)
    writable = ["nosuid", "nodev", "mode=1777"]
    spec = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": 0},
            "args": command,
            "env": [*config["Env"], "OMP_WAIT_POLICY=passive"],
            "cwd": config.get("WorkingDir") or "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "pod",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
            *(
                {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": writable}
                for path in ("/dev/shm", "/tmp")
            ),
            *(
                {"destination": at, "type": "bind", "source": str(own), "options": ["rbind", "ro"]}
                for at, own in (shown or {}).items()
            ),
        ],
        "linux": {
            "cgroupsPath": f"/{bundle.name}",
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
        },
    }
    (bundle / "config.json").write_text(json.dumps(spec))
    process = subprocess.Popen(
        [RUNC, "run", "--bundle", str(bundle), bundle.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        subprocess.run([RUNC, "kill", bundle.name, "KILL"], capture_output=True, check=False)
        process.wait()
        subprocess.run([RUNC, "delete", "--force", bundle.name], capture_output=True, check=False)


def container_name() -> str:
    return f"fairlead-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def inside(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run one more command in a running container, as the user of its process."""
    return subprocess.run(
        [RUNC, "exec", name, *command], capture_output=True, text=True, check=False
    )
