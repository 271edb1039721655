"""Compile a folder's Python files to byte code that does not depend on times.

    PYTHONHASHSEED=0 python byte_code.py FOLDER [--root ROOT] [--skip PATTERN]…

A pod's root is read-only, so without byte code in the image each start would compile every module.
Byte code usually holds the time of its source, and layers change times: this one never expires.
Messages name a file as it is called below ROOT. Files whose path matches a PATTERN are left out.
"""

import argparse
import fnmatch
import py_compile
import sys
from collections.abc import Sequence
from pathlib import Path


def compile_folder(folder: Path, root: Path = Path("/"), skip: Sequence[str] = ()) -> None:
    for path in sorted(folder.rglob("*.py")):
        if any(fnmatch.fnmatch(str(path), pattern) for pattern in skip):
            continue
        py_compile.compile(
            str(path),
            dfile="/" + str(path.relative_to(root)),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            quiet=2,  # packages ship files for other Python versions: those stay uncompiled
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--skip", action="append", default=[])
    options = parser.parse_args()
    compile_folder(options.folder, options.root, options.skip)
    return 0


if __name__ == "__main__":
    sys.exit(main())
