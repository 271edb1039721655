"""What a run found: rows of a table, JSON, and which command, versions and device it was."""

import datetime as dt
import importlib.metadata
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.bounds import Kernel
from benchmarks.result_lines import append
from benchmarks.turns import OURS

PROGRAM = ("-m", "benchmarks.gpu")
PACKAGES = ("torch", "transformers", "triton", "flashinfer-python")


@dataclass
class Row:
    """Figures of both sides by round. ``bound``: the same unit, what the device allows; None: there
    is none. ``more``: whether a larger figure is the better one.
    """

    name: str
    unit: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    bound: float | None = None
    more: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times as good ours is as theirs: the median over the rounds that both have,
        which are the last ones.
        """
        turns = zip(reversed(self.ours), reversed(self.theirs), strict=False)
        pairs = [pair for pair in turns if all(pair)]
        ratios = [ours / theirs if self.more else theirs / ours for ours, theirs in pairs]
        return statistics.median(ratios) if ratios else None

    @property
    def share(self) -> float | None:
        """How near ours comes to the bound, 1 is all of it."""
        if self.bound is None or not self.ours:
            return None
        ours = statistics.median(self.ours)
        return ours / self.bound if self.more else self.bound / ours


@dataclass
class Report:
    """All that is printed and written. ``notes``: sentences; ``left_out``: reasons by part;
    ``figures``: a file of JSON lines that has each figure as soon as it is known.
    """

    device: str
    model: str
    dtype: str
    rows: list[Row] = field(default_factory=list)
    cold: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, list[list[str | float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    figures: Path | None = None
    versions: dict[str, str] = field(default_factory=lambda: dict(_versions()))
    date: str = field(default_factory=lambda: dt.datetime.now(dt.UTC).isoformat()[:16])
    command: str = field(
        default_factory=lambda: shlex.join(["python3", "-m", "benchmarks.gpu", *sys.argv[1:]])
    )

    def row(self, name: str, unit: str, bound: float | None = None, *, more: bool = False) -> Row:
        """The row of that name, made at its first use."""
        for one in self.rows:
            if one.name == name:
                return one
        self.rows.append(Row(name, unit, bound=bound, more=more))
        return self.rows[-1]

    def add(self, row: Row, side: str, value: float) -> None:
        """Note a figure of a side, ours by its name."""
        (row.ours if side == OURS else row.theirs).append(value)
        append(
            *(row.name, True),
            value=value,
            path=self.figures,
            unit=row.unit,
            side=side,
            bound=row.bound,
        )

    def start(self, seconds: Mapping[str, float]) -> None:
        """Note what the parts of an engine's start took."""
        self.cold = dict(seconds)
        append("start of the engine", ok=True, value=self.cold, path=self.figures, unit="seconds")

    def longest(self, name: str, steps: int, kernels: Sequence[Kernel]) -> None:
        """Note the kernels that took most of the device's time in so many steps."""
        table: list[list[str | float]] = [
            [kernel.name, kernel.milliseconds / steps, kernel.launches / steps]
            for kernel in kernels
        ]
        self.kernels[name] = table
        unit = "name, ms a step, launches a step"
        append(f"kernels, {name}", ok=True, value=table, path=self.figures, unit=unit)

    def note(self, sentence: str) -> None:
        """Note a sentence that the figures need."""
        self.notes.append(sentence)
        append("note", ok=True, value=sentence, path=self.figures)

    def leave_out(self, name: str, reason: str) -> None:
        """Note why a part did not run."""
        append(name, ok=None, error=reason, path=self.figures)

    def lines(self) -> Iterator[str]:
        """The table in Markdown, with all that is needed to take it again."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"{self.date} UTC, {self.device}; {self.model} in {self.dtype}; {versions}"
        yield f"`{self.command}`"
        yield from (f"{note}" for note in self.notes)
        yield ""
        titles = "transformers | their time / ours | of the bound"
        yield f"| | {OURS}, median (least to most) | {titles} |"
        yield "|---|---|---|---|---|"
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            share = "" if row.share is None else f"{row.share:.0%} of {row.bound:.4g}"
            cells = f"{_spread(row.ours)} | {_spread(row.theirs)} | {ratio} | {share}"
            yield f"| {row.name}, {row.unit} | {cells} |"
        if self.cold:
            yield ""
            yield "| start of the engine | seconds |"
            yield "|---|---|"
            yield from (f"| {name} | {value:.2f} |" for name, value in self.cold.items())
        for name, table in self.kernels.items():
            yield ""
            yield f"| longest kernels, {name} | ms a step | launches a step |"
            yield "|---|---|---|"
            yield from (f"| {kernel} | {ms:.4g} | {count:g} |" for kernel, ms, count in table)
        yield ""
        yield from (f"left out: {name}: {reason}" for name, reason in self.left_out.items())

    def value(self) -> dict[str, Any]:
        rows = [{**vars(row), "ratio": row.ratio, "share": row.share} for row in self.rows]
        values = {name: value for name, value in vars(self).items() if name != "figures"}
        return {**values, "rows": rows, "left_out": dict(self.left_out)}


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "CUDA", str(torch.version.cuda)
