"""Changes of files, also when Kubernetes swaps the symbolic link of a mounted Secret."""

from collections.abc import Sequence
from pathlib import Path

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Differs when one of the files was written or replaced. Raises OSError."""
    stats = [path.stat() for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)
