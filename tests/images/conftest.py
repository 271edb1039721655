"""The archives of `make images`, read once. Run by `make test-images`."""

import os
import shutil
from pathlib import Path

import pytest

from support.image_archive import RUNC, Archive

ROOT = Path(__file__).parents[2]
FOLDER = "IMAGES_OUT"


def archive(name: str, *, required: bool = True) -> Archive:
    """The image's archive. Where IMAGES_OUT is set the lack of a required one is an error, else it
    is a reason to skip.
    """
    path = Path(os.environ.get(FOLDER) or ROOT / "build/images") / f"{name}.tar"
    if not path.is_file():
        if not required:
            pytest.skip(f"NOT CHECKED: {path} is missing: run `make images NAMES={name}`")
        lacking = f"{path} is missing: run `make images`"
        (pytest.fail if os.environ.get(FOLDER) else pytest.skip)(lacking)
    return Archive(path)


@pytest.fixture(scope="session")
def operator() -> Archive:
    return archive("operator")


@pytest.fixture(scope="session")
def runtime() -> Archive:
    return archive("runtime")


@pytest.fixture(scope="session")
def runtime_cuda() -> Archive:
    """No part of what `make images` builds unasked: it takes an hour and a half and 20 GB. Of the
    workflows only that of a release builds it.
    """
    return archive("runtime-cuda", required=False)


@pytest.fixture(params=["operator", "runtime", "runtime_cuda"])
def image(request: pytest.FixtureRequest) -> Archive:
    """Each of the images."""
    found: Archive = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def runner() -> None:
    """What starting a container needs."""
    lacking = ["root"] if os.geteuid() else []
    lacking += [] if shutil.which(RUNC) else [RUNC]
    if lacking:
        wanted = f"starting a container needs {' and '.join(lacking)}"
        (pytest.fail if os.environ.get(FOLDER) else pytest.skip)(wanted)


def unpacked(image: Archive, folders: pytest.TempPathFactory) -> Path:
    """A root file system of the image."""
    folder = folders.mktemp("root")
    image.unpack(folder)
    return folder


@pytest.fixture(scope="session")
def operator_root(
    runner: None, operator: Archive, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return unpacked(operator, tmp_path_factory)


@pytest.fixture(scope="session")
def runtime_root(runner: None, runtime: Archive, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(runtime, tmp_path_factory)


@pytest.fixture(scope="session")
def runtime_cuda_root(
    runner: None, runtime_cuda: Archive, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return unpacked(runtime_cuda, tmp_path_factory)
