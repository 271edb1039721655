"""The kernels that the CUDA image has compiled ahead, with a stand-in for flashinfer."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from compile_flashinfer import Module, architectures, main, read
from fairlead_kernels.packages.flashinfer_attention import SUPPORTED
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


TABLE = """
[[attention]]
dtype = {}
head_size = {}
window = {}
"""


def attention(
    dtype: str,
    head_size: int,
    *,
    cache: str = "",
    window: bool = False,
    soft_cap: bool = False,
    sinks: bool = False,
) -> Module:
    return Module(dtype, cache or dtype, head_size, window, soft_cap, sinks)


def listed(tmp_path: Path, *tables: str) -> list[Module]:
    path = tmp_path / "list.toml"
    path.write_text('architectures = ["8.0"]\n' + "".join(tables))
    targets, modules = read(path)
    assert targets == ["8.0"]
    return modules


def test_a_list_is_every_combination_of_each_table_once(tmp_path: Path) -> None:
    modules = listed(
        tmp_path,
        TABLE.format('["bfloat16"]', "[64, 128]", "[false, true]"),
        TABLE.format('["float16", "bfloat16"]', "[64]", "[true]"),
    )
    assert len(modules) == len(set(modules)) == 5
    assert attention("float16", 64, window=True) in modules


def test_a_cache_has_the_models_type_unless_a_table_says_another(tmp_path: Path) -> None:
    plain = TABLE.format('["float16", "bfloat16"]', "[64]", "[false]")
    fp8 = plain + 'cache = ["float8_e4m3fn"]\n'
    assert listed(tmp_path, plain, fp8) == [
        attention("bfloat16", 64),
        attention("bfloat16", 64, cache="float8_e4m3fn"),
        attention("float16", 64),
        attention("float16", 64, cache="float8_e4m3fn"),
    ]


def test_modules_with_one_name_end_the_build(tmp_path: Path) -> None:
    """The name of a module with sinks says no size: a pod would compute with the other's."""
    table = TABLE.format('["bfloat16"]', "[64, 128]", "[false]") + "sinks = [true]\n"
    with pytest.raises(SystemExit, match="1 of the modules have the name of another"):
        listed(tmp_path, table)


@pytest.mark.parametrize("more", ['cache = ["float8_e4m3fn"]', "soft_cap = [true]"])
def test_sinks_with_what_no_wrapper_asks_for_end_the_build(tmp_path: Path, more: str) -> None:
    table = TABLE.format('["bfloat16"]', "[64]", "[false]") + f"sinks = [true]\n{more}\n"
    with pytest.raises(SystemExit, match="no wrapper asks for sinks with these"):
        listed(tmp_path, table)


def test_the_images_list_has_what_the_runtime_serves_on_flashinfer() -> None:
    targets, modules = read(LIST)
    assert {"8.0", "9.0a"} <= set(targets)
    for window in (False, True):
        for size in SUPPORTED.dims:
            assert attention("bfloat16", size, window=window) in modules
            assert attention("bfloat16", size, window=window, cache="float8_e4m3fn") in modules
        for size in (64, 128):
            assert attention("float16", size, window=window) in modules
        for size in (128, 256):  # Gemma 2
            assert attention("bfloat16", size, window=window, soft_cap=True) in modules
    sinks = {module.head_size for module in modules if module.sinks}
    assert sinks == SUPPORTED.sinks
    assert {module.head_size for module in modules} == SUPPORTED.dims


@dataclass
class Specification:
    name: str
    path: Path

    def get_library_path(self) -> Path:
        return self.path

    def build_and_load(self) -> None:
        pytest.fail("nothing is compiled or loaded before all is described")


