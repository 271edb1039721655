"""Run a Python program of the project with the Python at hand, where nothing is to be installed.

    python3 scripts/gpu_python.py [--wheels PATH ...] [--unpack FOLDER] -- ARGUMENTS

`make gpu SETUP=0`, `gpu-soak` and `bench-gpu` call it, and `scripts/first_light.py` is called by
it. It unpacks wheels (files, or folders of them) into FOLDER, puts that and the project's folders
on PYTHONPATH, looks for what the program needs, and runs ``python3 ARGUMENTS``. All that is missing
is said in one message, exit code 2. What some rows and tests alone need is said too, and the
program runs: those fail, or say so, by themselves.

What takes seconds to import, half a minute where no file is in memory yet, is looked for and not
imported, and GPUs are counted by their driver.

Owns what is needed and why; the versions are those of pyproject.toml. Needs only the standard
library.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "runtime", "operator")  # where the packages are found without installation


class Need(NamedTuple):
    """A module, the distribution that has it, and why; ``some``: not all tests and rows need it;
    ``large``: it takes seconds to import.
    """

    module: str
    distribution: str
    why: str
    some: bool = False
    large: bool = False


NEEDS = (
    Need("torch", "torch", "computes", large=True),
    Need("transformers", "transformers", "the models, and the reference of every test", large=True),
    Need("safetensors", "safetensors", "reads weights"),
    Need("tokenizers", "tokenizers", "tokenizers"),
    Need("huggingface_hub", "huggingface-hub", "names models"),
    Need("numpy", "numpy", "batches on the host"),
    Need("jinja2", "jinja2", "chat templates"),
    Need("msgspec", "msgspec", "messages between processes"),
    Need("llguidance", "llguidance", "structured output"),
    Need("yaml", "pyyaml", "settings"),
    Need("tqdm", "tqdm", "bars of progress"),
    Need("pytest", "pytest", "runs the tests"),
    Need("pytest_timeout", "pytest-timeout", "ends a test that hangs"),
    Need("hypothesis", "hypothesis", "random cases of the tests"),
    Need("triton", "triton", "the kernels of fused layers", some=True, large=True),
    Need("humming", "humming-kernels", "4-bit products", some=True, large=True),
    Need("tvm_ffi", "apache-tvm-ffi", "loads flashinfer's kernels", some=True, large=True),
    Need(
        *("flashinfer", "flashinfer-python", "attention, CUDA graphs, steps ahead"),
        some=True,
        large=True,
    ),
)


def least_versions() -> dict[str, str]:
    """By distribution, the least version that pyproject.toml allows."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = text["project"]
    lines = [*project["dependencies"], *text["dependency-groups"]["test"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    found = (re.match(r"([a-z0-9-]+)>=([0-9.]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def missing(
    needs: Sequence[Need],
    load: Callable[[str], object] = importlib.import_module,
    version: Callable[[str], str] = importlib.metadata.version,
) -> Iterator[tuple[Need, str]]:
    """Each need that is not met, with what is wrong. An old version of what does not compute may
    serve all the same, and a run on a GPU is dear: ``some`` of it may do without.
    """
    least = least_versions()
    for need in needs:
        wanted = least.get(need.distribution, "")
        name = f"{need.distribution}>={wanted}" if wanted else need.distribution
        try:
            (look_for if need.large else load)(need.module)
        except Exception as error:  # noqa: BLE001 - a module may fail in any way: it is not there
            absent = isinstance(error, ModuleNotFoundError) and error.name == need.module
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield need, name if absent else f"{name}: cannot be imported: {text}"
            continue
        try:
            found = version(need.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue  # a module without metadata: it was imported, so it is used
        if _numbers(found) < _numbers(wanted):
            computes = need.module in ("torch", "transformers")
            yield need._replace(some=need.some or not computes), f"{name}: {found} is too old"


def look_for(module: str) -> None:
    """Raise ModuleNotFoundError where there is no module of this name."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def no_gpu(torch: Path, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """What is wrong with the GPU, by the driver and by the package of torch in this folder; empty
    where nothing is.
    """
    built = dict(re.findall(r"^(\w+).* = (.+)$", (torch / "version.py").read_text(), re.MULTILINE))
    if built.get("cuda", "None") == "None":
        version = built["__version__"].strip("'")
        return f"an NVIDIA GPU: torch {version} is built without CUDA"
    try:
        driver = load("libcuda.so.1")
    except OSError as error:
        return f"an NVIDIA GPU: no driver: {error}"
    count = ctypes.c_int()
    if (code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))) != 0:
        return f"an NVIDIA GPU: its driver answers with error {code}"
    return "" if count.value else "an NVIDIA GPU: its driver sees none"


def message(found: Sequence[tuple[Need, str]], gpu: str) -> str:
    """What is missing, a line each: first what nothing runs without."""
    lines = []
    for some, title in ((False, "missing"), (True, "missing, and some tests and rows need it")):
        here = [(what, need.why) for need, what in found if need.some is some]
        if gpu and not some:
            here.append((gpu, "what is tested or measured"))
        if here:
            lines += [f"{title}:", *(f"  {what} ({why})" for what, why in here)]
    return "\n".join(lines)


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """Make ``folder`` hold what these wheels, or those of these folders, would install. Raises
    ValueError for a path that is neither.
    """
    files: list[Path] = []
    for path in wheels:
        inside = sorted(path.glob("*.whl")) if path.is_dir() else [path]
        if not inside or not all(one.suffix == ".whl" and one.is_file() for one in inside):
            raise ValueError(f"{path}: not a wheel, and no folder of wheels")
        files += inside
    # The wheels that it was made of: unpacking flashinfer's takes seconds, and compiled modules
    # must stay.
    made_of = "\n".join(f"{one.name} {one.stat().st_size}" for one in files)
    mark = folder / "WHEELS"
    if mark.is_file() and mark.read_text() == made_of:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for one in files:
        with zipfile.ZipFile(one) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, folder))
                # A wheel may have programs, and zipfile drops that they are.
                if member.external_attr >> 16 & 0o100:
                    path.chmod(path.stat().st_mode | 0o111)
    for part in folder.glob("*.data/*lib"):  # purelib and platlib
        shutil.copytree(part, folder, dirs_exist_ok=True)
    mark.write_text(made_of)


def main() -> None:
    parser = argparse.ArgumentParser(description="run with the Python at hand")
    parser.add_argument("--wheels", type=Path, action="append", default=[])
    parser.add_argument("--unpack", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--without-gpu", action="store_true", help="do not ask for a GPU")
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    places = [str(ROOT / folder) for folder in FOLDERS]
    if options.wheels:
        try:
            unpack(options.wheels, options.unpack)
        except ValueError as error:
            parser.error(str(error))
        places.append(str(options.unpack))
    sys.path[:0] = places
    found = list(missing(NEEDS))
    gpu = ""
    torch = importlib.util.find_spec("torch")
    if not options.without_gpu and torch is not None and torch.origin is not None:
        gpu = no_gpu(Path(torch.origin).parent)
    if text := message(found, gpu):
        print(f"{sys.executable}: {text}", file=sys.stderr, flush=True)
    if gpu or any(not need.some for need, _ in found):
        sys.exit(2)
    become(options.arguments, places)


def become(arguments: Sequence[str], places: Sequence[str]) -> NoReturn:
    """The same process becomes the program: signals reach it."""
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [given])])
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
