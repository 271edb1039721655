"""Environments of their own for programs whose dependencies do not fit into ours."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.warm import make_once, warm_folder

ROOT = Path(__file__).parents[2]
FOLDER = warm_folder("environments")
UV = str(Path(sys.executable).parent / "uv")


def environment(
    *requirements: str,
    python: str = sys.executable,
    overrides: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Path:
    """The folder of the programs of a virtual environment with ``requirements``. It is made once
    and kept. ``python``: the program of the interpreter. ``overrides``: requirements in the place
    of those that the packages state. ``settings``: for the build of those that come as source.
    """
    of = sys.version if python == sys.executable else python
    wanted = (of, *requirements, *(f"override {each}" for each in overrides), *settings)
    name = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
    place = FOLDER / name

    def make() -> None:
        made = str(place / "bin" / "python")
        _run(UV, "venv", "--quiet", "--clear", "--python", python, str(place))
        (place / "overrides.txt").write_text("\n".join(overrides))
        install = (UV, "pip", "install", "--quiet", "--python", made)
        build = (f"--config-setting={each}" for each in settings)
        _run(*install, *build, "--override", str(place / "overrides.txt"), *requirements)

    make_once(place, make)
    return place / "bin"


def newer_python(version: str, wanted_by: str) -> str:
    """The program of Python ``version`` (such as 3.12), ours where it is that or newer. Skips the
    test where the machine has none, and says so.
    """
    if sys.version_info[:2] >= tuple(map(int, version.split("."))):
        return sys.executable
    found = subprocess.run(
        [UV, "python", "find", version], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"{wanted_by} needs Python {version}, and none that works is on the PATH")
    return found.stdout.strip()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def node_environment(package: str) -> Path:
    """A folder with the npm ``package`` installed, for programs that are copied into it. It is
    made once and kept.
    """
    place = FOLDER / hashlib.sha256(package.encode()).hexdigest()[:16]
    options = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(place))

    def make() -> None:
        place.mkdir(exist_ok=True)
        _run("npm", "install", *options, package)

    make_once(place, make)
    return place
