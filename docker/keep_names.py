"""Keep the names that transformers finds in the files of its models, so that no pod looks again.

    python -B keep_names.py

At each import transformers reads the 1,700 files of its models for the names that they define. The
package of the Python that runs this does so here, once, and its function then hands out what it
found: each of a pod's two processes starts with one and a half seconds of processor time less. At
the end a new process reads the files as before, and compares; where they differ the package stays
as it was.
"""

import subprocess
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path

from transformers.utils import import_utils

MODULE = "names_of_models"  # of transformers, which holds them
MARK = "# docker/keep_names.py wrote what follows."
# Behind everything else in import_utils, whose functions look the name up when they are called.
REPLACEMENT = f"""

{MARK}
read_names = create_import_structure_from_path


@lru_cache
def create_import_structure_from_path(module_path):
    folder = os.path.dirname(module_path) if os.path.isfile(module_path) else str(module_path)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if folder != os.path.join(package, "models"):
        return read_names(module_path)
    from ..{MODULE} import NAMES

    return NAMES
"""
CHECK = f"""
import sys
from pathlib import Path
from transformers.utils import import_utils
if "transformers.{MODULE}" not in sys.modules:
    raise SystemExit("transformers does not take the names that were kept: look what reads them")
models = Path(import_utils.__file__).parents[1] / "models"
if import_utils.create_import_structure_from_path(models) != import_utils.read_names(models):
    raise SystemExit("the names that were kept are not those of the files")
"""


def literal(value: object) -> str:
    """Python for a value of dictionaries and sets, with their items in the same order always."""
    if isinstance(value, dict):
        items = sorted(f"{literal(key)}: {literal(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, AbstractSet):
        return f"{type(value).__name__}([{', '.join(sorted(map(literal, value)))}])"
    return repr(value)


def write(file: Path, text: str) -> None:
    """In a file of its own: an installer may share the old one with other environments."""
    changed = file.with_suffix(".changed")
    changed.write_text(text)
    changed.replace(file)


def main() -> int:
    source = Path(import_utils.__file__)
    package = source.parents[1]
    before, _, _ = source.read_text().partition(f"\n\n{MARK}")
    # The function that reads files, also where it was replaced before.
    read = getattr(import_utils, "read_names", import_utils.create_import_structure_from_path)
    write(package / f"{MODULE}.py", f"NAMES = {literal(read(package / 'models'))}\n")
    write(source, before + REPLACEMENT)
    code = subprocess.run([sys.executable, "-B", "-c", CHECK], check=False).returncode
    if code:
        write(source, before)
    return code


if __name__ == "__main__":
    sys.exit(main())
