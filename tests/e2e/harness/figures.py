"""What a run measures, for `benchmarks/cluster.md`: named values by scenario, and timelines."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FILE = "FAIRLEAD_E2E_FIGURES"


@dataclass(slots=True)
class Figures:
    """Values in seconds, counts or percent, by scenario and name."""

    values: dict[str, dict[str, float | str]] = field(default_factory=dict)

    def note(self, scenario: str, name: str, value: float | str) -> None:
        rounded = round(value, 2) if isinstance(value, float) else value
        self.values.setdefault(scenario, {})[name] = rounded
        print(f"[e2e] {scenario}: {name} = {rounded}")

    @contextmanager
    def timed(self, scenario: str, name: str) -> Iterator[None]:
        """Note how many seconds the block took, if it ends well."""
        began = time.monotonic()
        yield
        self.note(scenario, name, time.monotonic() - began)

    def write(self) -> None:
        if path := os.environ.get(FILE):
            Path(path).write_text(json.dumps(self.values, indent=1) + "\n")
