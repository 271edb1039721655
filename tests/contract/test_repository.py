"""Rules for the whole repository."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("operator/fairlead_operator", "runtime/fairlead_runtime", "kernels/fairlead_kernels")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("folder", ["operator", "runtime", "kernels"])
def test_the_folders_above_the_packages_are_not_packages(folder: str) -> None:
    """operator/__init__.py would shadow the standard library, kernels/__init__.py another
    distribution.
    """
    assert not (ROOT / folder / "__init__.py").exists()
    assert list((ROOT / folder).glob("*/__init__.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module docstring is missing"


FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "torch.load",
    "pickle.load",
    "pickle.loads",
    "marshal.loads",
}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_product_code_never_unpickles_evaluates_or_checks_by_assert(path: Path) -> None:
    found = list(violations(path.read_text()))
    assert not found


def violations(source: str) -> list[str]:
    """Constructs that product code must not have, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert vanishes under python -O; raise instead")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS:
                found.append(f"line {node.lineno}: {name}")
            if any(k.arg == "shell" and getattr(k.value, "value", False) for k in node.keywords):
                found.append(f"line {node.lineno}: shell=True")
        elif isinstance(node, ast.Import):
            found += [
                f"line {node.lineno}: import {a.name}"
                for a in node.names
                if a.name in FORBIDDEN_MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_MODULES:
            found.append(f"line {node.lineno}: from {node.module} import")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "assert x",
        "eval(x)",
        "torch.load(f)",
        "import pickle",
        "from pickle import loads",
        "run(x, shell=True)",
    ],
)
def test_the_check_finds_every_forbidden_construct(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize("name", ["requirements.lock", "docker/requirements-cuda.lock"])
def test_a_lock_has_hashes_and_no_download_url(name: str) -> None:
    lock = (ROOT / name).read_text()
    entries = re.findall(r"^([a-z0-9][a-z0-9._-]*)==", lock, flags=re.MULTILINE)
    assert len(entries) > 50
    assert "://" not in lock
    blocks = re.split(r"^(?=[a-z0-9][a-z0-9._-]*==)", lock, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_base_dependencies_hold_neither_torch_nor_kopf() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[ ]", line)[0] for line in project["dependencies"]}
    assert names <= {"pyyaml", "tqdm"}
    extras = set(project["optional-dependencies"])
    assert extras == {"operator", "runtime", "tracing", "cuda"}


def test_every_lint_exception_has_a_reason() -> None:
    ignored = (
        (ROOT / "pyproject.toml").read_text().split("[tool.ruff.lint]")[1].split("[tool.pytest")[0]
    )
    bare = [line for line in ignored.splitlines() if re.match(r'\s+"[A-Z0-9]+",\s*$', line)]
    assert not bare
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = re.search(r"# noqa:? *(.*)$", line)
            if comment and path != Path(__file__):
                assert re.match(r"[A-Z0-9, ]+ - \S", comment[1]), (
                    f"{path}:{number}: noqa needs codes and ' - reason'"
                )


def test_nothing_private_and_no_generated_file_is_tracked() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [
        name for name in tracked if re.search(r"(\.pyc|\.pt|\.bin|\.pkl|\.env|\.pem|\.key)$", name)
    ]
