"""The stand-in of flashinfer has the package's own signatures.

`make setup` installs the package without its dependencies (requirements-gpu.lock), so it
cannot be imported here: its source is parsed instead.
"""

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from support import flashinfer_standin

ROOT = Path(__file__).parents[2]
# Each class that is stood in for, the file of the package that has it, and the methods we call.
CLASSES = {
    "BatchPrefillWithPagedKVCacheWrapper": ("prefill.py", ("__init__", "plan", "run")),
    "BatchDecodeWithPagedKVCacheWrapper": (
        "decode.py",
        ("__init__", "plan", "_plan_impl", "run"),  # plan hands its keywords to _plan_impl
    ),
    "BatchAttentionWithAttentionSinkWrapper": ("attention/_core.py", ("__init__",)),
}
METHODS = [(name, method) for name, (_, methods) in CLASSES.items() for method in methods]


def package() -> Path:
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None, "flashinfer-python is not in this environment: run `make setup`"
    assert spec.origin is not None
    return Path(spec.origin).parent


def parameters(source: Path, name: str, method: str) -> list[str]:
    """The parameters of a method as source text without annotations: ``*, page_size, out=None``."""
    tree = ast.parse(source.read_text())
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    # The last of several is the method itself; those before it are overloads.
    arguments = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == method][-1].args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in (*every, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments).split(", ")


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_the_stand_in_takes_what_the_package_takes(name: str, method: str) -> None:
    theirs = parameters(package() / CLASSES[name][0], name, method)
    ours = parameters(Path(flashinfer_standin.__file__), name, method)
    assert ours == theirs


def test_the_package_has_these_names_at_its_top() -> None:
    tree = ast.parse((package() / "__init__.py").read_text())
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names >= {*CLASSES, "__version__"}


def test_the_lock_names_the_versions_in_this_environment_with_their_hashes() -> None:
    lock = (ROOT / "requirements-gpu.lock").read_text()
    assert re.findall(r"^([a-z-]+)==([^ ]+) ", lock, flags=re.MULTILINE) == [
        (name, importlib.metadata.version(name))
        for name in ("flashinfer-python", "humming-kernels")
    ]
    assert "--hash=sha256:" in lock
    assert "://" not in lock
