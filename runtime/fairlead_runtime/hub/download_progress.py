"""Show the progress of a download: a bar on a terminal, log lines with a percentage elsewhere.

Owns how progress looks. Downloads nothing itself: ``fetch`` reports its Progress.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from fairlead_runtime.hub.fetch import Progress, Report
from fairlead_runtime.hub.source import resolve
from fairlead_runtime.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)
STEP = 10  # percent between two log lines


@contextmanager
def show_progress(name: str, stream: TextIO | None = None) -> Iterator[Report]:
    """A ``report`` for ``fetch`` that draws a bar on ``stream`` (default: stderr) if that is a
    terminal, and logs otherwise.
    """
    out = stream or sys.stderr
    if not out.isatty():
        yield LogLines(name)
        return
    with _bar(f"fetching {name}", file=out) as bar:
        yield _updates(bar)


def resolve_with_bar(model: str, config: EngineConfig) -> Path:
    """The directory of ``model``. A model from the hub is downloaded, with a bar on a terminal.

    Raises ModelError or ConfigError.
    """
    with _bar("fetching", delay=0.5, disable=None) as bar:
        return resolve(model, revision=config.revision, report=_updates(bar)).path


class LogLines:
    """A ``report`` that writes one log line every STEP percent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.next_percent = 0

    def __call__(self, progress: Progress) -> None:
        percent = 100 * progress.done // progress.total if progress.total else 100
        if percent >= self.next_percent:
            self.next_percent = percent - percent % STEP + STEP
            size = tqdm.format_sizeof(progress.total, "B", 1024)
            log.info("fetching %s: %d %% of %s", self.name, percent, size)


def _bar(description: str, **options: Any) -> "tqdm[Any]":
    return tqdm(desc=description, unit="B", unit_scale=True, leave=False, **options)


def _updates(bar: "tqdm[Any]") -> Report:
    def report(progress: Progress) -> None:
        bar.total = progress.total
        bar.update(progress.done - bar.n)

    return report
