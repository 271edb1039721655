"""Folders that outlive a clone, for what a run makes and the next one need not make again."""

import os
from pathlib import Path


def warm_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/fairlead/NAME, or that below ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "fairlead" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
