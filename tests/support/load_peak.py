"""Loads models and measures what a process takes meanwhile, in a process of its own: what threads
of other tests free while a model is loaded would hide some of it.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig


class Measured(NamedTuple):
    """Bytes of the model's tensors, and beyond what there was before: of anonymous memory at the
    peak and in the end, and of all resident memory, with pages that are mapped from files, at the
    peak after the weights were loaded. Mapped pages alone may be dropped at any time.
    """

    weights: int
    peak: int
    held: int
    resident: int
    fusion: str


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


class _Peak(threading.Thread):
    """The most anonymous memory while it runs, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._most = 0
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.wait(0.001):
            self._most = max(self._most, _status("RssAnon"))

    def end(self) -> int:
        self._ends.set()
        self.join()
        return max(self._most, _status("RssAnon"))


def measure_alone(cases: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> dict[str, Measured]:
    """By name what each model's folder takes with its settings, one after the other."""
    given = json.dumps([(str(path), settings) for path, settings in cases.values()])
    ran = subprocess.run(
        [sys.executable, "-m", "support.load_peak", given],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(ran.stdout.splitlines()[-1])
    return {name: Measured(*each) for name, each in zip(cases, figures, strict=True)}


def main() -> None:
    figures = []
    for folder, settings in json.loads(sys.argv[1]):
        # What the first model of these sizes brings: libraries, and most of what they keep.
        _measure(Path(folder), EngineConfig(**settings))
        figures.append(_measure(Path(folder), EngineConfig(**settings)))
    print(json.dumps(figures))


def _measure(path: Path, config: EngineConfig) -> Measured:
    release_memory()
    before, resident = _status("RssAnon"), _status("VmRSS")
    peak = _Peak()
    peak.start()
    loaded = loading.load(path, config=config)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    served, _ = selftest.prepare_and_test(
        loaded, config.kernels, config.quantization, fp8_cache=config.fp8_cache
    )
    most, highest = peak.end(), _status("VmHWM")
    release_memory()
    return Measured(
        served.model.weight_bytes,
        most - before,
        _status("RssAnon") - before,
        highest - resident,
        str(served.fusion),
    )


if __name__ == "__main__":
    main()
