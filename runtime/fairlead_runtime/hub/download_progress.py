"""A download as people see it: a bar on a terminal, lines with a percentage elsewhere.

Owns how progress looks. Counts nothing itself.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from fairlead_runtime.hub.fetch import Progress, Report

log = logging.getLogger(__name__)
STEP = 10  # percent between two log lines


@contextmanager
def shown(name: str, stream: TextIO | None = None) -> Iterator[Report]:
    """A ``report`` for ``fetch`` that shows its progress on ``stream`` (default: stderr), or logs
    it.
    """
    out = stream or sys.stderr
    if not out.isatty():
        yield Lines(name)
        return
    with tqdm(desc=f"fetching {name}", unit="B", unit_scale=True, leave=False, file=out) as bar:

        def report(progress: Progress) -> None:
            bar.total = progress.total
            bar.update(progress.done - bar.n)

        yield report


class Lines:
    """One log line every STEP percent: what a pod's log can carry."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.next = 0

    def __call__(self, progress: Progress) -> None:
        percent = 100 * progress.done // progress.total if progress.total else 100
        if percent >= self.next:
            self.next = percent - percent % STEP + STEP
            size = tqdm.format_sizeof(progress.total, "B", 1024)
            log.info("fetching %s: %d %% of %s", self.name, percent, size)
