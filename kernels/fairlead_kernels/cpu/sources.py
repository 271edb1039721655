"""What the build of the C++ sources and the loader of the libraries both know: for which machines
they are, and a name for the sources' content, which a library built from them carries.

Used while the package is built, when torch may be absent, and when a library is loaded.
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path


def why_not_here() -> str:
    """Why this machine has no libraries, whatever compiler it has; empty where it can have them."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return ""
    return f"they are for Linux on x86-64, not {sysconfig.get_platform()}"


def hash_sources(folder: Path) -> str:
    """The same for the same ``.cpp`` and ``.h`` files of the same names."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
