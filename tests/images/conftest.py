"""The archives of `make images`, read once. Run by `make test-images`."""

import os
import shutil
from pathlib import Path

import pytest

from support.image_archive import RUNC, Archive

ROOT = Path(__file__).parents[2]
FOLDER = "IMAGES_OUT"


def archive(name: str) -> Archive:
    """The image's archive. Where IMAGES_OUT is set its lack is an error, else a reason to skip."""
    path = Path(os.environ.get(FOLDER) or ROOT / "build/images") / f"{name}.tar"
    if not path.is_file():
        lacking = f"{path} is missing: run `make images`"
        (pytest.fail if os.environ.get(FOLDER) else pytest.skip)(lacking)
    return Archive(path)


@pytest.fixture(scope="session")
def operator() -> Archive:
    return archive("operator")


@pytest.fixture(scope="session")
def runtime() -> Archive:
    return archive("runtime")


@pytest.fixture(params=["operator", "runtime"])
def image(request: pytest.FixtureRequest) -> Archive:
    """Each of the two images."""
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


@pytest.fixture(scope="session")
def operator_root(
    runner: None, operator: Archive, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("operator")
    operator.unpack(folder)
    return folder


@pytest.fixture(scope="session")
def runtime_root(runner: None, runtime: Archive, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    runtime.unpack(folder)
    return folder
