"""The names of transformers' models are found when the image is built (docker/keep_names.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from keep_names import CHECK, MARK, MODULE, literal
from support import names_read

BUILD = Path(__file__).parents[3] / "docker/keep_names.py"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a transformers of its own that may be changed: links but for one file."""
    real = Path(transformers.__file__).parent
    folder = tmp_path / "transformers"
    (folder / "utils").mkdir(parents=True)
    for path in (*real.iterdir(), *(real / "utils").iterdir()):
        if path.name not in {"utils", "import_utils.py", "__pycache__", f"{MODULE}.py"}:
            (folder / path.relative_to(real)).symlink_to(path)
    # This environment's own may have been changed before.
    source, _, _ = (real / "utils/import_utils.py").read_text().partition(f"\n\n{MARK}")
    (folder / "utils/import_utils.py").write_text(source)
    return tmp_path


def python(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(packages)}
    command = [sys.executable, "-B", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_import_reads_no_file_of_a_model_for_its_names(packages: Path) -> None:
    before = python(packages, "-c", names_read.PROGRAM).stdout.splitlines()
    built = python(packages, str(BUILD))
    assert (built.returncode, built.stderr) == (0, "")
    after = python(packages, "-c", names_read.PROGRAM)
    assert after.returncode == 0, after.stderr
    count, file = after.stdout.splitlines()
    assert (int(before[0]) > 400, int(count)) == (True, 0)
    assert file == before[1] == str(packages / "transformers/__init__.py")
    source = packages / "transformers/utils/import_utils.py"
    changed = source.read_text()
    names = packages / "transformers" / f"{MODULE}.py"
    kept = names.read_text()
    names.write_text(kept.replace("'LlamaConfig'", "'LamaConfig'"))
    other = python(packages, "-c", CHECK)
    assert (other.returncode, other.stderr) == (
        1,
        "the names that were kept are not those of the files\n",
    )
    assert python(packages, str(BUILD)).returncode == 0
    assert (source.read_text(), names.read_text()) == (changed, kept)


def test_a_transformers_that_asks_in_another_way_ends_the_build(packages: Path) -> None:
    source = packages / "transformers/utils/import_utils.py"
    text = source.read_text()
    asks = "import_structure = create_import_structure_from_path(module_path)"
    assert asks in text
    source.write_text(
        text.replace(asks, "import_structure = read(module_path)").replace(
            "\n\n@lru_cache\ndef define_import_structure",
            "\n\nread = create_import_structure_from_path\n\n\n"
            "@lru_cache\ndef define_import_structure",
        )
    )
    asked = source.read_text()
    built = python(packages, str(BUILD))
    assert built.returncode == 1
    assert source.read_text() == asked, "the package is as it was"
    assert "does not take the names that were kept" in built.stderr


def test_each_build_writes_the_same() -> None:
    value = {
        frozenset({"vision", "torch"}): {"b": {"Z", "A"}},
        "a": {frozenset(): {"c": set()}},
    }
    text = literal(value)
    assert eval(text) == value
    assert text == (
        "{'a': {frozenset([]): {'c': set([])}}, "
        "frozenset(['torch', 'vision']): {'b': set(['A', 'Z'])}}"
    )