class Flashinfer:
    """Stand-ins for what the script imports; `made` is what was compiled, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.library = container((MACHINE_CODE, 80), (MACHINE_CODE, 90))
        self.functions = {"plan", "ragged_run", "paged_run"}
        self.rename: Callable[[str], str] = lambda name: name
        self.sinks_ask = True
        self.made: list[str] = []
        modules: dict[str, dict[str, Any]] = {
            "flashinfer": {
                "aot": SimpleNamespace(gen_fa2=self.describe),
                "BatchAttentionWithAttentionSinkWrapper": self.make_wrapper,
            },
            "flashinfer.jit": {"build_jit_specs": self.build},
            "flashinfer.jit.core": {"JitSpec": Specification},
            "tvm_ffi": {"load_module": lambda path: dict.fromkeys(self.functions, path)},
            "torch": {
                **{name: name for name in ("bfloat16", "float16", "float8_e4m3fn")},
                "empty": lambda size: [0] * size,
            },
        }
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")

    def describe(
        self, q: str, kv: str, qk: int, vo: int, window: bool, soft_cap: bool, *, prefill_only: bool
    ) -> list[Specification]:
        assert (qk, prefill_only) == (vo, True)
        name = attention(q, qk, cache=kv, window=window, soft_cap=soft_cap).name
        return [self.specified(name)]

    def make_wrapper(
        self,
        _workspace: list[int],
        layout: str,
        *,
        backend: str,
        q_data_type: str,
        kv_data_type: str,
        head_dim_qk: int,
        head_dim_vo: int,
        window_left: int,
    ) -> None:
        assert (layout, backend, head_dim_qk) == ("NHD", "fa2", head_dim_vo)
        assert q_data_type == kv_data_type
        window = window_left >= 0
        module = attention(q_data_type, head_dim_qk, window=window, sinks=True)
        if self.sinks_ask:
            self.specified(module.name).build_and_load()

    def specified(self, name: str) -> Specification:
        name = self.rename(name)
        return Specification(name, self.folder / f"{name}.so")

    def build(self, specifications: list[Specification], **_: object) -> None:
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


def test_a_wrapper_for_sinks_that_asks_for_nothing_ends_the_build(flashinfer: Flashinfer) -> None:
    flashinfer.sinks_ask = False
    with pytest.raises(SystemExit, match="wrapper for sinks asks for no module"):
        main()


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
    (build / "install.sh").write_text(
        'mkdir -p "$1/bin" && ln -s "$(command -v python3)" "$1/bin/python"\n'
        'cat > "$(dirname "$0")/given"\n'
    )
    (build / "keep_names.py").write_text("")
    (build / "trim_triton.sh").write_text('echo "$1" > "$(dirname "$0")/trimmed"\n')
    command = ["sh", str(build / "install_runtime.sh"), str(build / "venv"), "cuda"]
    subprocess.run(command, check=True)
    assert (build / "trimmed").read_text() == f"{build}/venv\n"
    return set(entries((build / "given").read_text()))


def test_the_cuda_image_gets_the_runtime_flashinfer_and_triton_and_no_compiler(
    installed: set[str],
) -> None:
    assert {"torch", "transformers", "uvicorn", "opentelemetry-sdk", "pyyaml"} <= installed
    assert {"flashinfer-python", "apache-tvm-ffi", "cuda-bindings", "nvidia-cublas"} <= installed
    assert "triton" in installed
    assert not installed & {"setuptools", "ninja", "nvidia-nvvm", "pytest", "kopf"}
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
    assert "ENV FAIRLEAD_BUILD_KERNELS=0\n" in stages[-1]


def test_the_stage_of_the_packages_has_what_prepares_triton() -> None:
    stages = (DOCKER / "runtime.Dockerfile").read_text().split("\nFROM ")
    (packages,) = (stage for stage in stages if stage.partition("\n")[0].endswith(" AS packages"))
    for name in ("trim_triton.sh", "trim_triton.py"):
        assert f"docker/{name}" in packages
        assert (DOCKER / name).is_file()


def test_the_image_for_cpus_compiles_nothing_and_takes_an_empty_folder(tmp_path: Path) -> None:
    out, programs = tmp_path / "kernels", tmp_path / "bin"
    programs.mkdir()
    for name in ("mkdir", "dirname"):  # all that it may use: nothing that installs
        (programs / name).symlink_to(str(shutil.which(name)))
    command = ["/bin/sh", str(DOCKER / "compile_flashinfer.sh"), "/no/venv", "cpu", str(out)]
    subprocess.run(command, check=True, env={"PATH": str(programs)})
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["flashinfer-python", "humming-kernels"])
def test_the_image_has_the_package_whose_signatures_the_tests_compare(name: str) -> None:
    (version,) = versions(DOCKER / "requirements-cuda.lock")[name]
    tested = versions(ROOT / "requirements-gpu.lock")
    assert len(tested) == 2
    assert tested[name] == {version}
    bounds = re.findall(rf'"{name}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(bounds) == 2
    for bound in bounds:
        assert [*map(int, re.findall(r"\d+", version))] >= [*map(int, bound.split("."))]
