"""What the images hold, read from their archives."""

import fnmatch
import json
import re
import stat
import tomllib
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest

import compile_flashinfer
from fairlead_kernels.gpu import triton_package
from support.image_archive import Archive

pytestmark = pytest.mark.images
ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = "opt/fairlead/lib/python3*/site-packages"
MEGABYTE = 10**6
BOUNDS = {
    "operator": 250 * MEGABYTE,
    "runtime": 1800 * MEGABYTE,
    "runtime-cuda": 6400 * MEGABYTE,
}
OURS = ("fairlead_operator", "fairlead_runtime", "fairlead_kernels", "fairlead-*.dist-info")

COMPILERS = (
    "cc",
    "c++",
    "gcc*",
    "g++*",
    "clang*",
    "tcc",
    "cc1*",
    "ld",
    "ld.*",
    "as",
    "nvcc",
    "make",
)
MANAGERS = ("apt", "apt-*", "dpkg*", "pip", "pip[0-9]*", "uv", "uvx", "conda*", "npm", "yum", "rpm")
# Programs whose names only look like one of these.
INNOCENT = ("usr/bin/ld.so", "usr/lib64/ld-linux-x86-64.so.2")


def file_of(image: Archive) -> str:
    return image.path.stem


def name_of(image: Archive) -> str:
    """Without the kind of accelerator."""
    return file_of(image).split("-")[0]


def is_cuda(image: Archive) -> bool:
    return file_of(image).endswith("-cuda")


def under(image: Archive, pattern: str) -> list[str]:
    return [path for path in image.files if fnmatch.fnmatch(path, pattern)]


def python_packages(image: Archive) -> dict[str, str]:
    """Names, normalized, and versions of the installed distributions."""
    found = {}
    for path in under(image, f"{PACKAGES}/*.dist-info/METADATA"):
        fields = HeaderParser().parsestr(image.read(path).decode())
        found[re.sub(r"[-_.]+", "-", fields["Name"]).lower()] = fields["Version"]
    return found


def test_the_image_is_tagged_with_the_name_that_the_chart_writes(image: Archive) -> None:
    suffix = "-cuda" if is_cuda(image) else ""
    assert image.tags == [f"docker.io/fairlead/{name_of(image)}:{VERSION}{suffix}"]


def test_the_image_runs_as_a_user_that_is_not_root_and_has_a_name(image: Archive) -> None:
    assert image.config["config"]["User"] == "10001"
    assert "\nfairlead:x:10001:10001:" in image.read("etc/passwd").decode()


