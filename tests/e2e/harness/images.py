"""Images: where those of `make images` lie, and one that the tests make themselves."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

PAUSE = "docker.io/fairlead-tests/pause:1"
FOLDER = "IMAGES_OUT"
MADE = ("operator.tar", "runtime.tar")


class NoImagesError(RuntimeError):
    """The archives of the project's images are not there."""


def archives() -> list[Path]:
    """The archives that `make images` wrote to the folder IMAGES_OUT. Raises NoImagesError."""
    folder = Path(os.environ.get(FOLDER, "") or "build/images").resolve()
    paths = [folder / name for name in MADE]
    if lacking := [path.name for path in paths if not path.is_file()]:
        raise NoImagesError(f"{folder} lacks {', '.join(lacking)}: run `make images` first")
    return paths


def write_archive(path: Path, name: str, program: Path) -> None:
    """Write a docker-archive of one layer: a static program that runs as nobody."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        entry = tarfile.TarInfo(program.name)
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            files.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    contents = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer.getvalue(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(path, "w") as archive:
        for file, data in contents.items():
            entry = tarfile.TarInfo(file)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
