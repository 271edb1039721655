"""Folders that outlive a clone, for what a run makes and the next one need not make again."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def warm_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/fairlead/NAME, or that below ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "fairlead" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_once(place: Path, make: Callable[[], None]) -> None:
    """Let ``make`` fill this folder unless it did so before, whole. One test process at a time."""
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            make()
            (place / ".ready").touch()
