"""A name for the content of the C++ sources, which a library built from them carries.

Used while the package is built, when torch may be absent, and when a library is loaded.
"""

import hashlib
from pathlib import Path


def hash_sources(folder: Path) -> str:
    """The same for the same ``.cpp`` and ``.h`` files of the same names."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
