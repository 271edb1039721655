"""scripts/gpu_python.py: all that a Python lacks is said in one message, wheels are unpacked, and
the program runs with the project found by its path.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import conftest as gpu_conftest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import gpu_python

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "scripts" / "gpu_python.py"


def run(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, str(PROGRAM), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_that_has_nothing_is_told_of_everything_at_once() -> None:
    ran = run("--", "-c", "print('ran')", flags=("-S", "-E"))
    assert (ran.returncode, ran.stdout) == (2, "")
    for need in gpu_python.NEEDS:
        assert f"  {need.distribution}" in ran.stderr
        assert f"({need.why})" in ran.stderr
    assert "torch>=2.11 (computes)" in ran.stderr


def test_a_missing_gpu_is_named_and_ends_it() -> None:
    ran = run("--", "-c", "print('ran')")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "missing:\n  an NVIDIA GPU: " in ran.stderr


def test_the_program_finds_the_project_and_the_wheels_without_an_installation(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_package/__init__.py", "VALUE = 5\n")
        archive.writestr("some_package-1.0.data/purelib/other_module.py", "VALUE = 6\n")
        archive.writestr(
            "some_package-1.0.dist-info/METADATA", "Name: some-package\nVersion: 1.0\n"
        )
        program = zipfile.ZipInfo("some_package/program")
        program.external_attr = 0o755 << 16
        archive.writestr(program, "#!/bin/sh\n")
    code = (
        "import some_package, other_module, fairlead_runtime, fairlead_kernels, sys;"
        "print(some_package.VALUE, other_module.VALUE, fairlead_runtime.__file__, sys.argv[1:])"
    )
    unpacked = tmp_path / "unpacked"
    options = ("--without-gpu", "--wheels", str(tmp_path), "--unpack", str(unpacked))
    ran = run(*options, "--", "-c", code, "--flag")
    assert ran.returncode == 0, ran.stderr
    package = ROOT / "runtime" / "fairlead_runtime" / "__init__.py"
    assert ran.stdout == f"5 6 {package} ['--flag']\n"
    assert os.access(unpacked / "some_package" / "program", os.X_OK)
    assert not os.access(unpacked / "some_package" / "__init__.py", os.X_OK)
    # What was compiled into it stays for the next run; other wheels make a new folder.
    (unpacked / "compiled.so").touch()
    gpu_python.unpack([tmp_path], unpacked)
    assert (unpacked / "compiled.so").exists()
    with zipfile.ZipFile(tmp_path / "b-1-py3-none-any.whl", "w") as archive:
        archive.writestr("b.py", "")
    gpu_python.unpack([tmp_path], unpacked)
    assert not (unpacked / "compiled.so").exists()
    assert (unpacked / "b.py").exists()


@pytest.mark.parametrize("name", ["", "nothing.whl", "text.txt"])
def test_a_path_that_is_no_wheel_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    with pytest.raises(ValueError, match="not a wheel, and no folder of wheels"):
        gpu_python.unpack([tmp_path / name], tmp_path / "unpacked")


def _version_of(found: str) -> Callable[[str], str]:
    return lambda _name: found


@pytest.mark.parametrize(
    ("found", "old"),
    [("2.11.0+cu130", False), ("2.11", False), ("2.15.1", False), ("2.9.1", True), ("1.13", True)],
)
def test_versions_are_those_of_pyproject(found: str, *, old: bool) -> None:
    needs = [need for need in gpu_python.NEEDS if need.module == "torch"]
    lacks = list(gpu_python.missing(needs, lambda _name: None, _version_of(found)))
    assert [what for _, what in lacks] == ([f"torch>=2.11: {found} is too old"] if old else [])


@pytest.mark.parametrize(
    ("module", "stops"), [("torch", True), ("transformers", True), ("pytest", False)]
)
def test_only_old_versions_of_what_computes_stop_a_run(module: str, *, stops: bool) -> None:
    needs = [need for need in gpu_python.NEEDS if need.module == module]
    ((need, what),) = gpu_python.missing(needs, lambda _name: None, _version_of("0.1"))
    assert need.some is not stops
    assert what.endswith("0.1 is too old")


def test_a_module_that_cannot_be_imported_says_why() -> None:
    def load(name: str) -> None:
        if name == "llguidance":
            raise ImportError("no libc")

    needs = [need for need in gpu_python.NEEDS if need.module in ("torch", "llguidance")]
    lacks = list(gpu_python.missing(needs, load, _version_of("99")))
    assert [need.module for need, _ in lacks] == ["llguidance"]
    text = gpu_python.message(lacks, "")
    assert "cannot be imported: ImportError: no libc (structured output)" in text


def test_what_takes_seconds_to_import_is_looked_for_and_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> None:
        assert name not in (
            "torch",
            "transformers",
            "triton",
            "flashinfer",
            "humming",
            "tvm_ffi",
        ), name

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "transformers" or None)
    lacks = list(gpu_python.missing(gpu_python.NEEDS, load, _version_of("99")))
    least = gpu_python.least_versions()["transformers"]
    assert [what for _, what in lacks] == [f"transformers>={least}"]


def test_every_need_with_a_version_is_one_of_pyproject() -> None:
    least = gpu_python.least_versions()
    without = {"triton", "apache-tvm-ffi"}  # of torch and of flashinfer
    assert {need.distribution for need in gpu_python.NEEDS} - set(least) == without


class Driver:
    """A driver that answers with ``code`` and sees ``count`` GPUs."""

    def __init__(self, code: int, count: int) -> None:
        self.code, self.count = code, count

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the driver's name
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - the driver's name
        count._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("cuda", "driver", "wrong"),
    [
        ("'13.0'", Driver(0, 1), ""),
        ("'13.0'", Driver(0, 0), "an NVIDIA GPU: its driver sees none"),
        ("'13.0'", Driver(100, 1), "an NVIDIA GPU: its driver answers with error 100"),
        ("'13.0'", None, "an NVIDIA GPU: no driver: libcuda.so.1: not there"),
        ("None", Driver(0, 1), "an NVIDIA GPU: torch 2.11.0 is built without CUDA"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said_without_torch(
    cuda: str, driver: Driver | None, wrong: str, tmp_path: Path
) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: not there")
        return driver

    lines = f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n"
    (tmp_path / "version.py").write_text(lines)
    assert gpu_python.no_gpu(tmp_path, load) == wrong


@pytest.mark.parametrize(
    ("minutes", "seconds", "starts"),
    [("", 10**6, True), ("10", 540, True), ("10", 541, False), ("2.5", 90, True), ("1", 1, False)],
)
def test_a_gpu_test_that_would_start_too_late_does_not_run(
    minutes: str, seconds: float, *, starts: bool
) -> None:
    reason = gpu_conftest.why_not(minutes, seconds)
    assert (reason == "") is starts
    assert starts or "MINUTES=N" in reason


@pytest.mark.parametrize(
    ("gpu", "seconds", "outcome"),
    [
        (False, 0, pytest.fail.Exception("torch sees none")),
        (True, 61, pytest.skip.Exception("MINUTES=N")),
    ],
)
def test_without_a_gpu_a_test_fails_and_without_time_it_is_skipped(
    gpu: bool, seconds: float, outcome: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv(gpu_conftest.VARIABLE, "2")
    with pytest.raises(type(outcome), match=str(outcome)):
        gpu_conftest.check_start(seconds)


def test_what_serves_is_tested_first() -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(gpu_conftest.FIRST) <= files
