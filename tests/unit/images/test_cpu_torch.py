"""Which PyTorch the runtime's image for CPUs gets (docker/install_runtime.sh)."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[3] / "docker"
SCRIPTS = (
    *("install_runtime.sh", "install.sh", "pip.sh", "fetch_cpu_torch.sh"),
    *("select_lock.py", "byte_code.py"),
)
PROJECT = """
[project]
name = "demo"
dependencies = []
optional-dependencies = {runtime = ["torch"], tracing = []}
"""
LOCK = """\
needed==1.0 \\
    --hash=sha256:{needed}
    # via torch
nvidia-cuda-runtime==1.0 \\
    --hash=sha256:{nvidia_cuda_runtime}
    # via torch
torch==2.15.0 \\
    --hash=sha256:{torch}
    # via demo (pyproject.toml)
"""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass


def make_wheel(index: Path, name: str, version: str) -> str:
    """A wheel with one module, on a page of the index; the wheel's hash."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


class Build:
    """The build's folder with a small lock, and two indexes: the packages' and PyTorch's own."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.venv = folder / "venv"
        build, self.bin = folder / "build", folder / "bin"
        build.mkdir()
        for script in SCRIPTS:
            shutil.copy(DOCKER / script, build)
        # The real ones need PyTorch and transformers; these say that they ran.
        (build / "trim_torch.py").write_text("print('trimmed')\n")
        (build / "keep_names.py").write_text("print('kept')\n")
        (build / "pyproject.toml").write_text(PROJECT)
        hashes = {
            name: make_wheel(folder / "packages", name, version)
            for name, version in {
                "needed": "1.0",
                "nvidia_cuda_runtime": "1.0",
                "torch": "2.15.0",
            }.items()
        }
        (build / "requirements.lock").write_text(LOCK.format(**hashes))
        self.sha256 = make_wheel(folder / "pytorch", "torch", "2.15.0+cpu")
        self.bin.mkdir()
        # The pip that a build makes itself, and what would install Debian packages.
        (folder / "pip" / "bin").mkdir(parents=True)
        for path, line in {
            folder / "pip" / "bin" / "pip": f'exec {sys.executable} -m pip "$@"',
            self.bin / "apt-get": f'echo "$@" >> {folder}/apt.log',
        }.items():
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),
            "PIP_INDEX_URL": f"{self.address}/packages",
            "PIP_RETRIES": "0",
            **variables,
        }
        command = ["sh", str(self.folder / "build/install_runtime.sh"), str(self.venv), "cpu"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def installed(self) -> set[str]:
        return {path.name.removesuffix(".dist-info") for path in self.venv.rglob("*.dist-info")}

    @property
    def installed_a_compiler(self) -> bool:
        return (self.folder / "apt.log").exists()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Build(tmp_path, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_without_an_index_the_cuda_build_of_the_lock_is_trimmed(build: Build) -> None:
    done = build.run()
    assert done.returncode == 0, done.stderr
    assert build.installed() == {"needed-1.0", "nvidia_cuda_runtime-1.0", "torch-2.15.0"}
    assert build.installed_a_compiler
    assert "trimmed" in done.stdout


def test_the_cpu_index_gives_its_build_of_the_locked_version(build: Build) -> None:
    done = build.run(TORCH_INDEX=f"{build.address}/pytorch", TORCH_SHA256=build.sha256)
    assert done.returncode == 0, done.stderr
    assert build.installed() == {"needed-1.0", "torch-2.15.0+cpu"}
    assert not build.installed_a_compiler


def test_a_wheel_with_another_hash_ends_the_build(build: Build) -> None:
    done = build.run(TORCH_INDEX=f"{build.address}/pytorch", TORCH_SHA256="0" * 64)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert build.installed() == set()


def test_an_index_without_its_hash_ends_the_build(build: Build) -> None:
    done = build.run(TORCH_INDEX=f"{build.address}/pytorch")
    assert done.returncode != 0
    assert "TORCH_INDEX needs TORCH_SHA256" in done.stderr
    assert build.installed() == set()


@pytest.mark.parametrize("index", ["http://127.0.0.1:1", "{address}/packages"])
def test_an_index_that_has_no_answer_is_said_and_the_cuda_build_is_trimmed(
    build: Build, index: str
) -> None:
    address = index.format(address=build.address)
    done = build.run(TORCH_INDEX=address, TORCH_SHA256=build.sha256)
    assert done.returncode == 0, done.stderr
    assert "the CUDA build is trimmed" in done.stderr
    assert build.installed() == {"needed-1.0", "nvidia_cuda_runtime-1.0", "torch-2.15.0"}