def test_the_image_says_what_it_is(image: Archive) -> None:
    labels = image.config["config"]["Labels"]
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == VERSION
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert labels[f"{prefix}title"] == f"Fairlead {name_of(image)}"
    assert re.fullmatch(r"[0-9a-f]{40}", labels[f"{prefix}revision"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", labels[f"{prefix}created"])


def test_python_fairlead_and_a_shell_are_on_the_path(image: Archive) -> None:
    path = [folder.strip("/") for folder in image.environment["PATH"].split(":")]
    for program in ("python", "fairlead", "sh", "ls", "cat", "id", "grep", "env", "sleep"):
        assert any(f"{folder}/{program}" in image.files for folder in path), program


def test_the_image_has_no_compiler_and_no_package_manager(image: Archive) -> None:
    wrong = [
        path
        for path, entry in image.files.items()
        if path not in INNOCENT
        and not stat.S_ISDIR(entry.mode)
        and (entry.mode & 0o111 or stat.S_ISLNK(entry.mode))
        and any(fnmatch.fnmatch(PurePosixPath(path).name, p) for p in (*COMPILERS, *MANAGERS))
    ]
    assert wrong == []
    for module in ("pip", "setuptools", "uv", "hatchling", "wheel"):
        assert not under(image, f"{PACKAGES}/{module}/*"), module
    assert not under(image, "*/ensurepip/*")
    assert not under(image, "*.whl")


def test_no_program_raises_its_rights(image: Archive) -> None:
    raised = stat.S_ISUID | stat.S_ISGID
    assert [p for p, e in image.files.items() if e.regular and e.mode & raised] == []


def test_any_user_may_read_every_file(image: Archive) -> None:
    """OpenShift replaces the user by one of the namespace."""
    for path, entry in image.files.items():
        if path == "root" or stat.S_ISLNK(entry.mode):
            continue
        needed = 0o005 if stat.S_ISDIR(entry.mode) else 0o004
        assert entry.mode & needed == needed, f"{path}: {entry.mode:o}"


def test_nothing_that_belongs_to_the_image_may_be_written_by_its_user(image: Archive) -> None:
    for path, entry in image.files.items():
        assert entry.uid == 0, path
        if entry.regular:
            assert not entry.mode & 0o002, path


def test_the_image_holds_no_tests_logs_or_caches(image: Archive) -> None:
    assert not under(image, "var/log/*") + under(image, "var/cache/*")
    assert not under(image, "tmp/*") + under(image, "build/*") + under(image, "root/*")
    assert not under(image, f"{PACKAGES}/pytest*")


def test_byte_code_does_not_depend_on_times(image: Archive) -> None:
    compiled = (
        under(image, f"{PACKAGES}/fairlead_runtime/config*.pyc")
        + under(image, f"{PACKAGES}/*/__pycache__/__init__*.pyc")[:20]
        + under(image, "usr/lib/python3*/__pycache__/argparse*.pyc")
    )
    assert len(compiled) > 20
    for path in compiled:
        # PEP 552: bit 0, checked by hash; bit 1 unset, never checked.
        assert int.from_bytes(image.read(path)[4:8], "little") == 1, path


def test_our_code_is_a_small_layer_of_its_own(image: Archive) -> None:
    ours = {
        image.files[path].layer
        for pattern in OURS
        for path in under(image, f"{PACKAGES}/{pattern}/*")
    }
    top = len(image.layers) - 1
    assert ours == {top}
    assert image.sizes[top] < 20 * MEGABYTE


def test_the_image_is_within_its_size(image: Archive) -> None:
    assert sum(image.sizes) <= BOUNDS[file_of(image)]


def test_the_operator_has_no_torch_and_no_server(operator: Archive) -> None:
    names = set(python_packages(operator))
    assert {"kopf", "kubernetes", "fairlead"} <= names
    assert not names & {"torch", "numpy", "transformers", "fastapi", "uvicorn", "llguidance"}


def test_the_runtime_has_no_operator_framework(runtime: Archive) -> None:
    names = set(python_packages(runtime))
    assert {"torch", "transformers", "fastapi", "llguidance", "fairlead"} <= names
    gpu = {"triton", "flashinfer-python", "humming-kernels"}
    assert not names & {"kopf", "kubernetes", "pytest", *gpu}


def test_the_cuda_runtime_has_flashinfer_and_triton_and_nothing_that_compiles(
    runtime_cuda: Archive,
) -> None:
    names = set(python_packages(runtime_cuda))
    assert {"torch", "transformers", "fastapi", "flashinfer-python", "fairlead"} <= names
    assert {"triton", "humming-kernels"} <= names
    assert not names & {"kopf", "kubernetes", "pytest", "ninja"}
    assert not names & {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"}
    assert runtime_cuda.environment["FLASHINFER_DISABLE_JIT"] == "1"


def test_the_cuda_runtimes_triton_has_what_kernels_need_and_little_else(
    runtime_cuda: Archive,
) -> None:
    paths = under(runtime_cuda, f"{PACKAGES}/triton/*")
    files = {path.partition("/triton/")[2]: runtime_cuda.files[path] for path in paths}
    for assembler in ("ptxas", "ptxas-blackwell"):
        assert files[f"backends/nvidia/bin/{assembler}"].mode & 0o555 == 0o555
    libraries = {path for path in files if path.startswith("backends/nvidia/lib/")}
    (driver,) = libraries - {"backends/nvidia/lib/libdevice.10.bc"}
    assert fnmatch.fnmatch(driver, triton_package.COMPILED)
    assert not any(path.startswith(("backends/amd/", "include/", "profiler/")) for path in files)
    # Of it the compiler, without its debugging symbols, is 192 and the assemblers are 87.
    assert sum(entry.size for entry in files.values()) < 320 * MEGABYTE


def test_the_cuda_runtime_finds_the_driver_where_clusters_put_it(runtime_cuda: Archive) -> None:
    assert runtime_cuda.environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_the_cuda_runtime_has_exactly_the_listed_modules_with_code_for_each_architecture(
    runtime_cuda: Archive,
) -> None:
    targets, modules = compile_flashinfer.read(ROOT / "docker/flashinfer_modules.toml")
    paths = under(runtime_cuda, f"{PACKAGES}/flashinfer/data/aot/*/*.so")
    found = {PurePosixPath(path).stem: path for path in paths}
    assert set(found) == {module.name for module in modules}
    wanted = {int("".join(filter(str.isdigit, target))) for target in targets}
    for name, path in found.items():
        assert PurePosixPath(path).parent.name == name
        assert compile_flashinfer.architectures(runtime_cuda.read(path)) == wanted


def test_the_cuda_runtimes_modules_are_a_layer_of_their_own(runtime_cuda: Archive) -> None:
    """A change of the list sends these megabytes again, not the packages' gigabytes."""
    paths = under(runtime_cuda, f"{PACKAGES}/flashinfer/data/aot/*/*.so")
    (layer,) = {runtime_cuda.files[path].layer for path in paths}
    assert runtime_cuda.sizes[layer] < 100 * MEGABYTE


def test_the_runtime_has_the_kernels_of_each_instruction_set_and_the_operator_none(
    operator: Archive, runtime: Archive
) -> None:
    found = [Path(path).name for path in under(runtime, f"{PACKAGES}/fairlead_kernels/native/*")]
    assert sorted(found) == ["avx2.so", "avx512.so", "baseline.so"]
    assert runtime.environment["FAIRLEAD_BUILD_KERNELS"] == "0"
    assert not under(operator, f"{PACKAGES}/fairlead_kernels/native/*")


def test_every_package_has_the_version_of_the_lock(image: Archive) -> None:
    file = "docker/requirements-cuda.lock" if is_cuda(image) else "requirements.lock"
    lock = (ROOT / file).read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE))
    # PyTorch's CPU build, where the builder named its index, has the version's local part.
    installed = {
        (name, version.removesuffix("+cpu"))
        for name, version in python_packages(image).items()
        if name != "fairlead"
    }
    assert len(installed) > 20
    assert installed <= locked


def test_the_bill_of_materials_lists_what_is_installed(image: Archive) -> None:
    document = json.loads(image.read("opt/fairlead/sbom.cdx.json"))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    listed = {part["purl"] for part in document["components"]}
    status = image.read("var/lib/dpkg/status").decode()
    debian = re.findall(
        r"^Package: (\S+)$.*?^Architecture: (\S+)$.*?^Version: (\S+)$",
        status,
        re.MULTILINE | re.DOTALL,
    )
    assert len(debian) > 20
    for name, architecture, _ in debian:
        assert any(
            purl.startswith(f"pkg:deb/debian/{name.replace('+', '%2B')}@")
            and f"arch={architecture}&" in purl
            for purl in listed
        ), name
    for name, version in python_packages(image).items():
        assert f"pkg:pypi/{name}@{version}" in listed
    assert len(listed) == len(debian) + len(python_packages(image))
