"""The kernels that the CUDA image has compiled ahead, with a stand-in for flashinfer."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from compile_flashinfer import Module, architectures, main, read
from select_lock import entries

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
LIST = DOCKER / "flashinfer_modules.toml"
MACHINE_CODE, INTERMEDIATE = 2, 1


def container(*parts: tuple[int, int], version: int = 1) -> bytes:
    """GPU code as nvcc stores it: an entry for each kind and architecture."""
    body = b""
    for kind, architecture in parts:
        code = bytes(24)
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0")
        body += (header + struct.pack("<I", architecture)).ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(body)) + body


def test_the_architectures_of_a_library_are_those_of_its_machine_code() -> None:
    one = container((MACHINE_CODE, 80), (MACHINE_CODE, 90))
    assert architectures(b"\x7fELF" + bytes(13) + one + b"text" + one) == {80, 90}
    assert architectures(
        b"ELF" + container((MACHINE_CODE, 80)) + container((MACHINE_CODE, 90))
    ) == {
        80,
        90,
    }
    assert architectures(container((INTERMEDIATE, 90), (MACHINE_CODE, 80))) == {80}
    assert architectures(b"no GPU code") == set()


def test_the_number_of_a_container_in_other_bytes_is_none() -> None:
    assert architectures(container((MACHINE_CODE, 75), version=7)) == set()
    cut = container((MACHINE_CODE, 80), (MACHINE_CODE, 90))
    assert architectures(cut + container((MACHINE_CODE, 75), version=7) + bytes(40)) == {80, 90}


def test_a_list_is_every_combination_of_each_table_once(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    table = "[[attention]]\ndtype = {}\nhead_size = {}\nwindow = {}\nsoft_cap = [false]\n"
    text = table.format('["bfloat16"]', "[64, 128]", "[false, true]")
    text += table.format('["float16", "bfloat16"]', "[64]", "[true]")
    path.write_text('architectures = ["8.0"]\n' + text)
    targets, modules = read(path)
    assert targets == ["8.0"]
    assert len(modules) == len(set(modules)) == 5
    assert Module("float16", 64, window=True, soft_cap=False) in modules


def test_the_images_list_has_what_most_models_need_for_the_promised_gpus() -> None:
    targets, modules = read(LIST)
    assert {"8.0", "9.0a"} <= set(targets)
    assert {Module("bfloat16", size, window, soft_cap=False)
            for size in (64, 128) for window in (False, True)} <= set(modules)  # fmt: skip
    assert len({module.name for module in modules}) == len(modules)


class Flashinfer:
    """Stand-ins for what the script imports; `made` is what was compiled, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.library = container((MACHINE_CODE, 80), (MACHINE_CODE, 90))
        self.functions = {"plan", "ragged_run", "paged_run"}
        self.rename: Callable[[str], str] = lambda name: name
        self.made: list[str] = []
        modules: dict[str, dict[str, Any]] = {
            "flashinfer": {"aot": SimpleNamespace(gen_fa2=self.describe)},
            "flashinfer.jit": {"build_jit_specs": self.build},
            "tvm_ffi": {"load_module": lambda path: dict.fromkeys(self.functions, path)},
            "torch": {"bfloat16": "bfloat16"},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")

    def describe(
        self, q: str, kv: str, qk: int, vo: int, window: bool, soft_cap: bool, *, prefill_only: bool
    ) -> list[Any]:
        assert (q, qk, prefill_only) == (kv, vo, True)
        name = self.rename(Module(q, qk, window, soft_cap).name)
        path = self.folder / f"{name}.so"
        return [SimpleNamespace(name=name, get_library_path=lambda: path)]

    def build(self, specifications: list[Any], **_: object) -> None:
        for specification in specifications:
            self.made.append(specification.name)
            specification.get_library_path().write_bytes(self.library)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flashinfer:
    monkeypatch.setattr("sys.argv", ["compile_flashinfer.py", str(LIST), str(tmp_path / "aot")])
    built = tmp_path / "built"
    built.mkdir()
    return Flashinfer(monkeypatch, built)


def test_each_listed_module_lies_where_flashinfer_looks(
    flashinfer: Flashinfer, tmp_path: Path
) -> None:
    assert main() == 0
    names = [module.name for module in read(LIST)[1]]
    assert flashinfer.made == names
    found = sorted(path.relative_to(tmp_path / "aot") for path in tmp_path.glob("aot/*/*"))
    assert found == sorted(Path(name) / f"{name}.so" for name in names)
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == " ".join(read(LIST)[0])


def test_another_name_in_flashinfer_ends_the_build(flashinfer: Flashinfer) -> None:
    """A pod would look for the new name and not find it."""
    flashinfer.rename = lambda name: f"{name}_v2"
    with pytest.raises(SystemExit, match="flashinfer calls"):
        main()
    assert flashinfer.made == []


@pytest.mark.parametrize("code", [(80,), (80, 90, 100)])
def test_code_for_other_architectures_ends_the_build(
    flashinfer: Flashinfer, code: tuple[int, ...]
) -> None:
    flashinfer.library = container(*((MACHINE_CODE, number) for number in code))
    with pytest.raises(SystemExit, match="has code for"):
        main()


def test_a_module_without_its_functions_ends_the_build(flashinfer: Flashinfer) -> None:
    flashinfer.functions.remove("paged_run")
    with pytest.raises(KeyError, match="paged_run"):
        main()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The packages that docker/install_runtime.sh hands over to be installed for CUDA."""
    build = tmp_path_factory.mktemp("build")
    for path in (
        *(DOCKER / "install_runtime.sh", DOCKER / "select_lock.py", DOCKER / "byte_code.py"),
        *(DOCKER / "requirements-cuda.lock", ROOT / "requirements.lock", ROOT / "pyproject.toml"),
    ):
        (build / path.name).write_bytes(path.read_bytes())
    (build / "install.sh").write_text('cat > "$(dirname "$0")/given"\n')
    command = ["sh", str(build / "install_runtime.sh"), str(build / "venv"), "cuda"]
    subprocess.run(command, check=True)
    return set(entries((build / "given").read_text()))


def test_the_cuda_image_gets_the_runtime_and_flashinfer_and_no_compiler(
    installed: set[str],
) -> None:
    assert {"torch", "transformers", "uvicorn", "opentelemetry-sdk", "pyyaml"} <= installed
    assert {"flashinfer-python", "apache-tvm-ffi", "cuda-bindings", "nvidia-cublas"} <= installed
    assert not installed & {"triton", "setuptools", "ninja", "nvidia-nvvm", "pytest", "kopf"}
    assert not installed & {"nvidia-cuda-nvcc", "nvidia-cuda-crt"}


def test_the_cuda_lock_has_the_compiler_that_the_build_asks_for() -> None:
    locked = entries((DOCKER / "requirements-cuda.lock").read_text())
    script = (DOCKER / "compile_flashinfer.sh").read_text()
    asked = re.findall(r"--only (\S+)", script)
    assert {"nvidia-cuda-nvcc", "ninja"} <= set(asked) <= locked.keys()
    assert "--lock requirements-cuda.lock" in script


def versions(lock: Path) -> dict[str, set[str]]:
    return {
        name: set(re.findall(r"^[a-z0-9-]+==(\S+)", entry, re.MULTILINE))
        for name, entry in entries(lock.read_text()).items()
    }


def test_the_cuda_image_has_the_versions_that_the_tests_run_with() -> None:
    ours, cuda = versions(ROOT / "requirements.lock"), versions(DOCKER / "requirements-cuda.lock")
    differs = {name for name in ours.keys() & cuda.keys() if ours[name] != cuda[name]}
    assert len(ours.keys() & cuda.keys()) > 60
    # cuda-python names its version.
    assert differs <= {"cuda-bindings"}


def test_the_compiler_is_of_pytorchs_cuda() -> None:
    """Another one would compile for a runtime library that the image does not have."""
    locked = versions(DOCKER / "requirements-cuda.lock")
    (compiler,), (library,) = locked["nvidia-cuda-nvcc"], locked["nvidia-cuda-runtime"]
    assert compiler.split(".")[:2] == library.split(".")[:2]


def test_the_final_stage_takes_the_kernels_and_forbids_to_compile() -> None:
    stages = (DOCKER / "runtime.Dockerfile").read_text().split("\nFROM ")
    (kernels,) = (stage for stage in stages if stage.startswith("packages AS kernels"))
    for name in ("compile_flashinfer.sh", "compile_flashinfer.py", "flashinfer_modules.toml"):
        assert f"docker/{name}" in kernels
        assert (DOCKER / name).is_file()
    assert 'compile_flashinfer.sh /opt/fairlead "${DEVICE}" /kernels' in kernels
    assert "COPY --from=kernels /kernels /\n" in stages[-1]
    assert "ENV FLASHINFER_DISABLE_JIT=1\n" in stages[-1]


def test_the_image_for_cpus_compiles_nothing_and_takes_an_empty_folder(tmp_path: Path) -> None:
    out, programs = tmp_path / "kernels", tmp_path / "bin"
    programs.mkdir()
    for name in ("mkdir", "dirname"):  # all that it may use: nothing that installs
        (programs / name).symlink_to(str(shutil.which(name)))
    command = ["/bin/sh", str(DOCKER / "compile_flashinfer.sh"), "/no/venv", "cpu", str(out)]
    subprocess.run(command, check=True, env={"PATH": str(programs)})
    assert list(out.iterdir()) == []


def test_the_image_has_the_flashinfer_whose_signatures_the_tests_compare() -> None:
    (version,) = versions(DOCKER / "requirements-cuda.lock")["flashinfer-python"]
    assert versions(ROOT / "requirements-flashinfer.lock") == {"flashinfer-python": {version}}
    bounds = re.findall(r'"flashinfer-python>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(bounds) == 2
    for bound in bounds:
        assert [*map(int, re.findall(r"\d+", version))] >= [*map(int, bound.split("."))]
