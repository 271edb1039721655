"""Environments of their own for clients and tools whose dependencies do not fit into ours."""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "environments"


def environment(*requirements: str) -> Path:
    """The folder of the programs of a virtual environment with ``requirements``. It is made once
    and kept.
    """
    name = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:16]
    place = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want the same one
        if not (place / ".ready").exists():
            uv = str(Path(sys.executable).parent / "uv")
            python = str(place / "bin" / "python")
            _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place))
            _run(uv, "pip", "install", "--quiet", "--python", python, *requirements)
            (place / ".ready").touch()
    return place / "bin"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def node_environment(package: str) -> Path:
    """A folder with the npm ``package`` installed, for programs that are copied into it. It is
    made once and kept.
    """
    place = FOLDER / hashlib.sha256(package.encode()).hexdigest()[:16]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            _run(
                "npm",
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--prefix",
                str(place),
                package,
            )
            (place / ".ready").touch()
    return place
