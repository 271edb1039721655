"""Facts that the build of the C++ sources and the loader of the libraries share: for which machines
they are, and a name for the sources' content, which a library built from them carries.

Used while the package is built, when torch may be absent, and when a library is loaded.
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path


def why_not_here() -> str:
    """The reason why this machine has no libraries, whatever compiler there is; "" where it can."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return ""
    return f"they are for Linux on x86-64, not {sysconfig.get_platform()}"


def hash_sources(folder: Path) -> str:
    """A hash of the ``.cpp`` and ``.h`` files: equal for equal files of equal names."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
