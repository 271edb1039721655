"""Starts of `fairlead serve`, part by part: seconds by the clock, and of the processors.

Each model's starts run in turns: one of each tree of sources, and so on. The machine may be busy:
then the processors' seconds are the figures to compare, of both processes, of the engine's also by
part, under the names that the log gives them. What the self-test's first pass takes counts as its,
with the kernels after it: the log names each part once. All modules have byte code, as setup leaves
them: of a start that is not counted.

    python -m benchmarks.starts --model demo: --model "135 M" --model "0.5 B" [--against FOLDER]

Beside them stands what reading the weights takes: by the clock, from files that were read before
into memory that is used again, the best of three; and the clock's seconds of the part `weights`.

``--threads 1`` sets OMP_NUM_THREADS: on a busy machine threads spend processor time on waiting for
each other.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import models

ROOT = Path(__file__).parents[1]
PACKAGES = ("operator", "runtime", "kernels")
TICK = os.sysconf("SC_CLK_TCK")
PARTS = ("imports", "weights", "kernels", "self_test", "profile", "cache")


class Start(NamedTuple):
    """Seconds until ready: by the clock, of the processors in the HTTP process and the engine's,
    and in the engine's those of each part; ``weights`` those of this part by the clock.
    """

    clock: float
    http: float
    engine: float
    parts: dict[str, float]
    weights: float


def start(model: str, tree: Path, options: Sequence[str], settings: Mapping[str, str]) -> Start:
    """One start of the sources in ``tree``, with ``settings`` in its environment. Raises
    RuntimeError with the log where it fails.
    """
    environment = {
        **os.environ,
        **settings,
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
        "HF_HUB_OFFLINE": "1",
    }
    arguments = ["serve", model, "--port=0", "--admin-port=0", "--log-format=json", *options]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "fairlead_runtime", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    ) as server:
        lines: list[str] = []
        part, parts, last = "imports", dict.fromkeys(PARTS, 0.0), 0.0
        weights, last_clock = 0.0, 0.0
        for line in server.stderr or ():
            lines.append(line)
            said = json.loads(line)["message"] if line.startswith("{") else ""
            if said != "serving" and not said.startswith("starting: "):
                continue
            clock = time.monotonic() - began
            children = _children(server.pid)
            engine = sum(map(_seconds, children))
            parts[part] += engine - last
            weights += (clock - last_clock) * (part == "weights")
            part, last, last_clock = said.removeprefix("starting: "), engine, clock
            if said == "serving":
                found = Start(clock, _seconds(server.pid), engine, parts, weights)
                server.send_signal(signal.SIGINT)
                server.communicate()
                return found
    raise RuntimeError("".join(lines))


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _seconds(pid: int) -> float:
    """User's and system's, of the process and of those that it has waited for."""
    with contextlib.suppress(FileNotFoundError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICK
    return 0.0


def _reading(folder: Path) -> float:
    """Seconds by the clock to read the weights of a model once; 0 for one that is no folder."""
    files, buffer = sorted(folder.glob("*.safetensors")), bytearray(64 << 20)

    def read() -> float:
        began = time.monotonic()
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
        return time.monotonic() - began

    return min(read() for _ in range(4)) if files else 0.0


@contextlib.contextmanager
def _folder(model: str) -> Iterator[str]:
    """What to serve: a shape of ``models`` is made first, all else is what `serve` takes."""
    if model not in (*models.SHAPES, models.GPT2, models.SMOLLM2):
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        models.save(model, Path(made))
        yield made


def _line(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="a shape, SmolLM2, or what serve takes")
    parser.add_argument("--against", type=Path, help="another checkout, whose starts run in turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the engine (default: what it takes)")
    parser.add_argument("--options", default="", help="flags of serve, in one word")
    options = parser.parse_args()
    trees = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as byte_code:
        settings = {"PYTHONPYCACHEPREFIX": byte_code, "PYTHONDONTWRITEBYTECODE": ""}
        if options.threads:
            settings["OMP_NUM_THREADS"] = str(options.threads)
        for tree in trees:
            start("demo:", tree, (), settings)
        _compare(options, trees, settings)


def _compare(
    options: argparse.Namespace, trees: Sequence[Path], settings: Mapping[str, str]
) -> None:
    columns = ["model", "sources", "clock", "both processes", "HTTP", "engine", *PARTS]
    columns += ["weights by the clock", "reading them"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for model in options.model or ["demo:", models.SMOLLM2, "0.5 B"]:
        with _folder(model) as folder:
            starts: dict[Path, list[Start]] = {tree: [] for tree in trees}
            for _ in range(options.rounds):
                for tree in trees:
                    starts[tree].append(start(folder, tree, options.options.split(), settings))
            reading = _reading(Path(folder))
        for tree, several in starts.items():
            cells = [
                [one.clock for one in several],
                [one.http + one.engine for one in several],
                [one.http for one in several],
                [one.engine for one in several],
                *([one.parts[part] for one in several] for part in PARTS),
                [one.weights for one in several],
                [reading],
            ]
            name = "these" if tree == ROOT else "the other"
            print(f"| {model} | {name} | {' | '.join(map(_line, cells))} |", flush=True)


if __name__ == "__main__":
    main()
