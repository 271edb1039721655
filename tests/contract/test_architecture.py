"""The pages for developers name files that exist, and the drawing has every room."""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = (
    ROOT,
    ROOT / "operator" / "fairlead_operator",
    ROOT / "runtime" / "fairlead_runtime",
    ROOT / "kernels" / "fairlead_kernels",
)
PAGES = ("docs/architecture.md", "docs/README.md", "CONTRIBUTING.md")
FILE = re.compile(r"(?<![\w/:.-])(?:[\w.-]+/)*[\w.-]+\.(?:py|md|svg|ya?ml|toml|sh|txt|lock)\b")
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
TEST = re.compile(r"(?<![\w/.-])tests/[\w./-]*\w")

DEFINITION = re.compile(r"^class (\w+)|^(\w+)(?:: [^=]+)? = ", re.MULTILINE)


def paths(text: str) -> set[str]:
    """Every file, folder in backquotes and test path that a page names."""
    return set(chain(FILE.findall(text), FOLDER.findall(text), TEST.findall(text)))


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_the_page_exists(page: str) -> None:
    named = paths((ROOT / page).read_text())
    here = (ROOT / page).parent
    missing = {name for name in named if not any((base / name).exists() for base in (here, *BASES))}
    assert len(named) > 10
    assert not missing


def test_the_search_for_paths_sees_each_form() -> None:
    text = "`api/ports/app.py`, `decide/`, `pytest tests/unit/models -k NAME`, https://a.b/c.md"
    assert paths(text) == {"api/ports/app.py", "decide/", "tests/unit/models"}


@pytest.mark.parametrize("page", PAGES)
def test_every_class_and_table_of_the_page_is_defined(page: str) -> None:
    named = set(re.findall(r"`_?([A-Z]+_?[A-Za-z_]+)`", (ROOT / page).read_text()))
    modules = chain.from_iterable(base.rglob("*.py") for base in (*BASES[1:], ROOT / "tests"))
    defined = {
        next(filter(None, found))
        for module in modules
        for found in DEFINITION.findall(module.read_text())
    }
    assert named
    assert named - {name.removeprefix("_") for name in defined} == set()


def test_the_drawing_is_that_of_the_import_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/draw_architecture.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_room_of_the_contracts_is_in_the_drawing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = [
        layer
        for contract in project["tool"]["importlinter"]["contracts"]
        for layer in contract.get("layers", ())
    ]
    rooms = {name.strip() for layer in layers for name in re.split("[|:]", layer)}
    drawing = (ROOT / "docs" / "pictures" / "architecture.svg").read_text()
    assert len(rooms) > 30
    assert {room for room in rooms if f">{room}</text>" not in drawing} == set()
